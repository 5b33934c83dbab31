"""Plot of a data-parallel plan: iteration time by bucket size, and the all-reduces of the best one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.plan.data_parallel.schema import DataParallelPlan, DataParallelRequest
from cdmpp.predict.requests.plot import (
    BLUE,
    GREY,
    PALE_GREY,
    YELLOW,
    Bar,
    draw_legend,
    draw_timeline,
    new_figure,
    time_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(request: DataParallelRequest, plan: DataParallelPlan) -> Figure:
    """Left the iteration by bucket size with its exposed communication, right the all-reduces over time."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    _draw_choices(left, plan)
    left.set_title(f"{request.ranks} ranks")
    bars = [
        bar
        for row, sent in enumerate(plan.transfers)
        for bar in (Bar(row, sent.ready_s, sent.start_s, PALE_GREY), Bar(row, sent.start_s, sent.end_s, YELLOW))
    ]
    marks = {"end of computation": plan.compute_s, "end of the iteration": plan.iteration_s}
    rows = [str(row) for row in range(len(plan.transfers))]
    draw_timeline(right, bars, rows, plan.iteration_s, marks=marks, xlabel="time since the start")
    right.set_ylabel("all-reduce")
    draw_legend(figure, {"computation": BLUE, "all-reduce": YELLOW, "all-reduce waits": PALE_GREY})
    return figure


def _draw_choices(axes: Axes, plan: DataParallelPlan) -> None:
    factor, unit = time_unit(max(choice.iteration_s for choice in plan.choices))
    names = [str(choice).replace(",", "\n") for choice in plan.choices]
    exposed = [factor * choice.exposed_comm_s for choice in plan.choices]
    rest = [factor * choice.iteration_s - e for choice, e in zip(plan.choices, exposed, strict=True)]
    axes.bar(names, rest, color=BLUE)
    axes.bar(names, exposed, bottom=rest, color=YELLOW)
    axes.axhline(factor * plan.lower_bound_s, color="0.3", linestyle="--", label="lower bound")
    axes.axhline(factor * plan.baselines["no_overlap"], color=GREY, linestyle=":", label="no overlap")
    axes.set_xlabel("bucket size; yellow: exposed")
    axes.set_ylabel(f"iteration ({unit})")
