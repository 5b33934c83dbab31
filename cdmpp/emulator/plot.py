"""A step as a picture: what every rank runs when, and beside it what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.emulator.schema import SimulateRequest
from cdmpp.errors import FieldError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"F": "#4269d0", "B": "#3ca951", "W": "#efb118", "out": "#ff725c", "in": "#a463f2"}
WORDS = {"F": "forward", "B": "backward", "W": "weights", "out": "to the host", "in": "from the host"}
#: Micro-batches are numbered in passes of at least this share of the step.
_NUMBERED = 0.012
_SCALES = ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (float("inf"), 1.0, "s"))
_BYTES = ((1e3, 1.0, "B"), (1e6, 1e-3, "kB"), (1e9, 1e-6, "MB"), (float("inf"), 1e-9, "GB"))


def draw(request: SimulateRequest, answer: dict[str, Any]) -> Figure:
    """Rows of ranks over time; bars of their peak memory, where there is any.

    Raises
    ------
    FieldError
        The answer has no timeline.
    """
    from matplotlib.figure import Figure

    if answer["timeline"] is None:
        raise FieldError("a picture needs the timeline", path="timeline", hint='leave out "timeline": false')
    ranks = len(answer["ranks"])
    figure = Figure(figsize=(11, 1.6 + 0.42 * min(ranks, 40)), layout="constrained")
    held = answer["peak_bytes"] > 0
    widths = {"width_ratios": [5, 1]} if held else None
    panels = figure.subplots(1, 2 if held else 1, squeeze=False, sharey=True, gridspec_kw=widths)[0]
    rows(panels[0], answer["timeline"] + answer["copies"], answer["makespan_s"])
    panels[0].set_yticks(range(ranks), [f"rank {one['rank']}" for one in answer["ranks"]])
    panels[0].set_ylim(ranks - 0.45, -0.55)
    panels[0].set_title(
        f"{answer['schedule']}: bubble {100 * answer['bubble']:.1f} %, "
        f"{100 * answer['gap']:.1f} % above the lower bound"
    )
    if held:
        factor, unit = next((f, u) for limit, f, u in _BYTES if answer["peak_bytes"] < limit)
        panels[1].barh(
            range(ranks), [factor * one["peak_bytes"] for one in answer["ranks"]], color="#9498a0", height=0.7
        )
        if request.memory_bytes is not None:
            panels[1].axvline(factor * request.memory_bytes, color="#ff725c")
            panels[1].set_title("red: the limit", fontsize=9)
        panels[1].set_xlabel(f"peak memory ({unit})")
    return figure


def rows(axes: Axes, passes: list[dict[str, Any]], makespan_s: float) -> None:
    """Draw passes as bars in the rows of their ranks, with a legend."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    factor, unit = next((f, u) for limit, f, u in _SCALES if makespan_s < limit)
    kinds = [kind for kind in COLOURS if any(one["pass"] == kind for one in passes)]
    ranks = 1 + max(one["rank"] for one in passes)
    layers = 1 + max(one["stage"] for one in passes) // ranks
    for kind in kinds:
        copied = kind in ("out", "in")
        mine = [one for one in passes if one["pass"] == kind]
        axes.barh(
            [one["rank"] + (0.4 if copied else 0.0) for one in mine],
            [factor * (one["end_s"] - one["start_s"]) for one in mine],
            left=[factor * one["start_s"] for one in mine],
            height=0.12 if copied else 0.7,
            # Virtual stages of a rank: the later the stage, the paler.
            color=[to_rgba(COLOURS[kind], 1.0 - 0.5 * (one["stage"] // ranks) / layers) for one in mine],
            edgecolor="white",
            linewidth=0.4,
        )
        for one in mine:
            if not copied and one["end_s"] - one["start_s"] >= _NUMBERED * makespan_s:
                axes.text(
                    factor * (one["start_s"] + one["end_s"]) / 2,
                    one["rank"],
                    str(one["micro_batch"]),
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white",
                )
    axes.set_xlim(0, factor * makespan_s or 1)
    axes.set_xlabel(f"time ({unit})")
    axes.legend(
        handles=[Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in kinds],
        ncols=len(kinds),
        loc="upper left",
        bbox_to_anchor=(0, -0.16),
        frameon=False,
        fontsize=8,
    )
