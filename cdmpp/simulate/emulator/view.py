"""Plot of a simulated step: timelines of the ranks, and their peak memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.errors import FieldError
from cdmpp.predict.requests.plot import (
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    RED,
    YELLOW,
    Bar,
    byte_unit,
    draw_legend,
    draw_timeline,
    new_figure,
)
from cdmpp.simulate.emulator.schema import SimulatePlan, SimulateRequest, TimelinePass

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"F": BLUE, "B": GREEN, "W": YELLOW, "out": RED, "in": PURPLE}
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients", "out": "copy to the host", "in": "copy back"}


def draw(request: SimulateRequest, plan: SimulatePlan) -> Figure:
    """Rows of ranks over time; beside them their peak memory, where there is any.

    Raises
    ------
    FieldError
        The plan has no timeline.
    """
    if plan.timeline is None:
        raise FieldError("a figure needs the timeline", path="timeline", hint='leave out "timeline": false')
    ranks = len(plan.ranks)
    figure = new_figure(11, 1.6 + 0.42 * min(ranks, 40))
    with_memory = plan.peak_bytes > 0
    axes, *others = figure.subplots(
        1, 1 + with_memory, squeeze=False, sharey=True, gridspec_kw={"width_ratios": [5, 1][: 1 + with_memory]}
    )[0]
    passes = [*plan.timeline, *plan.copies]
    layers = 1 + max(p.stage for p in passes) // ranks
    bars = [_bar(p, ranks, layers) for p in passes]
    draw_timeline(axes, bars, [f"rank {rank.rank}" for rank in plan.ranks], plan.makespan_s)
    axes.set_title(f"{plan.schedule}: bubble {100 * plan.bubble:.1f} %, {100 * plan.gap:.1f} % above the lower bound")
    for panel in others:
        factor, unit = byte_unit(plan.peak_bytes)
        panel.barh(range(ranks), [factor * rank.peak_bytes for rank in plan.ranks], color=GREY, height=0.7)
        if request.memory_bytes is not None:
            panel.axvline(factor * request.memory_bytes, color=RED, label="memory limit")
        panel.set_xlabel(f"peak memory ({unit})")
    kinds = {p.kind for p in passes}
    draw_legend(figure, {_NAMES[kind]: colour for kind, colour in _COLOURS.items() if kind in kinds})
    return figure


def _bar(timeline_pass: TimelinePass, ranks: int, layers: int) -> Bar:
    """Copies are narrow and below the passes; later virtual stages of a rank are paler."""
    from matplotlib.colors import to_rgba

    copied = timeline_pass.kind in ("out", "in")
    return Bar(
        timeline_pass.rank + (0.4 if copied else 0.0),
        timeline_pass.start_s,
        timeline_pass.end_s,
        to_rgba(_COLOURS[timeline_pass.kind], 1.0 - 0.5 * (timeline_pass.stage // ranks) / layers),
        "" if copied else str(timeline_pass.micro_batch),
        height=0.12 if copied else 0.7,
    )
