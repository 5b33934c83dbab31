"""An application's batches over time, a row for each engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.planning.application.schema import ApplicationRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")


def draw(request: ApplicationRequest, answer: dict[str, Any]) -> Figure:
    """Boxes of batches with the number of primitives in each."""
    from matplotlib.figure import Figure

    names = [engine.name for engine in request.engines]
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(names)), layout="constrained")
    axes = figure.subplots()
    for batch in answer["batches"]:
        row, wide = names.index(batch["engine"]), batch["end_s"] - batch["start_s"]
        axes.barh(row, wide, left=batch["start_s"], color=_COLOURS[row % len(_COLOURS)], edgecolor="white", height=0.7)
        if wide > 0.02 * answer["makespan_s"]:
            axes.text(batch["start_s"] + wide / 2, row, str(len(batch["members"])), ha="center", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time (s); numbers: primitives in a batch")
    axes.set_title(f"{answer['policy']}: mean latency {answer['mean_latency_s']:.4g} s")
    return figure
