"""The critical path of a replay by program, and the explanation of the makespan."""

from __future__ import annotations

from collections.abc import Sequence

from cdmpp.predict.prediction import Prediction
from cdmpp.simulate.replay.build import CheckedNodes, NodeDurations
from cdmpp.simulate.replay.schema import PathShare
from cdmpp.simulate.replay.timeline import Timeline
from cdmpp.utils.units import format_latency

_MOST_EXPLAINED = 4


def programs_of(checked: CheckedNodes, durations: NodeDurations, prices: Sequence[Prediction]) -> list[str | None]:
    """The program of each node, of several the longest one; None for nodes without a program."""
    longest: dict[int, tuple[float, str]] = {}
    for (node, price, _), seconds in zip(checked.parts, durations.part_s.tolist(), strict=True):
        name = prices[price].name
        if node not in longest or seconds > longest[node][0]:
            longest[node] = (seconds, name)
    return [longest[i][1] if i in longest else None for i in range(len(checked.nodes))]


def path_by_program(
    checked: CheckedNodes, durations: NodeDurations, prices: Sequence[Prediction], timeline: Timeline
) -> list[PathShare]:
    """The critical path by program and device; nodes without programs by class. Shares sum to 1."""
    path = timeline.critical_path
    on_path = set(path)
    totals: dict[tuple[str | None, str | None, str], tuple[int, int, float]] = {}

    def add(program: str | None, device: str | None, class_: str, runs: int, seconds: float) -> None:
        nodes, all_runs, total_s = totals.get((program, device, class_), (0, 0, 0.0))
        totals[program, device, class_] = (nodes + 1, all_runs + runs, total_s + seconds)

    predicted = set()
    for (node, number, count), seconds in zip(checked.parts, durations.part_s.tolist(), strict=True):
        if node in on_path:
            predicted.add(node)
            add(prices[number].name, prices[number].device, checked.classes[node], count, seconds)
    for i in path:
        if i not in predicted:
            add(None, None, checked.classes[i], 1, float(timeline.duration_s[i]))
    for i in path[:-1]:
        gap_s = timeline.graph.nodes[i].gap_s
        if gap_s:
            add(None, None, "gap", 1, gap_s)
    makespan_s = timeline.makespan_s
    shares = [
        PathShare(
            program=program,
            device=device,
            class_=class_,
            nodes=nodes,
            runs=runs,
            seconds=seconds,
            share=seconds / makespan_s if makespan_s else 0.0,
        )
        for (program, device, class_), (nodes, runs, seconds) in totals.items()
    ]
    return sorted(shares, key=lambda share: (-share.seconds, share.program or "", share.device or "", share.class_))


def explain(shares: Sequence[PathShare], timeline: Timeline) -> list[str]:
    """Sentences about the critical path, its largest shares, and communication that nothing hides."""
    nodes, makespan_s = timeline.graph.nodes, timeline.makespan_s
    streams = {(nodes[i].device, nodes[i].stream) for i in timeline.critical_path}
    count = f"{len(streams)} stream{'s' if len(streams) > 1 else ''}"
    lines = [f"the critical path has {len(timeline.critical_path)} of {len(nodes)} nodes, on {count}"]
    for share in shares[:_MOST_EXPLAINED]:
        if share.seconds > 0:
            name = share.name if share.program else f"class {share.class_}"
            lines.append(
                f"{100 * share.share:.0f} % of the makespan: {name}, {share.runs} x, "
                f"{format_latency(share.seconds)} together"
            )
    if any(node.kind == "comm" for node in nodes):
        exposed = 100 * timeline.exposed_comm_s / makespan_s if makespan_s else 0.0
        lines.append(f"communication that nothing hides: {format_latency(timeline.exposed_comm_s)} ({exposed:.0f} %)")
    return lines
