"""Plot of an RL plan: length histogram with the tail split, Pareto front of time and price, stages of a step."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from cdmpp.plan.rl.plan_schema import RlPlan
from cdmpp.plan.rl.schema import RlRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TAIL, _REGULAR, _CHOSEN, _WEIGHTS = "#efb118", "#4269d0", "#d0342c", "#6cc5b0"


def draw(request: RlRequest, plan: RlPlan) -> Figure:
    """Histogram of the lengths with samples flagged as long, the Pareto front and the plan, and the stages."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_lengths(left, request, plan)
    _draw_front(middle, request, plan)
    _draw_stages(right, plan)
    return figure


def _draw_stages(axes: Axes, plan: RlPlan) -> None:
    """Seconds of each stage and each pool, and of the transfer of the weights, beside the step."""
    generation, training, streaming = plan.generation, plan.training, plan.streaming
    bars = [(f"generation, {part.pool}", part.time_s, _REGULAR) for part in generation.parts]
    if not bars:
        bars = [(f"generation, {generation.pool}", generation.time_s, _REGULAR)]
    if generation.stage_s > generation.time_s:
        bars.append(("with inference", generation.stage_s, _REGULAR))
    if training is not None:
        bars.append((f"training, {training.pool}", training.time_s, _TAIL))
    if streaming is not None and streaming.weights_s:
        bars.append(("weights", streaming.weights_s, _WEIGHTS))
        bars.append(("weights, not overlapped", streaming.weights_exposed_s, _WEIGHTS))
    names, seconds, colors = zip(*bars, strict=True)
    axes.barh(range(len(bars)), seconds, color=colors)
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.axvline(plan.step_s, color=_CHOSEN, label="step")
    axes.set(xlabel="seconds", title="Stages of a step")
    axes.legend(fontsize=8)


def _draw_lengths(axes: Axes, request: RlRequest, plan: RlPlan) -> None:
    split, histogram, steps = plan.tail_split, plan.lengths.histogram, max(plan.draws, 1)
    widths = [high - low for low, high in pairwise(histogram.edges)]
    regular = [count / steps for count in histogram.regular]
    tail = [count / steps for count in histogram.tail]
    labels = ["regular samples", "samples flagged as long"]
    if split.used:
        labels = [
            f"{label}: {group.instances} instances, batch {group.batch}"
            for label, group in zip(labels, (split.regular, split.tail), strict=True)
        ]
    border = f"minimum length of the longest {100 * request.ranker.share:.0f} %"
    axes.bar(histogram.edges[:-1], regular, widths, align="edge", color=_REGULAR, label=labels[0])
    axes.bar(histogram.edges[:-1], tail, widths, align="edge", bottom=regular, color=_TAIL, label=labels[1])
    axes.axvline(plan.lengths.tail_border, color="black", linestyle="--", linewidth=1, label=border)
    axes.set_xscale("log")
    # Leave room for the legend above the bars.
    axes.set_ylim(0, 1.4 * max([1e-9, *(a + b for a, b in zip(regular, tail, strict=True))]))
    axes.set(xlabel="response length (tokens)", ylabel="samples per step", title="Response lengths and tail split")
    axes.legend(fontsize=8)


def _draw_front(axes: Axes, request: RlRequest, plan: RlPlan) -> None:
    priced = any(pool.price_per_hour for pool in request.pools)
    training = plan.training
    units = plan.generation.instances + (0 if training is None or training.shared else training.units)
    axes.plot(
        [sizes.step_s for sizes in plan.pareto],
        [sizes.price if priced else sizes.units for sizes in plan.pareto],
        "o-",
        color=_REGULAR,
        markersize=4,
        label="Pareto front of sizes, without migration",
    )
    axes.plot(
        [plan.step_s], [plan.price_per_step if priced else units], "*", color=_CHOSEN, markersize=13, label="the plan"
    )
    axes.axvline(plan.lower_bound_s, color="black", linestyle=":", linewidth=1, label="lower bound of the step time")
    axes.set(
        xlabel="simulated step (s)",
        ylabel="price of a step" if priced else "units",
        title="Step time and price" if priced else "Step time and units",
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
