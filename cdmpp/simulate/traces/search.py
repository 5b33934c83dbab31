"""Search over a replayed trace for buckets of all-reduces and fused kernels, after dPRO (arXiv:2205.02473).

A change applies to all iterations and ranks. It is accepted if the replay of the changed graph is faster.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

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
#: A change that saves less than this share of an iteration is rounding.
_LEAST_SAVING = 1e-6
#: A line needs sizes that differ by this factor.
_SPAN = 2.0
#: Parts of a divided all-reduce.
_PARTS = (2, 4)
_MOST_REJECTED = 10
Kind = Literal["buckets", "fusion"]
_Key = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class SearchTrial:
    """A change that was tried.

    Attributes
    ----------
    name : str
        The change.
    kind : {"buckets", "fusion"}
    before_s : float
        Replayed iteration without it, with the changes that were accepted before.
    seconds : float or None
        Replayed iteration with it; None if it cannot be replayed.
    reason : str
        Why it cannot be replayed.
    """

    name: str
    kind: Kind
    before_s: float
    seconds: float | None
    reason: str = ""

    @property
    def saving_s(self) -> float | None:
        """What it saves; negative for a loss."""
        return None if self.seconds is None else self.before_s - self.seconds


@dataclass(frozen=True)
class TraceSearch:
    """Result of a search; times are of one iteration, in seconds.

    Attributes
    ----------
    before_s, after_s : float
        Replayed iteration without changes, and with all accepted ones.
    accepted : list of SearchTrial
        In the order in which they were accepted; each builds on those before it.
    rejected : list of SearchTrial
        Each with its last trial.
    critical_path_before, critical_path : list of PathPart
        Critical path without changes, and with all accepted ones.
    replays : int
        Distinct combinations that were replayed.
    complete : bool
        Whether no further single change helps; False if the limit of replays ended the search.
    remarks : list of str
        What the times of changes rest on, and what was not searched.
    """

    before_s: float
    after_s: float
    accepted: list[SearchTrial]
    rejected: list[SearchTrial]
    critical_path_before: list[PathPart]
    critical_path: list[PathPart]
    replays: int
    complete: bool
    remarks: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def tables(self) -> list[Table]:
        """The result for a terminal."""
        ended = "no further change helps" if self.complete else "ended by the limit of replays"
        rows = [
            (t.name, verdict, *("-" if s is None else signed(s) for s in (t.before_s, t.seconds, t.saving_s)))
            for verdict, trials in (("accepted", self.accepted), ("rejected", self.rejected[:_MOST_REJECTED]))
            for t in trials
        ]
        more = len(self.rejected) - _MOST_REJECTED
        before, after = ({p.label: p.seconds for p in path} for path in (self.critical_path_before, self.critical_path))
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


@dataclass(frozen=True)
class _Plan:
    """A combination of changes."""

    buckets: tuple[int, ...]  # for each all-reduce: 0: it goes with the next one; else its parts, if it goes alone
    fused: frozenset[_Key] = frozenset()


@dataclass(frozen=True)
class _Move:
    name: str
    kind: Kind
    buckets: Mapping[int, int] = field(default_factory=dict)
    fused: frozenset[_Key] = frozenset()

    def on(self, plan: _Plan) -> _Plan:
        buckets = tuple(self.buckets.get(k, value) for k, value in enumerate(plan.buckets))
        return _Plan(buckets, plan.fused | self.fused)


def search_changes(graph: TraceGraph, all_reduce_latency_s: float | None, max_replays: int) -> TraceSearch:
    """Improve an iteration by one change at a time (coordinate descent), those on the critical path first.

    ``all_reduce_latency_s``: of an all-reduce without bytes; None: from a line through the all-reduces of the trace.
    """
    search = _Search(graph, all_reduce_latency_s)
    plan = _Plan((1,) * len(search.buckets))
    best_s, changed, timeline = search.replay(plan)
    before_s, path_before = best_s, path_shares(changed, timeline)
    accepted, rejected, tried = list[SearchTrial](), dict[str, SearchTrial](), {plan}
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
            try:
                result = search.replay(candidate)
            except FieldError as error:
                rejected[move.name] = SearchTrial(move.name, move.kind, best_s, None, error.message.partition(":")[0])
                continue
            trial = SearchTrial(move.name, move.kind, best_s, result[0])
            if result[0] < best_s * (1 - _LEAST_SAVING):
                accepted.append(trial)
                rejected.pop(move.name, None)
                (best_s, changed, timeline), plan, again = result, candidate, True
            else:
                rejected[move.name] = trial
    path = path_shares(changed, timeline)
    listed = list(rejected.values())
    return TraceSearch(before_s, best_s, accepted, listed, path_before, path, len(tried), complete, search.remarks)


def line_latency(points: Sequence[tuple[float, float]]) -> float | None:
    """Seconds at no bytes of the line through the median time of each size; None where the sizes are too near.

    ``points``: bytes and seconds. The result is at most the shortest time.
    """
    sizes = sorted({size for size, _ in points})
    if not sizes or sizes[-1] < _SPAN * sizes[0]:
        return None
    medians = [float(np.median([s for size, s in points if size == at])) for at in sizes]
    return min(max(float(np.polyfit(sizes, medians, 1)[1]), 0.0), min(s for _, s in points))


class _Search:
    """What may change in a graph, and the replay of a combination."""

    def __init__(self, graph: TraceGraph, latency_s: float | None) -> None:
        self.graph, self.latency_s, self.kernel_s = _spaced(graph), latency_s or 0.0, 0.0
        self.buckets: list[dict[tuple[int, int], int]] = []  # (rank, iteration) -> node of the all-reduce
        self.chains: dict[_Key, list[list[int]]] = {}
        self.remarks: list[str] = []
        self._dependents: dict[int, list[int]] = {}
        self._lanes: dict[tuple[str, str], list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            self._lanes.setdefault((node.device, node.stream), []).append(i)
            for dep in node.deps:
                self._dependents.setdefault(dep, []).append(i)
        self._place = {i: k for lane in self._lanes.values() for k, i in enumerate(lane)}
        self._find_buckets(latency_s)
        self._find_chains()
        self.remarks.append("recomputation is not searched: it costs time and saves memory, and a trace has no memory")

    def _find_buckets(self, given_s: float | None) -> None:
        nodes, count = self.graph.nodes, self.graph.count
        groups: dict[str, dict[int, list[int]]] = {}
        for i in sorted(range(len(nodes)), key=lambda i: nodes[i].start_s):
            if self._bytes(i):
                groups.setdefault(self._group(i), {}).setdefault(nodes[i].rank, []).append(i)
        points = [(self._bytes(i), nodes[i].duration_s) for i in range(len(nodes)) if self._bytes(i)]
        latency_s = line_latency(points) if given_s is None else given_s
        if latency_s is None:
            sizes = f"sizes from {_size(min(points)[0])} to {_size(max(points)[0])}" if points else "no recorded size"
            self.remarks.append(
                f"buckets are not searched: all-reduces have {sizes}, which does not tell latency from bandwidth; "
                "all_reduce_latency_s (--all-reduce-us) gives the latency"
            )
            return
        for group, by_rank in groups.items():
            rows: dict[tuple[int, int], list[int]] = {}
            for rank, own in by_rank.items():
                each = len(own) // count
                rows |= {(rank, k): own[k * each : (k + 1) * each] for k in range(count)}
            uneven = any(len(own) % count for own in by_rank.values())
            if uneven or len({tuple(map(self._bytes, row)) for row in rows.values()}) > 1:
                self.remarks.append(f"all-reduces of group {group!r} differ between iterations or ranks, and stay")
                continue
            self.buckets += [dict(zip(rows, column, strict=True)) for column in zip(*rows.values(), strict=True)]
        self.latency_s = latency_s
        source = "as given" if given_s is not None else f"by a line through {len(points)} of them"
        self.remarks.append(
            f"an all-reduce takes {format_latency(latency_s)} without bytes ({source}). Those that go together save it "
            "and keep the rest of their measured times and the host's calls. Parts are ready in proportion to the "
            "computation since the bucket before"
        )

    def _find_chains(self) -> None:
        """Find element-wise kernels in a row, between which nothing waits or is waited for."""
        nodes, chains = self.graph.nodes, list[list[int]]()
        points: list[tuple[float, float]] = []
        for lane in self._lanes.values():
            chain: list[int] | None = None
            for i in lane:
                node, size = nodes[i], self._traffic(i)
                waits = any(nodes[dep].cause != "launch" for dep in node.deps)
                if waits or (chain and size and self._mark(i) != self._mark(chain[0])):
                    chain = None
                if size:
                    points.append((size, node.duration_s))
                    if chain is None:
                        chains.append(chain := [])
                    chain.append(i)
                if i in self._dependents or not (size or node.role in ("host", "gap")):
                    chain = None
        for chain in chains:
            if len(chain) > 1:
                names = (nodes[i].operation.name for i in chain)  # type: ignore[union-attr]
                key = tuple(zip(names, map(self._traffic, chain), strict=True))
                self.chains.setdefault(key, []).append(chain)
        if not self.chains:
            self.remarks.append("fusion is not searched: no element-wise kernels with recorded shapes in a row")
            return
        latency_s = line_latency(points)
        self.kernel_s = latency_s or 0.0
        fixed = "not known" if latency_s is None else f"{format_latency(latency_s)}, by a line through {len(points):,}"
        self.remarks.append(
            "a fused kernel saves the launches and the fixed time of the kernels after its first "
            f"({fixed}). Its traffic stays: a trace does not tell which tensors it would not write"
        )

    def _traffic(self, i: int) -> float:
        """Bytes of an element-wise kernel or operator; 0 for others."""
        node = self.graph.nodes[i]
        if node.role not in ("kernel", "op") or node.operation is None or not _ELEMENTWISE.match(node.operation.name):
            return 0.0
        return sum(spec.tensor_bytes() for spec in operators_of_node(node)[0])

    def _mark(self, i: int) -> str:
        return next((name for name in self.graph.nodes[i].names if name in self.graph.iterations), "")

    def _bytes(self, i: int) -> float:
        """Bytes of an all-reduce; 0 for other nodes and where they are not recorded."""
        call = self.graph.nodes[i].call
        return call.bytes or 0.0 if call is not None and call.kind == "all_reduce" else 0.0

    def _group(self, i: int) -> str:
        call = self.graph.nodes[i].call
        return "" if call is None else call.group

    def moves(self, plan: _Plan, timeline: Timeline) -> Iterator[_Move]:
        """Sizes of all buckets, then single buckets and kernels by their time on the critical path."""
        firsts = [next(iter(bucket.values())) for bucket in self.buckets]
        sizes = [self._bytes(i) for i in firsts]
        follows = [self._group(a) == self._group(b) for a, b in pairwise(firsts)] + [False] * bool(firsts)
        limit = 2 * min(sizes, default=0.0)
        while 0 < limit < 2 * sum(sizes):
            # Closed as soon as it holds that many bytes, as buckets of DistributedDataParallel are.
            held, capped = 0.0, dict[int, int]()
            for k, size in enumerate(sizes):
                held += size
                capped[k] = 0 if held < limit and follows[k] else 1
                held *= capped[k] == 0
            yield _Move(f"buckets of {_size(limit)}", "buckets", capped)
            limit *= 2
        critical_s = Counter({i: float(timeline.duration_s[i]) for i in timeline.critical_path})
        ranked: list[tuple[float, _Move]] = []
        for k, bucket in enumerate(self.buckets):
            goes_alone = plan.buckets[k] and (not k or plan.buckets[k - 1])
            choices = {"alone": {k: 1}} | {f"in {n} parts": {k: n} for n in _PARTS if goes_alone}
            if follows[k]:
                choices |= {"with the next": {k: 0}, "with the next only": {k - 1: 1, k: 0, k + 1: 1}}
            on_path_s = sum(critical_s[i] for i in bucket.values())
            for text, buckets in choices.items():
                move = _Move(f"all-reduce {k + 1} ({_size(sizes[k])}) {text}", "buckets", buckets)
                ranked.append((on_path_s, move))
        for key, chains in self.chains.items():
            names = Counter(name.removeprefix("aten::") for name, _ in key)
            listed = ", ".join(f"{count} {name}" for name, count in names.items())
            on_path_s = sum(critical_s[i] for chain in chains for i in chain)
            traffic = _size(sum(size for _, size in key))
            move = _Move(f"one kernel: {listed} ({traffic}, {len(chains)} x)", "fusion", fused=frozenset({key}))
            ranked.append((on_path_s, move))
        yield from (move for _, move in sorted(ranked, key=lambda entry: -entry[0]))

    def replay(self, plan: _Plan) -> tuple[float, TraceGraph, Timeline]:
        """Seconds of an iteration, the changed graph and its replay. Raises FieldError: it cannot be replayed."""
        nodes = [replace(node, deps=list(node.deps)) for node in self.graph.nodes]
        run: list[int] = []
        for k, value in enumerate(plan.buckets):
            run.append(k)
            if value:
                if len(run) > 1:
                    for at in self.buckets[k]:
                        self._merge(nodes, [self.buckets[j][at] for j in run])
                elif value > 1:
                    self._divide(nodes, k, value)
                run = []
        for chain in (chain for key in plan.fused for chain in self.chains[key]):
            spared_s = self.kernel_s * (len(chain) - 1)
            seconds = [nodes[i].duration_s for i in chain]
            for i in chain:
                for off in (i, *self._launches(i)) if i != chain[0] else ():
                    nodes[off].duration_s = 0.0
            nodes[chain[0]].duration_s = max(sum(seconds) - spared_s, *seconds)
        scaled = np.array([node.duration_s for node in nodes])
        scale_earlier(self.graph.nodes, self.graph.durations(), scaled)
        for node, seconds_ in zip(nodes, scaled.tolist(), strict=True):
            node.duration_s = seconds_
        graph = replace(self.graph, nodes=nodes)
        timeline = Replayer(graph.to_graph()).run()
        for node, start_s in zip(nodes, timeline.start_s.tolist(), strict=True):
            node.start_s = start_s
        return graph.longest_s(timeline.end_s, timeline.duration_s) / graph.count, graph, timeline

    def _launches(self, kernel: int) -> list[int]:
        """The call that launched a kernel: the node behind the one that its launch delay follows."""
        nodes = self.graph.nodes
        delays = (nodes[dep] for dep in nodes[kernel].deps if nodes[dep].cause == "launch")
        return [i + 1 for delay in delays for i in delay.deps if nodes[i + 1].role == "launch"]

    def _merge(self, nodes: list[WorkNode], run: Sequence[int]) -> None:
        """Let the last all-reduce of a run take the bytes of all, when all are ready."""
        *others, last = run
        measured = [self.graph.nodes[i] for i in run]
        busy_s = covered_s(np.array([n.start_s for n in measured]), np.array([n.end_s for n in measured]))
        nodes[last].duration_s = max(busy_s - self.latency_s * len(others), *(n.duration_s for n in measured))
        for position in others:
            for i in _head(nodes, position):
                for dep in nodes[i].deps:
                    if nodes[dep].role == "join":
                        nodes[dep].deps = []
                    else:
                        nodes[_head(nodes, last)[0]].deps.append(dep)
                nodes[i].deps, nodes[i].duration_s = [], 0.0
            for waiting in self._dependents.get(position, ()):
                nodes[waiting].deps = [last if dep == position else dep for dep in nodes[waiting].deps]

    def _divide(self, nodes: list[WorkNode], k: int, parts: int) -> None:
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
        for (_, iteration), position in self.buckets[k].items():
            node, first = nodes[position], _head(nodes, position)[0]
            node.duration_s = node.duration_s / parts + self.latency_s * (1 - 1 / parts)
            for part, waits in enumerate(zip(*ready[iteration], strict=True), first - parts + 1):
                nodes[part].duration_s, nodes[part].deps = node.duration_s, list(waits)

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


def _spaced(graph: TraceGraph) -> TraceGraph:
    """The graph with nodes without time in front of each all-reduce, for parts of it."""
    heads = {_head(graph.nodes, i)[0] for i, node in enumerate(graph.nodes) if node.role == "comm"}
    nodes, moved = list[WorkNode](), list[int]()
    for i, node in enumerate(graph.nodes):
        if i in heads:
            space = replace(node, role="comm", duration_s=0.0, call=None)
            nodes += [replace(space, deps=[]) for _ in range(max(_PARTS) - 1)]
        moved.append(len(nodes))
        nodes.append(replace(node))
    for node in nodes:
        node.deps = [moved[dep] for dep in node.deps]
    return replace(graph, nodes=nodes)


def _size(value: float) -> str:
    return format_si(value, "B")
