"""Timelines (Gantt charts) of plans, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import MissingDependencyError, install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: A name or hexadecimal code, or shares of red, green, blue and opacity.
Colour = str | tuple[float, ...]
PALETTE = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#6cc5b0", "#9c6b4e", "#ff8ab7", "#97bbf5", "#9498a0")
BLUE, YELLOW, GREEN, RED, PURPLE = PALETTE[:5]
GREY, PALE_GREY = "#9498a0", "#d7dce3"
#: More bars are not drawn: they would not be visible.
MAX_BARS = 40_000
MAX_ROW_LABELS = 80
_TIME_UNITS = ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (float("inf"), 1.0, "s"))
_BYTE_UNITS = ((1e3, 1.0, "B"), (1e6, 1e-3, "kB"), (1e9, 1e-6, "MB"), (float("inf"), 1e-9, "GB"))
#: Width in inches of a character at size 1 point.
_CHARACTER = 0.0105


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a timeline."""

    #: 0 is the top row; a fraction moves the bar below the middle of its row.
    row: float
    start_s: float
    end_s: float
    colour: Colour
    #: Written in the bar where it is wide enough.
    text: str = ""
    #: Draws a black outline.
    outlined: bool = False
    #: 1 is the distance of two rows.
    height: float = 0.8


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches.

    Raises MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("a figure needs matplotlib", hint=install_hint("plan")) from error
    return Figure(figsize=(width, height), layout="constrained")


def write_figure(draw: Callable[[], Figure], target: Any, **options: Any) -> None:
    """Draw a figure and write it with ``options`` of ``savefig``; names are written as they are, also with ``$``.

    Raises MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise MissingDependencyError("a figure needs matplotlib", hint=install_hint("plan")) from error
    with rc_context({"text.parse_math": False}):
        draw().savefig(target, bbox_inches="tight", **options)


def time_unit(seconds: float) -> tuple[float, str]:
    """Factor and unit that make a time readable: (1000.0, "ms") for 0.02."""
    return next((factor, unit) for limit, factor, unit in _TIME_UNITS if seconds < limit)


def byte_unit(size: float) -> tuple[float, str]:
    """Factor and unit that make a number of bytes readable."""
    return next((factor, unit) for limit, factor, unit in _BYTE_UNITS if size < limit)


def shade(colour: str, share: float) -> Colour:
    """A darker colour: ``share`` (0 to 1) of its brightness."""
    from matplotlib.colors import to_rgb

    return tuple(share * channel for channel in to_rgb(colour))


def colours_of(names: Sequence[str], fixed: Mapping[str, Colour] | None = None) -> dict[str, Colour]:
    """A colour for each name: the fixed one, or the next one of the palette that is not among the fixed ones."""
    fixed = fixed or {}
    free = cycle([colour for colour in PALETTE if colour not in fixed.values()])
    return {name: fixed[name] if name in fixed else next(free) for name in names}


def draw_timeline(
    axes: Axes,
    bars: Sequence[Bar],
    rows: Sequence[str],
    end_s: float,
    *,
    marks: Mapping[str, float] | None = None,
    xlabel: str = "time",
) -> None:
    """Draw bars in rows over time, the first :data:`MAX_BARS` of those in rows that exist; the first row is at the top.

    ``end_s``: end of the time axis. ``marks``: labelled vertical lines, in seconds. The unit is added to ``xlabel``.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba_array

    factor, unit = time_unit(end_s)
    drawn = [bar for bar in bars[:MAX_BARS] if bar.row < len(rows)]
    for outlined in (False, True):
        group = [bar for bar in drawn if bar.outlined == outlined]
        if not group:
            continue
        left, right, middle, half = np.array(
            [(factor * b.start_s, factor * b.end_s, b.row, b.height / 2) for b in group]
        ).T
        xs, ys = np.stack([left, left, right, right]), middle + half * np.array([[-1], [1], [1], [-1]])
        edge_width = 1.2 if outlined else 0.3 if len(group) < 300 * len(rows) else 0.0
        axes.add_collection(
            PolyCollection(
                list(np.stack([xs, ys]).T),
                facecolors=to_rgba_array([bar.colour for bar in group]),
                edgecolors="black" if outlined else "white",
                linewidths=edge_width,
                zorder=2 if outlined else 1,
            )
        )
    _write_texts(axes, drawn, factor, end_s)
    for (label, seconds), style in zip((marks or {}).items(), cycle(("--", ":", "-.")), strict=False):
        axes.axvline(factor * seconds, color="black", linewidth=1, linestyle=style, label=label)
    axes.set_xlim(0, factor * max([end_s, *(marks or {}).values()]) * 1.005 or 1.0)
    labelled = range(0, len(rows), 1 + len(rows) // MAX_ROW_LABELS)
    axes.set_yticks(labelled, [rows[row] for row in labelled])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlabel(f"{xlabel} ({unit})")


def _write_texts(axes: Axes, bars: Sequence[Bar], factor: float, end_s: float, size: float = 7) -> None:
    """Write the texts of bars that are wide enough."""
    inches = float(axes.get_window_extent().width) / axes.figure.dpi
    character_s = end_s * size * _CHARACTER / inches
    for bar in bars:
        if bar.text and bar.end_s - bar.start_s > character_s * (len(bar.text) + 1):
            axes.text(
                factor * (bar.start_s + bar.end_s) / 2,
                bar.row,
                bar.text,
                ha="center",
                va="center",
                fontsize=size,
                zorder=3,
                clip_on=True,
            )


def draw_legend(figure: Figure, colours: Mapping[str, Colour], *, outlined: str = "") -> None:
    """Put a legend above the axes: colours by name, the outline, and the marks of all axes."""
    from matplotlib.patches import Patch

    handles: list[object] = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    if outlined:
        handles.append(Patch(facecolor="white", edgecolor="black", label=outlined))
    marks = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
    handles += [line for label, line in marks.items() if not label.startswith("_")]
    if handles:
        figure.legend(
            handles=handles, loc="outside upper center", ncols=min(len(handles), 6), frameon=False, fontsize=8
        )
