"""Search over a replayed trace for buckets of all-reduces and fused kernels, after dPRO (arXiv:2205.02473).

A change applies to all iterations and ranks. It is accepted if the replay of the changed graph is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cdmpp.errors import FieldError
from cdmpp.predict.rendering import Table
from cdmpp.simulate.traces.analysis import PathPart, path_shares
from cdmpp.simulate.traces.changes import SearchPlan, SearchSpace
from cdmpp.simulate.traces.nodes import TraceGraph
from cdmpp.simulate.traces.what_if import signed
from cdmpp.utils.units import format_latency

#: A change that saves less than this share of an iteration is rounding.
_LEAST_SAVING = 1e-6
_MOST_REJECTED = 10


@dataclass(frozen=True)
class SearchTrial:
    """A change that was tried. Times are of one replayed iteration."""

    name: str
    kind: Literal["buckets", "fusion"]
    before_s: float  # without it, with the changes that were accepted before
    seconds: float | None  # with it; None if it cannot be replayed
    reason: str = ""  # why it cannot be replayed

    @property
    def saving_s(self) -> float | None:
        """What it saves; negative for a loss."""
        return None if self.seconds is None else self.before_s - self.seconds


@dataclass(frozen=True)
class TraceSearch:
    """Result of a search; times are of one replayed iteration, in seconds.

    Attributes
    ----------
    before_s, after_s : float
        Without changes, and with all accepted ones.
    accepted, rejected : list of SearchTrial
        Accepted changes in their order, each on top of those before it; rejected ones, each as it was tried last.
    critical_path : list of PathPart
        With all accepted changes.
    replays : int
        Combinations that were replayed.
    complete : bool
        Whether no further single change helps; False if the limit of replays ended the search.
    remarks : list of str
        What the times rest on, and what was not searched.
    """

    before_s: float
    after_s: float
    accepted: list[SearchTrial]
    rejected: list[SearchTrial]
    critical_path: list[PathPart]
    replays: int
    complete: bool
    remarks: list[str]

    def tables(self, critical_path: Sequence[PathPart]) -> list[Table]:
        """The result for a terminal, beside the critical path without changes."""
        ended = "no further change helps" if self.complete else "ended by the limit of replays"
        rows = [
            (t.name, verdict, *("-" if s is None else signed(s) for s in (t.before_s, t.seconds, t.saving_s)))
            for verdict, trials in (("accepted", self.accepted), ("rejected", self.rejected[:_MOST_REJECTED]))
            for t in trials
        ]
        more = len(self.rejected) - _MOST_REJECTED
        before, after = ({p.label: p.seconds for p in path} for path in (critical_path, self.critical_path))
        changed = {label: after.get(label, 0.0) - before.get(label, 0.0) for label in {**before, **after}}
        largest = sorted((label for label, s in changed.items() if s), key=lambda label: -abs(changed[label]))[:8]
        path = [(at, *(format_latency(times.get(at, 0.0)) for times in (before, after))) for at in largest]
        return [
            Table.lines(
                f"search: iteration {format_latency(self.before_s)} -> {format_latency(self.after_s)}  "
                f"[{self.replays} replays, {ended}]"
            ),
            Table(("change", "", "before", "after", "saving"), rows, (2, 3, 4)),
            Table.lines(f"... and {more} more rejected (--json has all)" if more > 0 else ""),
            *([Table(("critical path", "before", "after"), path, (1, 2))] if path else []),
            Table.lines(*dict.fromkeys(f"cannot be replayed (-): {t.reason}" for t in self.rejected if t.reason)),
            Table.lines(*self.remarks),
        ]


def search_changes(graph: TraceGraph, all_reduce_latency_s: float | None, max_replays: int) -> TraceSearch:
    """Improve an iteration by one change at a time (coordinate descent), those on the critical path first.

    ``all_reduce_latency_s``: of an all-reduce without bytes; None: from a line through the all-reduces of the trace.
    """
    search = SearchSpace(graph, all_reduce_latency_s)
    plan = SearchPlan((1,) * len(search.buckets))
    best_s, changed, timeline = search.replay(plan)
    before_s, accepted, rejected, tried = best_s, list[SearchTrial](), dict[str, SearchTrial](), {plan}
    again, complete = True, True
    while again and complete:
        again = False
        for move in search.moves(plan, timeline):
            candidate = move.on(plan)
            if candidate in tried:
                continue
            if len(tried) >= max_replays:
                complete = False
                break
            tried.add(candidate)
            trial = SearchTrial(move.name, "fusion" if move.fused else "buckets", best_s, None)
            try:
                result = search.replay(candidate)
            except FieldError as error:
                rejected[move.name] = replace(trial, reason=error.message.partition(":")[0])
                continue
            rejected[move.name] = replace(trial, seconds=result[0])
            if result[0] < best_s * (1 - _LEAST_SAVING):
                accepted.append(rejected.pop(move.name))
                (best_s, changed, timeline), plan, again = result, candidate, True
    path, last = path_shares(changed, timeline), list(rejected.values())
    return TraceSearch(before_s, best_s, accepted, last, path, len(tried), complete, search.remarks)
