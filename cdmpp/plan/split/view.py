"""Plot of a split: time and memory of each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.plan.split.schema import SplitPlan, SplitRequest
from cdmpp.predict.requests.plot import BLUE, GREEN, GREY, RED, byte_unit, draw_legend, new_figure, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(request: SplitRequest, plan: SplitPlan) -> Figure:
    """Bars of the stages with the slowest stages of the baselines, and memory with its limits."""
    stages = plan.stages
    with_memory = any(stage.peak_bytes for stage in stages)
    figure = new_figure(10 if with_memory else 7, 1.8 + 0.32 * len(stages))
    axes, *others = figure.subplots(1, 2 if with_memory else 1, squeeze=False, sharey=True)[0]
    rows = range(len(stages))
    factor, unit = time_unit(plan.slowest_s)
    forward = [factor * stage.forward_s for stage in stages]
    axes.barh(rows, forward, color=BLUE)
    axes.barh(rows, [factor * stage.backward_s for stage in stages], left=forward, color=GREEN)
    if plan.goal == "slowest":
        for (name, seconds), style in zip(plan.baselines.items(), ("--", ":"), strict=True):
            axes.axvline(factor * seconds, color=GREY, linestyle=style, label=f"slowest stage of {name}")
    axes.set_yticks(rows, [f"stage {s.stage}: layers {s.first_layer} to {s.last_layer}" for s in stages])
    axes.set_ylim(len(stages) - 0.4, -0.6)
    axes.set_xlabel(f"one micro-batch ({unit})")
    axes.set_title(f"1F1B step: {factor * plan.step_s:.4g} {unit}, bubble {100 * plan.bubble:.1f} %")
    for panel in others:
        _draw_memory(panel, request, plan)
    draw_legend(figure, {"forward": BLUE, "backward": GREEN})
    return figure


def _draw_memory(axes: Axes, request: SplitRequest, plan: SplitPlan) -> None:
    factor, unit = byte_unit(max(stage.peak_bytes for stage in plan.stages))
    axes.barh(range(len(plan.stages)), [factor * stage.peak_bytes for stage in plan.stages], color=GREY)
    for row, stage in enumerate(plan.stages):
        limit = request.rank_forms[stage.rank].memory_bytes
        if limit is not None:
            axes.plot([factor * limit] * 2, [row - 0.4, row + 0.4], color=RED, label="memory limit")
    axes.set_xlabel(f"peak memory ({unit})")
