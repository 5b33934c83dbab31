"""Plot of a multimodal pipeline: timeline of each rank, by module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdmpp.plan.multimodal.schema import MultimodalPlan, MultimodalRequest, ScheduledPass
from cdmpp.predict.requests.plot import Bar, draw_legend, draw_timeline, new_figure, shade

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colour of each module's forward passes; backward passes are darker.
COLOURS = ("#4c9be8", "#f2a33c", "#57b894", "#d46a6a", "#9a7fd1", "#8c8c8c", "#c9b458", "#5fb3c9")
_BACKWARD_SHADE = 0.62


def draw(request: MultimodalRequest, plan: MultimodalPlan) -> Figure:
    """One row for each rank, one panel for each step.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    """
    panels = [
        ("" if plan.plans is None else f"step {number}", step.makespan_s, step.order)
        for number, step in enumerate(plan.step_plans())
    ]
    return draw_timelines([module.name for module in request.modules], panels)


def draw_timelines(names: Sequence[str], panels: Sequence[tuple[str, float, list[list[ScheduledPass]]]]) -> Figure:
    """Timelines below each other on a common time axis.

    Parameters
    ----------
    names : sequence of str
        Modules.
    panels : sequence of (str, float, list of list of ScheduledPass)
        Title, makespan in seconds, and passes of each rank.
    """
    ranks = max(len(order) for _, _, order in panels)
    figure = new_figure(11, 0.8 + len(panels) * (0.8 + 0.32 * ranks))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    longest_s = max(makespan_s for _, makespan_s, _ in panels)
    colours = {
        (name, way): COLOURS[i % len(COLOURS)] if way == "F" else shade(COLOURS[i % len(COLOURS)], _BACKWARD_SHADE)
        for i, name in enumerate(names)
        for way in ("F", "B")
    }
    for axis, (title, makespan_s, order) in zip(axes, panels, strict=True):
        bars = [
            Bar(rank, entry.start_s, entry.end_s, colours[entry.module, entry.pass_], height=0.84)
            for rank, row in enumerate(order)
            for entry in row
        ]
        rows = [f"rank {rank}" for rank in range(len(order))]
        draw_timeline(axis, bars, rows, longest_s, marks={"makespan": makespan_s})
        axis.set_title(title, loc="left", fontsize=10)
        if axis is not axes[-1]:
            axis.set_xlabel("")
    words = {"F": "forward", "B": "backward"}
    draw_legend(figure, {f"{name} {words[way]}": colour for (name, way), colour in colours.items()})
    return figure
