"""The plan of a multimodal pipeline as a picture: what each rank does when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: By module, forward; backward passes have the same colour, darker.
COLOURS = ("#4c9be8", "#f2a33c", "#57b894", "#d46a6a", "#9a7fd1", "#8c8c8c", "#c9b458", "#5fb3c9")


def draw(request: Any, answer: dict[str, Any]) -> Any:
    """One row of bars for each rank, one panel for each step.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    """
    plans = answer["plans"] or [answer]
    panels = [
        (f"step {number}" if answer["plans"] else "", plan["makespan_s"], plan["order"])
        for number, plan in enumerate(plans)
    ]
    return timelines([module.name for module in request.modules], panels)


def timelines(names: Sequence[str], panels: Sequence[tuple[str, float, list[list[dict[str, Any]]]]]) -> Any:
    """Timelines below one another on one axis of time; a panel is (title, makespan, order)."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        from cdmpp.errors import MissingDependencyError

        raise MissingDependencyError(
            "a picture needs matplotlib", hint="pip install '.[plan]' in a checkout of cdmpp"
        ) from error
    ranks = max(len(order) for _, _, order in panels)
    figure = Figure(figsize=(11, 0.8 + len(panels) * (0.8 + 0.32 * ranks)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    longest = max(makespan_s for _, makespan_s, _ in panels)
    scale, unit = next((each for each in ((1e-6, "µs"), (1e-3, "ms")) if longest < 1000 * each[0]), (1.0, "s"))
    for axis, (title, makespan_s, order) in zip(axes, panels, strict=True):
        for rank, row in enumerate(order):
            for which in ("F", "B"):
                for at, name in enumerate(names):
                    mine = [e for e in row if e["pass"] == which and e["module"] == name]
                    axis.broken_barh(
                        [(e["start_s"] / scale, (e["end_s"] - e["start_s"]) / scale) for e in mine],
                        (rank - 0.42, 0.84),
                        color=_shade(COLOURS[at % len(COLOURS)], 1.0 if which == "F" else 0.62),
                        edgecolor="white",
                        linewidth=0.3,
                    )
        axis.axvline(makespan_s / scale, color="black", linewidth=0.8, linestyle="--")
        said = f"{makespan_s / scale:.4g} {unit}"
        axis.set_title(f"{title}: {said}" if title else said, loc="left", fontsize=10)
        axis.set_ylabel("rank")
        axis.set_yticks(range(len(order)))
        axis.invert_yaxis()
    axes[-1].set_xlabel(f"time, {unit}")
    axes[-1].set_xlim(0, longest / scale * 1.01)
    figure.legend(
        handles=[
            Patch(color=_shade(COLOURS[at % len(COLOURS)], dark), label=f"{name} {word}")
            for at, name in enumerate(names)
            for word, dark in (("forward", 1.0), ("backward", 0.62))
        ],
        loc="outside lower center",
        ncols=min(6, 2 * len(names)),
        fontsize=8,
        frameon=False,
    )
    return figure


def _shade(colour: str, share: float) -> tuple[float, float, float]:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 * share for at in (1, 3, 5))
    return red, green, blue
