"""A replay as a picture: what runs on each stream, the critical path outlined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.errors import DataError
from cdmpp.replay.schema import ReplayRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"compute": "#4269d0", "comm": "#efb118", "gap": "#d7dce3"}
_OTHERS = ("#3ca951", "#a463f2", "#97bbf5", "#ff725c", "#9c6b4e", "#6cc5b0")
#: Beyond so many bars a picture shows nothing more.
_MOST_BARS, _MOST_STREAMS, _MOST_LABELS = 20_000, 64, 120


def draw(request: ReplayRequest, answer: dict[str, Any]) -> Figure:
    """The timeline by (device, stream); colours are classes, black outlines the critical path.

    Raises
    ------
    DataError
        The answer has no timeline, because the request has ``timeline: false``.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    nodes = answer["timeline"]
    if nodes is None:
        raise DataError("the answer has no timeline to draw", hint='leave "timeline" out of the request')
    scale, unit = _unit(answer["makespan_s"])
    streams = [(one["device"], one["stream"]) for one in answer["streams"]][:_MOST_STREAMS]
    row = {stream: i for i, stream in enumerate(streams)}
    held = {node.id: node.collective.ranks for node in request.nodes if node.collective is not None}
    classes = list(dict.fromkeys(node["class"] for node in nodes))
    others = iter(_OTHERS * (len(classes) // len(_OTHERS) + 1))
    colours = {name: _COLOURS.get(name) or next(others) for name in classes}
    critical = {one["id"] for one in answer["critical_path"]}
    figure = Figure(figsize=(10, 1.4 + 0.42 * len(streams)), layout="constrained")
    axes = figure.subplots()
    for name in classes:
        ours = [node for node in nodes[:_MOST_BARS] if node["class"] == name]
        for outlined in (False, True):
            bars = [
                (row[device, node["stream"]], node["start_s"] * scale, (node["end_s"] - node["start_s"]) * scale)
                for node in ours
                if (node["id"] in critical) == outlined
                for device in held.get(node["id"], [node["device"]])
                if (device, node["stream"]) in row
            ]
            axes.barh(
                [bar[0] for bar in bars],
                [bar[2] for bar in bars],
                left=[bar[1] for bar in bars],
                height=0.7,
                color=colours[name],
                edgecolor="black" if outlined else "white",
                linewidth=1.2 if outlined else 0.3,
                zorder=2 if outlined else 1,
            )
    if len(nodes) <= _MOST_LABELS:
        _label(axes, nodes, row, held, scale, answer["makespan_s"])
    axes.set_yticks(range(len(streams)), [f"{device} / {stream}" for device, stream in streams])
    axes.invert_yaxis()
    axes.set_xlabel(f"time ({unit})")
    axes.set_xlim(0, answer["makespan_s"] * scale or 1.0)
    title = f"makespan {answer['makespan_s'] * scale:.4g} {unit}, {100 * answer['gap']:.1f} % above the bound"
    if len(nodes) > _MOST_BARS or len(answer["streams"]) > _MOST_STREAMS:
        title += f" (of {len(nodes):,} nodes on {len(answer['streams'])} streams, a part)"
    axes.set_title(title)
    marks = [Patch(facecolor=colours[name], label=name) for name in classes[:8]]
    marks.append(Patch(facecolor="white", edgecolor="black", label="critical path"))
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
    return figure


def _label(
    axes: Any,
    nodes: list[dict[str, Any]],
    row: dict[tuple[str, str], int],
    held: dict[str, list[str]],
    scale: float,
    makespan: float,
) -> None:
    """Names in bars that are wide enough."""
    for node in nodes:
        wide = node["end_s"] - node["start_s"]
        for device in held.get(node["id"], [node["device"]]):
            if wide > makespan * 0.011 * len(node["id"]) and (device, node["stream"]) in row:
                axes.text(
                    (node["start_s"] + wide / 2) * scale,
                    row[device, node["stream"]],
                    node["id"],
                    ha="center",
                    va="center",
                    fontsize=8,
                    zorder=3,
                )


def _unit(seconds: float) -> tuple[float, str]:
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * scale < 1000:
            return scale, unit
    return 1.0, "s"
