"""Plot of a fused pipeline: timeline of each rank, and its peak memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.plan.fused.schema import FusedPlan, FusedRequest
from cdmpp.predict.requests.plot import GREY, PALETTE, Bar, draw_legend, draw_timeline, new_figure, shade

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BACKWARD_SHADE = 0.65


def draw(request: FusedRequest, plan: FusedPlan) -> Figure:
    """One row for each rank: its passes over time, and its peak memory; the lower bound as a vertical line."""
    figure = new_figure(12, 1.6 + 0.28 * len(plan.order))
    timeline, memory = figure.subplots(1, 2, sharey=True, width_ratios=[8, 1])
    colours = {
        (model, way): PALETTE[model] if way == "F" else shade(PALETTE[model], _BACKWARD_SHADE)
        for model in range(len(request.models))
        for way in ("F", "B")
    }
    bars = [
        Bar(rank, step.start_s, step.end_s, colours[step.model, step.pass_], height=0.86)
        for rank, row in enumerate(plan.order)
        for step in row
    ]
    rows = [f"rank {rank}" for rank in range(len(plan.order))]
    draw_timeline(timeline, bars, rows, plan.makespan_s, marks={"lower bound": plan.lower_bound_s})
    memory.barh(range(len(plan.order)), plan.rank_peak_activations, color=GREY)
    memory.set_xlabel("peak activations")
    names = {"F": "forward", "B": "backward"}
    draw_legend(
        figure,
        {f"model {m} ({request.models[m].direction}) {names[way]}": colour for (m, way), colour in colours.items()},
    )
    return figure
