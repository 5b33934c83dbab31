"""A fused pipeline as a picture: what each rank does when, and what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.planning.fused.schema import FusedRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Forward and backward of each model: light and dark of one hue.
COLOURS = (
    ("#9ecae9", "#4c78a8"),
    ("#ffbf79", "#f58518"),
    ("#8cd17d", "#3f8f3f"),
    ("#d4a6c8", "#9d5b94"),
    ("#ff9d98", "#d33f49"),
    ("#bab0ac", "#6b625e"),
    ("#f2cf5b", "#b79a20"),
    ("#83bcb6", "#3a827c"),
)


def draw(request: FusedRequest, answer: dict[str, Any]) -> Figure:
    """Timeline of the ranks, and beside it their peak memory."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    order = answer["order"]
    span = answer["makespan_s"]
    scale, unit = next((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (0.0, "ns")) if span >= s)
    scale = scale or 1e-9
    figure = Figure(figsize=(12, 1.6 + 0.28 * len(order)), layout="constrained")
    timeline, memory = figure.subplots(1, 2, sharey=True, width_ratios=[8, 1])
    for rank, row in enumerate(order):
        starts = np.array([step["start_s"] for step in row]) / scale
        ends = np.array([step["end_s"] for step in row]) / scale
        colours = [COLOURS[step["model"]][step["pass"] == "B"] for step in row]
        timeline.barh(
            np.full(len(row), rank),
            ends - starts,
            left=starts,
            height=0.86,
            color=colours,
            edgecolor="white",
            linewidth=0.3 if len(row) < 300 else 0,
        )
    bound = answer["lower_bound_s"] / scale
    timeline.axvline(bound, color="black", linewidth=1, linestyle="--")
    timeline.set_xlim(0, span / scale)
    timeline.invert_yaxis()
    timeline.set_xlabel(f"time ({unit}); dashed: lower bound")
    timeline.set_ylabel("rank")
    timeline.yaxis.get_major_locator().set_params(integer=True)
    memory.barh(range(len(order)), answer["rank_peak_activations"], color="#9498a0")
    memory.set_xlabel("most activations")
    handles = [
        Patch(color=COLOURS[m][back], label=f"model {m} ({form.direction}) {'backward' if back else 'forward'}")
        for m, form in enumerate(request.models)
        for back in (False, True)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 4), frameon=False)
    return figure
