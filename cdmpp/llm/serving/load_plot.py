"""Latency against throughput of served models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cdmpp.llm.serving.simulate import ServingResult
from cdmpp.predict.requests.plot import colours_of, draw_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_load(curves: Mapping[str, Sequence[ServingResult]], goals: Mapping[str, float | None] | None = None) -> Figure:
    """Time between tokens and time to the first one over the output tokens of a GPU; medians, and shaded up to 99 %.

    ``curves``: results by device, in order of the load. ``goals``: seconds of "ttft_s" and "tpot_s", as dashed lines.
    """
    figure = new_figure(8.0, 3.6)
    panels = figure.subplots(1, 2)
    colours = colours_of(list(curves))
    for axes, name, label, factor in (
        (panels[0], "tpot_s", "time between tokens (ms)", 1e3),
        (panels[1], "ttft_s", "time to the first token (s)", 1.0),
    ):
        for device, results in curves.items():
            shown = [r for r in results if len(r.measured(name))]
            across = [r.throughput_tokens_per_s / r.gpus for r in shown]
            middle, high = ([factor * r.percentile(name, q) for r in shown] for q in (50, 99))
            axes.plot(across, middle, color=colours[device], marker="o", markersize=3, linewidth=1.5)
            axes.fill_between(across, middle, high, color=colours[device], alpha=0.15, linewidth=0)
        goal = (goals or {}).get(name)
        if goal is not None:
            axes.axhline(factor * goal, color="black", linewidth=1, linestyle="--", label="goal")
        axes.set_xlabel("output tokens per second and GPU")
        axes.set_ylabel(label)
    panels[0].set_ylim(bottom=0)
    panels[1].set_yscale("log")
    draw_legend(figure, colours)
    return figure
