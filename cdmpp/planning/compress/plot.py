"""A compression plan as a picture: what the GPU, the CPU and the network do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.planning.compress.schema import CompressRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"backward": "#9498a0", "compress": "#efb118", "exchange": "#4269d0", "decompress": "#3ca951"}
_ROWS = ("network", "cpu", "gpu")


def draw(request: CompressRequest, answer: dict[str, Any]) -> Figure:
    """A row for each processor; the baselines as lines."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots()
    for span in answer["timeline"]:
        axes.barh(
            _ROWS.index(span["stream"]),
            1e3 * (span["end_s"] - span["start_s"]),
            left=1e3 * span["start_s"],
            height=0.7,
            color=_COLOURS[span["stage"]],
            edgecolor="white",
            linewidth=0.5,
        )
    for name, style in (("none", ":"), ("bytecomp", "--")):
        axes.axvline(1e3 * answer["baselines"][name], color="#ff725c", linestyle=style, linewidth=1)
        axes.annotate(name, (1e3 * answer["baselines"][name], 2.45), fontsize=8, ha="right", va="bottom", rotation=0)
    axes.set_yticks(range(len(_ROWS)), _ROWS)
    axes.set_ylim(-0.5, 2.8)
    axes.set_xlabel("time from the start of the backward pass (ms)")
    axes.legend(
        handles=[Patch(color=colour, label=stage) for stage, colour in _COLOURS.items()],
        frameon=False,
        ncols=4,
        fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.5, 1.18),
    )
    return figure
