"""What a replay says: the critical path by node and by program, streams, and why, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdmpp.prediction import Prediction
from cdmpp.replay.build import Plan, Priced
from cdmpp.replay.engine import Replayer
from cdmpp.replay.timeline import Timeline
from cdmpp.units import format_latency

_MOST_EXPLAINED = 4


def programs_of(plan: Plan, priced: Priced, prices: Sequence[Prediction]) -> list[str | None]:
    """The program of each node, or the one of several that takes longest; None where none is priced."""
    longest: dict[int, tuple[float, str]] = {}
    for (node, price, _), seconds in zip(plan.parts, priced.part_s.tolist(), strict=True):
        name = prices[price].name
        if node not in longest or seconds > longest[node][0]:
            longest[node] = (seconds, name)
    return [longest[i][1] if i in longest else None for i in range(len(plan.nodes))]


def describe(
    plan: Plan,
    priced: Priced,
    prices: Sequence[Prediction],
    replayer: Replayer,
    found: Timeline,
    programs: Sequence[str | None],
) -> dict[str, Any]:
    """The fields of an answer that one replay gives."""
    makespan = found.makespan_s
    bound = min(max(replayer.longest_path_s, replayer.busiest_stream_s), makespan)
    nodes = found.graph.nodes
    shares = by_program(plan, priced, prices, found)
    return {
        "makespan_s": makespan,
        "lower_bound_s": bound,
        "gap": makespan / bound - 1.0 if bound else 0.0,
        "baselines": {"serial": serial_s(found), "longest_path": min(replayer.longest_path_s, makespan)},
        "critical_path": [
            {
                "id": nodes[i].id,
                "device": nodes[i].device,
                "stream": nodes[i].stream,
                "class": plan.classes[i],
                "start_s": float(found.start_s[i]),
                "end_s": float(found.end_s[i]),
                "share": float(found.duration_s[i]) / makespan if makespan else 0.0,
                "program": programs[i],
            }
            for i in found.critical_path
        ],
        "by_program": shares,
        "streams": [
            {"device": use.device, "stream": use.stream, "busy_s": use.busy_s, "idle_s": use.idle_s, "nodes": use.nodes}
            for use in found.streams
        ],
        "devices": [
            {"device": device, "exposed_comm_s": seconds} for device, seconds in found.exposed_comm_by_device_s.items()
        ],
        "exposed_comm_s": found.exposed_comm_s,
        "explanation": explain(shares, found),
        "remarks": list(plan.remarks),
    }


def serial_s(found: Timeline) -> float:
    """Seconds of all nodes one after the other, with the gaps between them."""
    gaps = [node.gap_s for node in found.graph.nodes]
    return float(found.duration_s.sum()) + sum(gaps) - max(gaps, default=0.0)


def by_program(plan: Plan, priced: Priced, prices: Sequence[Prediction], found: Timeline) -> list[dict[str, Any]]:
    """The critical path by program and device; the rest of it by class. Shares of the makespan, sum 1."""
    path = found.critical_path
    there = set(path)
    totals: dict[tuple[str | None, str | None, str], list[float]] = {}

    def add(key: tuple[str | None, str | None, str], runs: int, seconds: float) -> None:
        total = totals.setdefault(key, [0, 0, 0.0])
        total[0] += 1
        total[1] += runs
        total[2] += seconds

    predicted = set()
    for (node, number, count), seconds in zip(plan.parts, priced.part_s.tolist(), strict=True):
        if node in there:
            predicted.add(node)
            price = prices[number]
            add((price.name, price.device, plan.classes[node]), count, seconds)
    for i in path:
        if i not in predicted:
            add((None, None, plan.classes[i]), 1, float(found.duration_s[i]))
    for before in path[:-1]:
        gap_s = found.graph.nodes[before].gap_s
        if gap_s:
            add((None, None, "gap"), 1, gap_s)
    makespan = found.makespan_s
    made = [
        {
            "program": program,
            "device": device,
            "class": class_,
            "nodes": int(nodes),
            "runs": int(runs),
            "seconds": seconds,
            "share": seconds / makespan if makespan else 0.0,
        }
        for (program, device, class_), (nodes, runs, seconds) in totals.items()
    ]
    return sorted(made, key=lambda one: (-one["seconds"], one["program"] or "", one["device"] or "", one["class"]))


def timeline(plan: Plan, found: Timeline) -> list[dict[str, Any]]:
    """When each node ran."""
    starts, ends = found.start_s.tolist(), found.end_s.tolist()
    return [
        {
            "id": node.id,
            "device": node.device,
            "stream": node.stream,
            "class": plan.classes[i],
            "start_s": starts[i],
            "end_s": ends[i],
        }
        for i, node in enumerate(found.graph.nodes)
    ]


def explain(shares: Sequence[dict[str, Any]], found: Timeline) -> list[str]:
    """Why the makespan is what it is."""
    nodes = found.graph.nodes
    streams = {(nodes[i].device, nodes[i].stream) for i in found.critical_path}
    where = f"{len(streams)} stream{'s' if len(streams) > 1 else ''}"
    said = [f"the critical path has {len(found.critical_path)} of {len(nodes)} nodes, on {where}"]
    for one in shares[:_MOST_EXPLAINED]:
        if one["seconds"] > 0:
            what = f"{one['program']} on {one['device']}" if one["program"] else f"class {one['class']}"
            said.append(
                f"{100 * one['share']:.0f} % of the makespan: {what}, {one['runs']} x, "
                f"{format_latency(one['seconds'])} together"
            )
    if any(node.kind == "comm" for node in nodes):
        share = 100 * found.exposed_comm_s / found.makespan_s if found.makespan_s else 0.0
        said.append(f"communication that nothing hides: {format_latency(found.exposed_comm_s)} ({share:.0f} %)")
    return said
