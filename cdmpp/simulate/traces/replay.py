"""Replay of profiler traces: one call from files to an answer.

The graph has the threads and streams of all ranks,
joined at their collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, FieldError
from cdmpp.predict.interface import Predictor
from cdmpp.predict.rendering import Table
from cdmpp.simulate.replay.engine import Replayer, Timeline
from cdmpp.simulate.replay.records import paused_collector
from cdmpp.simulate.traces.align import Alignment, align, windows
from cdmpp.simulate.traces.analysis import KernelRow, PathPart, RankIdle, idle, kernel_table, path_shares, short_name
from cdmpp.simulate.traces.load import read_ranks
from cdmpp.simulate.traces.nodes import TraceGraph, WorkNode
from cdmpp.simulate.traces.rank import TracedRank
from cdmpp.simulate.traces.records import RankTrace, TraceEvent
from cdmpp.simulate.traces.search import TraceSearch, search_changes
from cdmpp.simulate.traces.what_if import Changes, WhatIfAnswer, answer_changes, signed
from cdmpp.utils.units import format_latency

#: The ends of a collective on two ranks may differ by this share of an iteration before the clocks are in doubt.
_MOST_RESIDUAL = 0.05


def build_graph(traces: Sequence[RankTrace], *, iteration: int | None = None, mark: str | None = None) -> TraceGraph:
    """The graph of the marked iterations of one or more ranks.

    Its replay takes the measured time by construction: idle time that no cause explains is a node of its own.
    ``iteration``: number of one iteration; default: all that are marked. ``mark``: regular expression of the marks; see
    :func:`cdmpp.simulate.traces.align.windows`.
    Raises DataError: the iteration is not in all files, or contains no work.
    """
    chosen = windows(traces, iteration, mark)
    alignment = align(traces)
    begins = [w.start_s + alignment.offsets_s[t.rank or 0] for t, w in zip(traces, chosen, strict=True)]
    graph = TraceGraph(iterations=chosen[0].names, ranks=tuple(trace.rank or 0 for trace in traces))
    ranks = [
        TracedRank(graph, trace, window, alignment.offsets_s[trace.rank or 0] - min(begins))
        for trace, window in zip(traces, chosen, strict=True)
    ]
    for rank in ranks:
        rank.collect()
    inside = {id(event) for rank in ranks for event in rank.collectives()}
    by_rank = {rank.rank: rank for rank in ranks}
    joint = [match for match in alignment.matches if all(id(event) in inside for event in match.values())]
    joint = [match for match in joint if _together(match, by_rank)]
    members = {id(event) for match in joint for event in match.values()}
    for rank in ranks:
        rank.build(members)
    for match in joint:
        _join(graph, match, by_rank)
    if not any(node.role in ("op", "kernel", "copy", "comm", "launch") for node in graph.nodes):
        raise DataError(
            f"{traces[0].path}: no operator, kernel or collective in the iterations",
            hint="record whole iterations: torch.profiler.schedule(wait=1, warmup=1, active=3)",
        )
    graph.begins_s = {rank.rank: rank.window.start_s + rank.shift_s for rank in ranks}
    graph.measured_s = graph.longest_s(np.array([node.end_s for node in graph.nodes]), graph.durations())
    graph.on_device = any(trace.on_device for trace in traces)
    graph.has_shapes = any(trace.has_shapes for trace in traces)
    graph.device_names = tuple(dict.fromkeys(name for trace in traces for name in trace.devices.values()))
    _remark(graph, traces, alignment, ranks)
    return graph


def _together(match: dict[int, TraceEvent], ranks: dict[int, TracedRank]) -> bool:
    """Whether all ranks begin a collective inside of the window of each."""
    begin_s = max(event.start_s + ranks[rank].shift_s for rank, event in match.items())
    return all(begin_s < ranks[rank].window.end_s + ranks[rank].shift_s for rank in match)


def _join(graph: TraceGraph, match: dict[int, TraceEvent], ranks: dict[int, TracedRank]) -> None:
    """Let a collective begin on all ranks when the last one is ready for it."""
    begin_s = max(event.start_s + ranks[rank].shift_s for rank, event in match.items())
    streams = {rank: ranks[rank].streams for rank in match}
    graph.parallel.add("collectives")
    arrivals = [streams[rank].arrivals[id(event)] for rank, event in match.items()]
    first = min(match)
    label = graph.nodes[streams[first].positions[id(match[first])]].label
    join = graph.add(WorkNode("collectives", "0", 0.0, arrivals, "join", first, begin_s, label))
    for rank, event in match.items():
        node = graph.nodes[streams[rank].positions[id(event)]]
        node.deps.append(join)
        node.duration_s = max(node.end_s - begin_s, 0.0)
        node.start_s = begin_s


def _remark(graph: TraceGraph, traces: Sequence[RankTrace], alignment: Alignment, ranks: Sequence[TracedRank]) -> None:
    for trace in traces:
        graph.remarks += [f"{trace.path}: {remark}" for remark in trace.remarks]
    graph.remarks += alignment.remarks
    graph.alignment_residual_s = alignment.residual_s
    each_s = graph.measured_s / graph.count
    if alignment.residual_s > _MOST_RESIDUAL * each_s:
        graph.remarks.append(
            f"collectives end {alignment.residual_s * 1e6:,.0f} µs apart on the ranks (median), "
            f"{100 * alignment.residual_s / each_s:.0f} % of an iteration: waits between ranks are uncertain"
        )
    if graph.on_device and not any(event.kind == "runtime" for trace in traces for event in trace.events):
        graph.remarks.append("no launches in the trace: kernels follow each other with the measured gaps")
    if not graph.has_shapes and any(trace.source == "torch" for trace in traces):
        graph.remarks.append("no shapes in the trace: record with record_shapes=True to predict other devices")
    inferred = sum(rank.streams.inferred for rank in ranks)
    if graph.full_queue:
        graph.remarks.append(
            f"launches that waited for room in the device's queue, and end with its progress: {graph.full_queue:,}"
        )
    if inferred:
        graph.remarks.append(f"waits between streams that are inferred from times: {inferred:,}")


_MOST_ROWS = 15
_MOST_NAME = 60


@dataclass(frozen=True)
class TraceReplay:
    """A replayed trace. Times are of one iteration, in seconds, unless a name says ``total``.

    Attributes
    ----------
    graph : TraceGraph
    timeline : Timeline
        Replay of all iterations.
    what_if : list of WhatIfAnswer
    model_id : str or None
        Model behind the what-ifs.
    search : TraceSearch or None
        Accepted and rejected changes, where a search was asked for.
    """

    graph: TraceGraph
    timeline: Timeline
    what_if: list[WhatIfAnswer]
    model_id: str | None = None
    search: TraceSearch | None = None

    @property
    def measured_s(self) -> float:
        """Measured time of an iteration: mean of those in the trace, of the rank that needs longest."""
        return self.graph.measured_s / self.graph.count

    @property
    def replayed_s(self) -> float:
        """Replayed time of an iteration."""
        return self.graph.longest_s(self.timeline.end_s, self.timeline.duration_s) / self.graph.count

    @cached_property
    def critical_path(self) -> list[PathPart]:
        """The critical path by operator, largest first."""
        return path_shares(self.graph, self.timeline)

    @cached_property
    def idle(self) -> list[RankIdle]:
        """Busy and idle time of each rank."""
        return idle(self.graph, self.timeline)

    @cached_property
    def kernels(self) -> list[KernelRow]:
        """Kernels, or operators of a host, by total time."""
        return kernel_table(self.graph)

    def to_request(self) -> dict[str, Any]:
        """The graph as a replay request (docs/replay.md)."""
        return self.graph.to_request()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        graph = self.graph
        return {
            "measured_s": self.measured_s,
            "replayed_s": self.replayed_s,
            "error": self.replayed_s / self.measured_s - 1 if self.measured_s else 0.0,
            "iterations": list(graph.iterations),
            "ranks": list(graph.ranks),
            "devices": list(graph.device_names),
            "nodes": len(graph.nodes),
            "critical_path": [asdict(share) for share in self.critical_path],
            "idle": [asdict(row) for row in self.idle],
            "alignment_residual_s": graph.alignment_residual_s,
            "kernels": [row.to_dict() for row in self.kernels],
            "what_if": [answer.to_dict() for answer in self.what_if],
            "model_id": self.model_id,
            "remarks": graph.remarks,
            **({} if self.search is None else {"search": asdict(self.search)}),
        }

    def tables(self) -> list[Table]:
        """The answer for a terminal."""
        graph = self.graph
        ranks = f"{len(graph.ranks)} ranks" if len(graph.ranks) > 1 else "1 rank"
        what = f"{graph.count} iterations" if graph.count > 1 else "1 iteration"
        error = 100 * (self.replayed_s / self.measured_s - 1) if self.measured_s else 0.0
        title = Table.lines(
            f"measured iteration {format_latency(self.measured_s)}, replayed {format_latency(self.replayed_s)} "
            f"({error:+.2f} %)  [{what}, {ranks}, {len(graph.nodes):,} nodes]"
        )
        path = [
            (_cut(s.label), f"{s.nodes} x", format_latency(s.seconds), f"{100 * s.share:.1f} %")
            for s in self.critical_path
        ]
        causes = list(dict.fromkeys(cause for row in self.idle for cause in row.idle_s))
        used = [
            (f"rank {row.rank}", *map(format_latency, (row.busy_s, *idle_s, row.exposed_comm_s)))
            for row in self.idle
            for idle_s in ([row.idle_s.get(cause, 0.0) for cause in causes],)
        ]
        kernels = [
            (_cut(short_name(row.name)), row.operator, f"{row.calls} x", *times, f"{100 * row.share:.1f} %")
            for row in self.kernels
            for times in ((format_latency(row.seconds), format_latency(row.mean_s)),)
        ]
        name = "kernel" if graph.on_device else "operator"
        header = (name, "operator" if graph.on_device else "", "calls", "total", "mean", "share")
        return [
            title,
            *_shortened(("critical path", "nodes", "time", "share"), path, (1, 2, 3)),
            Table(("", "busy", *(f"idle: {c}" for c in causes), "exposed communication"), used, range(1, 9)),
            *_shortened(header, kernels, (2, 3, 4, 5)),
            *self._what_if_tables(),
            *([] if self.search is None else self.search.tables(self.critical_path)),
            Table.lines(*graph.remarks, f"model {self.model_id}" if self.model_id is not None else ""),
        ]

    def _what_if_tables(self) -> list[Table]:
        if not self.what_if:
            return []
        columns: dict[str, Callable[[WhatIfAnswer], str]] = {
            "what if": lambda answer: answer.name,
            "nodes": lambda answer: str(answer.nodes),
            "iteration": lambda answer: format_latency(answer.seconds),
            "saving": lambda answer: signed(answer.saving_s),
            "new times": lambda answer: ", ".join(f"{how} {100 * s:.0f} %" for how, s in answer.shares.items()),
            "domain": lambda answer: answer.domain or "",
        }
        reasons = Counter[str]()
        for answer in self.what_if:
            reasons |= Counter(answer.reasons)
        return [
            Table.of(self.what_if, columns, (1, 2, 3)),
            Table.lines(*(f"not predicted: {reason} ({count:,} x)" for reason, count in reasons.items())),
        ]


def replay_trace(
    *paths: str | Path,
    iteration: int | None = None,
    mark: str | None = None,
    device: DeviceSpec | str | None = None,
    from_device: DeviceSpec | str | None = None,
    ranks: int | None = None,
    link: str | None = None,
    speed_up: Sequence[tuple[str, float]] = (),
    remove: Sequence[str] = (),
    search: bool = False,
    all_reduce_latency_s: float | None = None,
    max_replays: int = 200,
    predictor: Predictor | None = None,
) -> TraceReplay:
    """Replay profiler traces, and what-ifs on them.

    Parameters
    ----------
    *paths : str or Path
        Chrome traces of ``torch.profiler`` or SQLite exports of Nsight Systems, one for each rank.
    iteration : int, optional
        Number of one iteration; default: all marked ones.
    mark : str, optional
        Regular expression of the annotations that mark iterations; default ``ProfilerStep#N``.
    device, from_device, ranks, link, speed_up, remove
        What-ifs, as in :class:`cdmpp.simulate.traces.Changes`.
    search : bool
        Search for buckets of all-reduces and fused kernels that make an iteration shorter.
    all_reduce_latency_s : float, optional
        For the search: seconds of an all-reduce without bytes; default: from a line through those of the trace.
    max_replays : int
        Replays of the search at most.
    predictor : Predictor, optional
        Default: the model that ships with the package, loaded where a what-if needs it.

    Returns
    -------
    TraceReplay

    Raises
    ------
    DataError
        A file is no trace, or the ranks have no iteration in common.
    FieldError
        A what-if matches nothing, or needs a device that the trace does not name; the latency is not allowed.
    UnknownDeviceError
        A device is not known.

    Examples
    --------
    >>> replay_trace("trace.json.gz", device="h100-sxm").what_if[0].seconds  # doctest: +SKIP
    0.0123
    """
    changes = Changes(device, from_device, ranks, link, tuple(speed_up), tuple(remove))
    if all_reduce_latency_s is not None and not (search and 0 <= all_reduce_latency_s < float("inf")):
        problem = "0 or more" if search else "a search uses it: add search=True (--search)"
        raise FieldError(f"all_reduce_latency_s is {all_reduce_latency_s}", path="all_reduce_latency_s", hint=problem)
    with paused_collector():
        graph = build_graph(read_ranks(paths), iteration=iteration, mark=mark)
        replayer = Replayer(graph.to_graph())
        timeline = replayer.run()
        if changes.predicts and predictor is None:
            from cdmpp.predict.predictor import LatencyPredictor

            predictor = LatencyPredictor.load()
        answers = answer_changes(graph, replayer, changes, predictor)
        found = search_changes(graph, all_reduce_latency_s, max_replays) if search else None
    predicted = any(answer.domain for answer in answers)
    model_id = predictor.model_id if predicted and predictor is not None else None
    return TraceReplay(graph, timeline, answers, model_id, found)


def _cut(name: str) -> str:
    return name if len(name) <= _MOST_NAME else name[: _MOST_NAME - 3] + "..."


def _shortened(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: Sequence[int]) -> list[Table]:
    more = f"... and {len(rows) - _MOST_ROWS} more (--json has all)" if len(rows) > _MOST_ROWS else ""
    return [Table(header, rows[:_MOST_ROWS], right=right), Table.lines(more)]
