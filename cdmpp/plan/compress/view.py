"""Plot of a compression plan: timelines of the GPU, the CPU and the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.plan.compress.schema import CompressPlan, CompressRequest
from cdmpp.predict.requests.plot import BLUE, GREEN, GREY, YELLOW, Bar, draw_legend, draw_timeline, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"backward": GREY, "compress": YELLOW, "exchange": BLUE, "decompress": GREEN}
_ROWS = ("gpu", "cpu", "network")


def draw(request: CompressRequest, plan: CompressPlan) -> Figure:
    """One row for each processor; baselines as vertical lines."""
    figure = new_figure(9, 2.8)
    bars = [
        Bar(_ROWS.index(span.stream), span.start_s, span.end_s, _COLOURS[span.stage], span.tensor)
        for span in plan.timeline
    ]
    marks = {"no compression": plan.baselines["none"], "ByteComp": plan.baselines["bytecomp"]}
    xlabel = "time from the start of the backward pass"
    draw_timeline(figure.subplots(), bars, _ROWS, plan.iteration_s, marks=marks, xlabel=xlabel)
    draw_legend(figure, _COLOURS)
    return figure
