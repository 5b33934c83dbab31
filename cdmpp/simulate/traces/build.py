"""Graphs of traces: the threads and streams of all ranks, joined at their collectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cdmpp.errors import DataError
from cdmpp.simulate.traces.align import Alignment, align
from cdmpp.simulate.traces.iterations import windows
from cdmpp.simulate.traces.nodes import TraceGraph, WorkNode
from cdmpp.simulate.traces.rank import Rank
from cdmpp.simulate.traces.records import RankTrace, TraceEvent

#: The ends of a collective on two ranks may differ by this share of an iteration before the clocks are in doubt.
_MOST_RESIDUAL = 0.05


def build_graph(traces: Sequence[RankTrace], *, iteration: int | None = None, mark: str | None = None) -> TraceGraph:
    """The graph of the marked iterations of one or more ranks.

    Parameters
    ----------
    traces : sequence of RankTrace
        From :func:`cdmpp.simulate.traces.load.read_ranks`.
    iteration : int, optional
        Number of one iteration; default: all that are marked.
    mark : str, optional
        Regular expression of the marks; see :func:`cdmpp.simulate.traces.iterations.windows`.

    Returns
    -------
    TraceGraph
        Its replay takes the measured time by construction: idle time that no cause explains is a node of its own.

    Raises
    ------
    DataError
        The iteration is not in all files, or contains no work.
    """
    chosen = windows(traces, iteration, mark)
    alignment = align(traces)
    begins = [w.start_s + alignment.offsets_s[t.rank or 0] for t, w in zip(traces, chosen, strict=True)]
    graph = TraceGraph(iterations=chosen[0].names, ranks=tuple(trace.rank or 0 for trace in traces))
    ranks = [
        Rank(graph, trace, window, alignment.offsets_s[trace.rank or 0] - min(begins))
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
    graph.measured_s = graph.longest_s(np.array([node.end_s for node in graph.nodes]))
    graph.on_device = any(trace.on_device for trace in traces)
    graph.has_shapes = any(trace.has_shapes for trace in traces)
    graph.device_names = tuple(dict.fromkeys(name for trace in traces for name in trace.devices.values()))
    _remark(graph, traces, alignment, ranks)
    return graph


def _together(match: dict[int, TraceEvent], ranks: dict[int, Rank]) -> bool:
    """Whether all ranks begin a collective inside of the window of each."""
    begin_s = max(event.start_s + ranks[rank].shift_s for rank, event in match.items())
    return all(begin_s < ranks[rank].window.end_s + ranks[rank].shift_s for rank in match)


def _join(graph: TraceGraph, match: dict[int, TraceEvent], ranks: dict[int, Rank]) -> None:
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


def _remark(graph: TraceGraph, traces: Sequence[RankTrace], alignment: Alignment, ranks: Sequence[Rank]) -> None:
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
    if inferred:
        graph.remarks.append(f"waits between streams that are inferred from times: {inferred:,}")
