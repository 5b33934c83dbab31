"""Plot of a replay: nodes on each stream, with the critical path outlined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.errors import DataError
from cdmpp.predict.requests import plot
from cdmpp.predict.requests.plot import BLUE, PALE_GREY, YELLOW, Bar, colours_of, draw_legend, draw_timeline, new_figure
from cdmpp.simulate.replay.build import named_ranks
from cdmpp.simulate.replay.schema import ReplayPlan, ReplayRequest
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"compute": BLUE, "comm": YELLOW, "gap": PALE_GREY}
_MOST_STREAMS, _MOST_TEXTS, _MOST_CLASSES = 64, 120, 8


def draw(request: ReplayRequest, plan: ReplayPlan) -> Figure:
    """The timeline by (device, stream); colours are classes, black outlines the critical path.

    Raises
    ------
    DataError
        The plan has no timeline, because the request has ``timeline: false``.
    """
    if plan.timeline is None:
        raise DataError("the plan has no timeline to draw", hint='leave "timeline" out of the request')
    streams = [(use.device, use.stream) for use in plan.streams][:_MOST_STREAMS]
    row = {stream: i for i, stream in enumerate(streams)}
    ranks = {node.id: named for node in request.nodes if (named := named_ranks(node)) is not None}
    colours = colours_of(list(dict.fromkeys(node.class_ for node in plan.timeline)), _COLOURS)
    critical = {node.id for node in plan.critical_path}
    bars = [
        Bar(
            row[device, node.stream],
            node.start_s,
            node.end_s,
            colours[node.class_],
            node.id if len(plan.timeline) <= _MOST_TEXTS else "",
            outlined=node.id in critical,
        )
        for node in plan.timeline[: plot.MAX_BARS]
        for device in ranks.get(node.id, [node.device])
        if (device, node.stream) in row
    ]
    figure = new_figure(10, 1.4 + 0.42 * len(streams))
    axes = figure.subplots()
    draw_timeline(axes, bars, [f"{device} / {stream}" for device, stream in streams], plan.makespan_s)
    title = f"makespan {format_latency(plan.makespan_s)}, {100 * plan.gap:.1f} % above the lower bound"
    if len(bars) > plot.MAX_BARS or len(plan.timeline) > plot.MAX_BARS or len(plan.streams) > _MOST_STREAMS:
        title += f" (part of {len(plan.timeline):,} nodes on {len(plan.streams)} streams)"
    axes.set_title(title)
    draw_legend(figure, dict(list(colours.items())[:_MOST_CLASSES]), outlined="critical path")
    return figure
