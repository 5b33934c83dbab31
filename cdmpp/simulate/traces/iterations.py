"""Iterations of a trace: ranges between marks such as ``ProfilerStep#3``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cdmpp.errors import DataError
from cdmpp.simulate.traces.records import RankTrace

DEFAULT_MARK = r"ProfilerStep#\d+"


@dataclass(frozen=True)
class Window:
    """The iterations that are replayed.

    Attributes
    ----------
    names : tuple of str
        Marks, in order; empty where the trace has none.
    start_s, end_s : float
        From the origin of the trace.
    """

    names: tuple[str, ...]
    start_s: float
    end_s: float

    @property
    def count(self) -> int:
        """Number of iterations; 1 for a trace without marks."""
        return max(len(self.names), 1)


def windows(traces: Sequence[RankTrace], iteration: int | None = None, mark: str | None = None) -> list[Window]:
    """The window of each rank: the marked iterations that all ranks have, or one of them.

    Parameters
    ----------
    traces : sequence of RankTrace
    iteration : int, optional
        Number in the mark (3 is ``ProfilerStep#3``), or position where marks have no number. Default: all.
    mark : str, optional
        Regular expression of the whole name of a mark; default ``ProfilerStep#N``. A trace without such marks is one
        iteration.

    Raises
    ------
    DataError
        The expression is invalid or matches nothing, or the ranks have no such iteration in common.
    """
    try:
        pattern = re.compile(mark or DEFAULT_MARK)
    except re.error as error:
        raise DataError(f"mark {mark!r}: not a regular expression: {error}") from None
    marked = [_marks(trace, pattern) for trace in traces]
    if not any(marked):
        if mark is not None or iteration is not None:
            raise DataError(
                f"{traces[0].path}: no annotation matches {mark or DEFAULT_MARK!r}",
                hint="annotations are: " + (", ".join(_annotations(traces[0])) or "none"),
            )
        return [_whole(trace) for trace in traces]
    common = [key for key in marked[0] if all(key in others for others in marked)]
    if iteration is not None:
        common = [key for key in common if key[0] == iteration]
    if not common:
        listed = [str(number) for number, _ in marked[0]]
        raise DataError(
            f"no iteration {iteration} in all files" if iteration is not None else "no iteration is in all files",
            hint=f"{traces[0].path} has: {', '.join(listed)}",
        )
    return [
        Window(
            tuple(found[key][0] for key in common),
            min(found[key][1] for key in common),
            max(found[key][2] for key in common),
        )
        for found in marked
    ]


def _marks(trace: RankTrace, pattern: re.Pattern[str]) -> dict[tuple[int, int], tuple[str, float, float]]:
    """(number, occurrence) -> name, start and end of a mark."""
    found = sorted(
        (event for event in trace.events if event.kind == "annotation" and pattern.fullmatch(event.name)),
        key=lambda event: event.start_s,
    )
    marks: dict[tuple[int, int], tuple[str, float, float]] = {}
    for position, event in enumerate(found):
        digits = re.search(r"(\d+)\D*$", event.name)
        number = int(digits.group(1)) if digits else position
        times = sum(1 for key in marks if key[0] == number)
        if event.duration_s > 0:
            marks[number, times] = (event.name, event.start_s, event.end_s)
    return marks


def _whole(trace: RankTrace) -> Window:
    return Window((), min(e.start_s for e in trace.events), max(e.end_s for e in trace.events))


def _annotations(trace: RankTrace) -> list[str]:
    return list(dict.fromkeys(event.name for event in trace.events if event.kind == "annotation"))[:20]
