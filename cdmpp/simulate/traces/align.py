"""What the ranks of a trace have in common: iterations, collectives, and the offsets of their clocks that follow.

Iterations are ranges between marks such as ``ProfilerStep#3``.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cdmpp.errors import DataError
from cdmpp.simulate.traces.records import (
    CollectiveCall,
    RankTrace,
    TraceEvent,
    is_communication_kernel,
    is_host_work,
    kind_of,
)

DEFAULT_MARK = r"ProfilerStep#\d+"
#: Share of the matched collectives that may contradict a common clock: timestamps are rounded.
_MOST_CONTRADICTIONS = 0.05


@dataclass(frozen=True)
class Window:
    """The iterations that are replayed."""

    names: tuple[str, ...]  # marks, in order; empty where the trace has none
    # Seconds from the origin of the trace.
    start_s: float
    end_s: float

    @property
    def count(self) -> int:
        """Number of iterations; 1 for a trace without marks."""
        return max(len(self.names), 1)


def windows(traces: Sequence[RankTrace], iteration: int | None = None, mark: str | None = None) -> list[Window]:
    """The window of each rank: the marked iterations that all ranks have, or one of them.

    ``iteration``: number in the mark (3 is ``ProfilerStep#3``), or position where marks have no number. Default: all.
    ``mark``: regular expression of the whole name of a mark; default ``ProfilerStep#N``. A trace without such marks is
    one iteration.
    Raises DataError: the expression is invalid or matches nothing, or the ranks have no such iteration in common.
    """
    try:
        pattern = re.compile(mark or DEFAULT_MARK)
    except re.error as error:
        raise DataError(f"mark {mark!r}: not a regular expression: {error}") from None
    marked = [_marks(trace, pattern) for trace in traces]
    if not any(marked):
        if mark is not None or iteration is not None:
            names = list(dict.fromkeys(event.name for event in traces[0].events if event.kind == "annotation"))
            raise DataError(
                f"{traces[0].path}: no annotation matches {mark or DEFAULT_MARK!r}",
                hint="annotations are: " + (", ".join(names[:20]) or "none"),
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
            tuple(windows[key][0] for key in common),
            min(windows[key][1] for key in common),
            max(windows[key][2] for key in common),
        )
        for windows in marked
    ]


def _marks(trace: RankTrace, pattern: re.Pattern[str]) -> dict[tuple[int, int], tuple[str, float, float]]:
    """(number, occurrence) -> name, start and end of a mark."""
    pairs = sorted(
        (event for event in trace.events if event.kind == "annotation" and pattern.fullmatch(event.name)),
        key=lambda event: event.start_s,
    )
    marks: dict[tuple[int, int], tuple[str, float, float]] = {}
    ends: dict[str, float] = {}
    position = -1
    for event in pairs:
        if event.start_s < ends.get(event.name, -math.inf):
            continue  # the same step, marked on another thread too
        position, ends[event.name] = position + 1, event.end_s
        digits = re.search(r"(\d+)\D*$", event.name)
        number = int(digits.group(1)) if digits else position
        times = sum(1 for key in marks if key[0] == number)
        if event.duration_s > 0:
            marks[number, times] = (event.name, event.start_s, event.end_s)
    return marks


def _whole(trace: RankTrace) -> Window:
    return Window((), min(e.start_s for e in trace.events), max(e.end_s for e in trace.events))


@dataclass
class Alignment:
    """Collectives of several ranks, and their clocks."""

    offsets_s: dict[int, float]  # rank to seconds that are added to its clock
    # Each collective of more than one rank: its event on each rank.
    matches: list[dict[int, TraceEvent]] = field(default_factory=list)
    residual_s: float = 0.0  # median distance between the ends of a collective on two ranks, after the offsets
    remarks: list[str] = field(default_factory=list)


def collective_of(event: TraceEvent) -> CollectiveCall | None:
    """The collective that an event runs; None for other events, and for operators that only issue one."""
    if event.kind == "kernel" and is_communication_kernel(event.name):
        detail = event.detail
        return detail if isinstance(detail, CollectiveCall) else CollectiveCall(kind_of(event.name) or "collective")
    if event.kind in ("annotation", "op") and is_host_work(event.name):
        return event.detail if isinstance(event.detail, CollectiveCall) else CollectiveCall(kind_of(event.name))
    return None


def align(traces: Sequence[RankTrace]) -> Alignment:
    """Match the collectives of all ranks and estimate the offsets of their clocks.

    The n-th collective of one kind, size and process group on a rank is matched with the n-th on the others. A
    collective ends at nearly the same time on all ranks, because none can end before the last one has begun. The
    offset of a clock is the median difference of the ends. Ranks of one machine share a clock, unless a collective
    would end on one rank before it begins on another.
    """
    ranks = [trace.rank or 0 for trace in traces]
    origins = {rank: trace.origin_s - traces[0].origin_s for rank, trace in zip(ranks, traces, strict=True)}
    alignment = Alignment(dict(origins))
    if len(traces) < 2:
        return alignment
    calls = {rank: _of_rank(trace) for rank, trace in zip(ranks, traces, strict=True)}
    for signature in dict.fromkeys(signature for of_rank in calls.values() for signature in of_rank):
        _match(
            alignment, signature, {rank: of_rank[signature] for rank, of_rank in calls.items() if signature in of_rank}
        )
    if not alignment.matches:
        alignment.remarks.append(
            "the ranks have no collective in common: each is replayed alone, on the clock of its own file"
        )
        return alignment
    one_machine = len({trace.host for trace in traces}) == 1 and bool(traces[0].host)
    if not (one_machine and _contradictions(alignment) <= _MOST_CONTRADICTIONS * len(alignment.matches)):
        _estimate(alignment, ranks)
    alignment.matches.sort(key=lambda match: min(e.start_s + alignment.offsets_s[r] for r, e in match.items()))
    ends = [_spread([e.end_s + alignment.offsets_s[r] for r, e in match.items()]) for match in alignment.matches]
    alignment.residual_s = statistics.median(ends)
    broken = _contradictions(alignment)
    if broken > _MOST_CONTRADICTIONS * len(alignment.matches):
        alignment.remarks.append(
            f"{broken} of {len(alignment.matches)} collectives end on one rank before they begin on another: "
            "the files may be of different runs"
        )
    return alignment


def _of_rank(trace: RankTrace) -> dict[tuple[object, ...], list[TraceEvent]]:
    calls: dict[tuple[object, ...], list[TraceEvent]] = {}
    for event in sorted(trace.events, key=lambda event: event.start_s):
        call = collective_of(event)
        if call is not None:
            calls.setdefault(call.signature, []).append(event)
    return calls


def _match(alignment: Alignment, signature: tuple[object, ...], by_rank: Mapping[int, list[TraceEvent]]) -> None:
    """Match the collectives of one signature."""
    if len(by_rank) < 2:
        rank, events = next(iter(by_rank.items()))
        alignment.remarks.append(f"rank {rank} alone has {_named(signature)} ({len(events)} x): replayed as measured")
        return
    reference, first = min(by_rank.items(), key=lambda item: len(item[1]))
    shifts = {rank: _shift(first, events) for rank, events in by_rank.items()}
    for k, event in enumerate(first):
        match = {rank: events[k + shifts[rank]] for rank, events in by_rank.items()}
        alignment.matches.append({**match, reference: event})
    counts = {rank: len(events) for rank, events in by_rank.items()}
    if len(set(counts.values())) > 1:
        lost = sum(counts.values()) - len(first) * len(counts)
        listed = ", ".join(f"rank {rank} {count}" for rank, count in sorted(counts.items()))
        alignment.remarks.append(
            f"the ranks have different numbers of {_named(signature)}: {listed}; {lost} are replayed as measured, "
            "without their counterpart"
        )


def _shift(few: Sequence[TraceEvent], many: Sequence[TraceEvent]) -> int:
    """Position in the longer list of the first of the shorter: where the differences of the ends vary least."""

    def spread(shift: int) -> float:
        differences = [other.end_s - event.end_s for event, other in zip(few, many[shift:], strict=False)]
        middle = statistics.median(differences)
        return statistics.median(abs(difference - middle) for difference in differences)

    return min(range(len(many) - len(few) + 1), key=spread)


def _estimate(alignment: Alignment, ranks: Sequence[int]) -> None:
    """Offsets of all ranks that share collectives with the first, directly or through others."""
    known = {ranks[0]}
    grown = True
    while grown:
        grown = False
        for rank in ranks:
            if rank in known:
                continue
            differences = [
                statistics.fmean(match[r].end_s + alignment.offsets_s[r] for r in match if r in known)
                - match[rank].end_s
                for match in alignment.matches
                if rank in match and any(r in known for r in match)
            ]
            if differences:
                alignment.offsets_s[rank] = statistics.median(differences)
                known.add(rank)
                grown = True
    lost = sorted(set(ranks) - known)
    if lost:
        alignment.remarks.append(
            f"ranks {', '.join(map(str, lost))} share no collective with rank {ranks[0]}: they keep their files' clocks"
        )


def _contradictions(alignment: Alignment) -> int:
    """Number of collectives that end on one rank before they begin on another."""
    offsets, count = alignment.offsets_s, 0
    for match in alignment.matches:
        latest = max(event.start_s + offsets[rank] for rank, event in match.items())
        count += min(event.end_s + offsets[rank] for rank, event in match.items()) < latest - 1e-6
    return count


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _named(signature: tuple[object, ...]) -> str:
    kind, size, group = signature
    text = f"{kind}" + (f" of {size:,.0f} bytes" if isinstance(size, float) else "")
    return text + (f" in group {group}" if group else "")
