"""Search over a replayed trace for buckets of all-reduces and fused kernels, after dPRO (arXiv:2205.02473).

A change applies to all iterations and ranks. It is accepted if the replay of the changed graph is faster.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.predict.rendering import Table
from cdmpp.simulate.replay.engine import Replayer, Timeline, covered_s
from cdmpp.simulate.traces.analysis import PathPart, path_shares
from cdmpp.simulate.traces.nodes import WORKING, TraceGraph, WorkNode
from cdmpp.simulate.traces.what_if import operators_of_node, scale_earlier, signed
from cdmpp.utils.units import format_latency, format_si

#: Operators on each element alone, which can share a kernel with their neighbours.
_ELEMENTWISE = re.compile(
    r"aten::(add|sub|rsub|mul|div|pow|neg|exp|log|abs|r?sqrt|tanh|sigmoid|relu|gelu|silu|erf|maximum|minimum|clamp\w*|"
    r"where|native_dropout|masked_fill|threshold|leaky_relu|hardtanh|addcmul|addcdiv|lerp|fill|zero)(_backward)?_?$"
)
#: A line needs sizes that differ by this factor.
_SPAN = 2.0
#: Parts of a divided all-reduce.
_PARTS = (2, 4)
_Key = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class SearchPlan:
    """A combination of changes."""

    buckets: tuple[int, ...]  # for each all-reduce: 0: it goes with the next one; else its parts, if it goes alone
    fused: frozenset[_Key] = frozenset()


@dataclass(frozen=True)
class SearchMove:
    """A change of a combination: new entries of ``buckets``, and a chain of kernels to fuse."""

    name: str
    buckets: dict[int, int]
    fused: frozenset[_Key] = frozenset()

    def on(self, plan: SearchPlan) -> SearchPlan:
        """The changed combination."""
        buckets = tuple(self.buckets.get(k, value) for k, value in enumerate(plan.buckets))
        return SearchPlan(buckets, plan.fused | self.fused)


def line_latency(points: Sequence[tuple[float, float]]) -> float | None:
    """Seconds at no bytes of the line through the median time of each size; None where the sizes are too near.

    ``points``: bytes and seconds. The result is at most the shortest time.
    """
    sizes = sorted({size for size, _ in points})
    if not sizes or sizes[-1] < _SPAN * sizes[0]:
        return None
    medians = [float(np.median([s for size, s in points if size == at])) for at in sizes]
    return min(max(float(np.polyfit(sizes, medians, 1)[1]), 0.0), min(s for _, s in points))


class SearchSpace:
    """What may change in a graph, and the replay of a combination."""

    def __init__(self, graph: TraceGraph, latency_s: float | None) -> None:
        self.graph, self.latency_s, self.kernel_s = graph, latency_s, 0.0
        self.buckets: list[dict[tuple[int, int], int]] = []  # (rank, iteration) -> node of the all-reduce
        self.chains: dict[_Key, list[list[int]]] = {}
        self.remarks: list[str] = []
        self._calls = [n.call if n.call and n.call.kind == "all_reduce" and n.call.bytes else None for n in graph.nodes]
        self._dependents: dict[int, list[int]] = {}
        self._lanes: dict[tuple[str, str], list[int]] = {}
        for i, node in enumerate(graph.nodes):
            self._lanes.setdefault((node.device, node.stream), []).append(i)
            for dep in node.deps:
                self._dependents.setdefault(dep, []).append(i)
        self._place = {i: k for lane in self._lanes.values() for k, i in enumerate(lane)}
        self._find_buckets()
        self._find_chains()
        self.remarks.append("recomputation is not searched: it costs time and saves memory, and a trace has no memory")

    def _find_buckets(self) -> None:
        nodes, count, source = self.graph.nodes, self.graph.count, "as given"
        groups: dict[str, dict[int, list[int]]] = {}
        for i in sorted(range(len(nodes)), key=lambda i: nodes[i].start_s):
            if (call := self._calls[i]) is not None:
                groups.setdefault(call.group, {}).setdefault(nodes[i].rank, []).append(i)
        if not groups:
            self.remarks.append("buckets are not searched: the trace has no all-reduce with recorded bytes")
            return
        if self.latency_s is None:
            points = [
                (call.bytes or 0.0, nodes[i].duration_s) for i, call in enumerate(self._calls) if call is not None
            ]
            self.latency_s, source = line_latency(points), f"by a line through {len(points)} of them"
        if self.latency_s is None:
            self.remarks.append(
                "buckets are not searched: the sizes of the all-reduces do not tell latency from bandwidth; "
                "all_reduce_latency_s (--all-reduce-us) gives the latency"
            )
            return
        for group, ranks in groups.items():
            rows = {
                (rank, k): own[k * (len(own) // count) : (k + 1) * (len(own) // count)]
                for rank, own in ranks.items()
                for k in range(count)
            }
            sizes = {tuple(self._calls[i].signature for i in row) for row in rows.values()}  # type: ignore[union-attr]
            if len(sizes) > 1 or any(len(own) % count for own in ranks.values()):
                self.remarks.append(f"all-reduces of group {group!r} differ between iterations or ranks, and stay")
            else:
                self.buckets += [dict(zip(rows, column, strict=True)) for column in zip(*rows.values(), strict=True)]
        self.remarks.append(
            f"an all-reduce takes {format_latency(self.latency_s)} without bytes ({source}). Those that go together "
            "save it, and keep the rest of their measured times and the host's calls. Parts are ready in proportion to "
            "the computation since the bucket before"
        )

    def _find_chains(self) -> None:
        """Find element-wise kernels in a row, between which nothing waits or is waited for."""
        nodes, found, points = self.graph.nodes, list[list[int]](), list[tuple[float, float]]()
        for lane in self._lanes.values():
            chain, mark = list[int](), ""
            for i in lane:
                node, size = nodes[i], self._traffic(i)
                at = next((name for name in node.names if name in self.graph.iterations), "") if size else mark
                if at != mark or any(nodes[dep].cause != "launch" for dep in node.deps):
                    chain, mark = [], at
                if size:
                    points.append((size, node.duration_s))
                    chain.append(i)
                    found += [chain] * (len(chain) == 2)
                if i in self._dependents or not (size or node.role in ("host", "gap")):
                    chain = []
        for chain in found:
            key = tuple((nodes[i].operation.name, self._traffic(i)) for i in chain)  # type: ignore[union-attr]
            self.chains.setdefault(key, []).append(chain)
        latency_s = line_latency(points)
        self.kernel_s = latency_s or 0.0
        fixed = "not known" if latency_s is None else f"{format_latency(latency_s)}, by a line through {len(points):,}"
        self.remarks.append(
            f"a fused kernel saves the launches and the fixed time of the kernels after its first ({fixed}). Its "
            "traffic stays: a trace does not tell which tensors it would not write"
            if found
            else "fusion is not searched: no element-wise kernels with recorded shapes in a row"
        )

    def _traffic(self, i: int) -> float:
        """Bytes of an element-wise kernel or operator; 0 for others."""
        node = self.graph.nodes[i]
        if node.role not in ("kernel", "op") or node.operation is None or not _ELEMENTWISE.match(node.operation.name):
            return 0.0
        return sum(spec.tensor_bytes() for spec in operators_of_node(node)[0])

    def moves(self, plan: SearchPlan, timeline: Timeline) -> Iterator[SearchMove]:
        """Sizes of all buckets, then single buckets and kernels by their time on the critical path."""
        calls = [call for bucket in self.buckets if (call := self._calls[next(iter(bucket.values()))]) is not None]
        sizes = [call.bytes or 0.0 for call in calls]
        follows = [a.group == b.group for a, b in pairwise(calls)] + [False] * bool(calls)
        limit = 2 * min(sizes, default=0.0)
        while 0 < limit < 2 * sum(sizes):
            # Closed as soon as it holds that many bytes, as buckets of DistributedDataParallel are.
            held, capped = 0.0, dict[int, int]()
            for k, size in enumerate(sizes):
                held += size
                capped[k] = 0 if held < limit and follows[k] else 1
                held *= capped[k] == 0
            yield SearchMove(f"buckets of {_size(limit)}", capped)
            limit *= 2
        critical_s = Counter({i: float(timeline.duration_s[i]) for i in timeline.critical_path})
        ranked: list[tuple[float, SearchMove]] = []
        for k, bucket in enumerate(self.buckets):
            goes_alone = plan.buckets[k] and (not k or plan.buckets[k - 1])
            choices = {"alone": {k: 1}} | {f"in {n} parts": {k: n} for n in _PARTS if goes_alone}
            if follows[k]:
                choices |= {"with the next": {k: 0}, "with the next only": {k - 1: 1, k: 0, k + 1: 1}}
            on_path_s = sum(critical_s[i] for i in bucket.values())
            what = f"all-reduce {k + 1} ({_size(sizes[k])})"
            ranked += [(on_path_s, SearchMove(f"{what} {text}", to)) for text, to in choices.items()]
        for key, chains in self.chains.items():
            names = Counter(name.removeprefix("aten::") for name, _ in key)
            what = ", ".join(f"{count} {name}" for name, count in names.items())
            name = f"one kernel: {what} ({_size(sum(size for _, size in key))}, {len(chains)} x)"
            on_path_s = sum(critical_s[i] for chain in chains for i in chain)
            ranked.append((on_path_s, SearchMove(name, {}, frozenset({key}))))
        yield from (move for _, move in sorted(ranked, key=lambda entry: -entry[0]))

    def replay(self, plan: SearchPlan) -> tuple[float, TraceGraph, Timeline]:
        """Seconds of an iteration, the changed graph and its replay. Raises FieldError: it cannot be replayed."""
        nodes = [replace(node, deps=list(node.deps)) for node in self.graph.nodes]
        duration_s = [node.duration_s for node in nodes]
        for chain in (chain for key in plan.fused for chain in self.chains[key]):
            apart = [duration_s[i] for i in chain]
            for i in chain[1:]:
                for off in (i, *self._launches(i)):
                    duration_s[off] = 0.0
            duration_s[chain[0]] = max(sum(apart) - self.kernel_s * (len(chain) - 1), *apart)
        run: list[int] = []
        for k, parts in enumerate(plan.buckets):
            run.append(k)
            if parts:
                for at in self.buckets[k] if len(run) > 1 else ():
                    self._merge(nodes, duration_s, [self.buckets[j][at] for j in run])
                if parts > 1 and len(run) == 1:
                    self._divide(nodes, duration_s, k, parts)
                run = []
        added = {node.device for node in nodes[len(self.graph.nodes) :]}
        graph = replace(self.graph, nodes=nodes, parallel=self.graph.parallel | added)
        durations = np.array(duration_s)
        scale_earlier(nodes, graph.durations(), durations)
        timeline = Replayer(graph.to_graph()).run(durations)
        for node, *times in zip(nodes, timeline.start_s.tolist(), durations.tolist(), strict=True):
            node.start_s, node.duration_s = times
        return graph.longest_s(timeline.end_s, timeline.duration_s) / graph.count, graph, timeline

    def _launches(self, kernel: int) -> list[int]:
        """The call that launched a kernel: the node behind the one that its launch delay follows."""
        nodes = self.graph.nodes
        delays = (nodes[dep] for dep in nodes[kernel].deps if nodes[dep].cause == "launch")
        return [i + 1 for delay in delays for i in delay.deps if nodes[i + 1].role == "launch"]

    def _merge(self, nodes: list[WorkNode], duration_s: list[float], run: Sequence[int]) -> None:
        """Let the last all-reduce of a run take the bytes of all, when all are ready."""
        *others, last = run
        measured = [self.graph.nodes[i] for i in run]
        busy_s = covered_s(np.array([n.start_s for n in measured]), np.array([n.end_s for n in measured]))
        duration_s[last] = max(busy_s - (self.latency_s or 0.0) * len(others), *(n.duration_s for n in measured))
        for position in others:
            for i in _head(nodes, position):
                for dep in nodes[i].deps:
                    if nodes[dep].role == "join":
                        nodes[dep].deps = []
                    else:
                        nodes[_head(nodes, last)[0]].deps.append(dep)
                nodes[i].deps, duration_s[i] = [], 0.0
            for waiting in self._dependents.get(position, ()):
                nodes[waiting].deps = [last if dep == position else dep for dep in nodes[waiting].deps]

    def _divide(self, nodes: list[WorkNode], duration_s: list[float], k: int, parts: int) -> None:
        """Let parts go before the last one of a bucket, each when its share of the computation is done on all ranks."""
        ready: dict[int, list[list[int]]] = {}  # by iteration, then rank: what each part waits for
        for (rank, iteration), position in self.buckets[k].items():
            begin = self._waits_for(self.buckets[k - 1][rank, iteration]) if k else None
            end = self._waits_for(position)
            lane = [] if end is None else self._lanes[nodes[end].device, nodes[end].stream]
            work = lane[self._place[begin] + 1 : self._place[end] + 1] if begin in lane and end is not None else []
            if not work:
                raise FieldError("the trace does not tell when the computation for this bucket begins")
            done_s = list(accumulate(self.graph.nodes[i].duration_s for i in work))
            shares = (bisect.bisect_left(done_s, part / parts * done_s[-1]) for part in range(1, parts))
            ready.setdefault(iteration, []).append([work[i] for i in shares])
            duration_s[position] = duration_s[position] / parts + (self.latency_s or 0.0) * (1 - 1 / parts)
        for iteration, ranks in ready.items():
            last = [position for (_, of), position in self.buckets[k].items() if of == iteration]
            heads = [_head(nodes, i)[0] for i in last]
            lanes = [self._lanes[nodes[i].device, nodes[i].stream] for i in heads]
            before = [lane[self._place[i] - 1] for lane, i in zip(lanes, heads, strict=True) if i != lane[0]]
            for waits in zip(*ranks, strict=True):
                for i in last:
                    nodes.append(replace(nodes[i], device=f"{nodes[i].device} parts", deps=[*waits, *before]))
                    duration_s.append(duration_s[i])
                before = list(range(len(nodes) - len(last), len(nodes)))
            for i in last:
                nodes[i].deps += before

    def _waits_for(self, position: int) -> int | None:
        """What a collective waits for on its rank: a kernel of another stream, or the thread that issued it."""
        nodes = self.graph.nodes
        deps = [dep for i in _head(nodes, position) for dep in nodes[i].deps]
        kernels = [dep for dep in deps if nodes[dep].role in WORKING]
        return next(iter(kernels or [i for dep in deps if nodes[dep].role == "delay" for i in nodes[dep].deps]), None)


def _head(nodes: Sequence[WorkNode], position: int) -> range:
    """A collective's nodes: idle time of its lane before it, the moment at which it is ready, and itself."""
    first = position
    for role in ("arrive", "gap"):
        before = nodes[first - 1] if first else nodes[position]
        first -= before.role == role and before.stream == nodes[position].stream
    return range(first, position + 1)


def _size(value: float) -> str:
    return format_si(value, "B")


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
