"""Solving a replay request: the replay, its what-ifs, and the interval of the makespan.

The plan also has the critical path by program, the explanation of the makespan, and the timeline as Chrome trace
events. The interval is sampled from the intervals of the predictions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import DataError
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests import plot
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import BLUE, PALE_GREY, YELLOW, Bar, colours_of, draw_legend, draw_timeline, new_figure
from cdmpp.predict.requests.request import PriceRequest
from cdmpp.simulate.replay.build import CheckedNodes, NodeDurations, named_ranks, price_nodes
from cdmpp.simulate.replay.engine import Replayer, Timeline
from cdmpp.simulate.replay.graph import Floats, Ints
from cdmpp.simulate.replay.records import NodeRows, paused_collector
from cdmpp.simulate.replay.schema import (
    DeviceRow,
    MakespanInterval,
    PathNode,
    PathShare,
    ReplayPlan,
    ReplayRequest,
    StreamRow,
    Trace,
    WhatIf,
)
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Without ``samples`` in the request, as many as keep samples times size of the graph below this, within limits.
AUTO_WORK, AUTO_LEAST, AUTO_MOST = 6_000_000, 16, 256


def solve(request: ReplayRequest, control: SearchControl) -> ReplayPlan:
    """Replay, then replay again for each what-if and sample."""
    with paused_collector():
        return _solve(request)


def _solve(request: ReplayRequest) -> ReplayPlan:
    checked = request.checked
    durations = price_nodes(checked, request.prices)
    replayer = request.replayer.with_durations(durations.durations())
    timeline = replayer.run()
    programs = programs_of(checked, durations, request.prices)
    shares = path_by_program(checked, durations, request.prices, timeline)
    nodes, makespan_s = timeline.graph.nodes, timeline.makespan_s
    starts, ends = timeline.start_s.tolist(), timeline.end_s.tolist()
    columns = [[getattr(node, name) for node in nodes] for name in ("id", "device", "stream")]
    return ReplayPlan(
        makespan_s=makespan_s,
        lower_bound_s=min(max(replayer.longest_path_s, replayer.busiest_stream_s), makespan_s),
        interval=_interval(request, durations, replayer, makespan_s),
        critical_path=[
            PathNode(
                id=nodes[i].id,
                device=nodes[i].device,
                stream=nodes[i].stream,
                class_=checked.classes[i],
                start_s=starts[i],
                end_s=ends[i],
                share=float(timeline.duration_s[i]) / makespan_s if makespan_s else 0.0,
                program=programs[i],
            )
            for i in timeline.critical_path
        ],
        by_program=shares,
        streams=[StreamRow(**vars(use)) for use in timeline.streams],
        devices=[DeviceRow(device=name, exposed_comm_s=s) for name, s in timeline.exposed_comm_by_device_s.items()],
        exposed_comm_s=timeline.exposed_comm_s,
        what_if=_what_ifs(request, replayer, durations.durations(), makespan_s),
        timeline=NodeRows(*columns, checked.classes, starts, ends) if request.timeline else None,
        missing=request.missing,
        remarks=list(checked.remarks),
        trace=Trace(trace_events=trace_events(timeline, programs)) if request.trace else None,
        baselines={"serial": _serial_s(timeline), "longest_path": min(replayer.longest_path_s, makespan_s)},
        explanation=explain(shares, timeline),
    )


def _serial_s(timeline: Timeline) -> float:
    """Seconds of all nodes one after the other, with the gaps between them."""
    gaps = [node.gap_s for node in timeline.graph.nodes]
    return float(timeline.duration_s.sum()) + sum(gaps) - max(gaps, default=0.0)


def sample_count(request: ReplayRequest) -> int:
    """Samples of the interval; 0 where nothing is predicted."""
    if not request.checked.price_requests:
        return 0
    if request.samples is not None:
        return request.samples
    return min(max(AUTO_WORK // request.replayer.arrays.size, AUTO_LEAST), AUTO_MOST)


def _interval(
    request: ReplayRequest, durations: NodeDurations, replayer: Replayer, makespan_s: float
) -> MakespanInterval | None:
    samples, predicted = sample_count(request), bool(request.checked.price_requests)
    if predicted and not samples:
        return None
    makespans = np.array([makespan_s])
    if samples:
        spread = spread_of(request.checked.price_requests, request.prices)
        makespans = sample_makespans(replayer, durations, spread.factors(samples, request.seed, request.correlation))
    levels = sorted(set(request.quantiles))
    values = np.quantile(makespans, levels).tolist()
    return MakespanInterval(
        lower_s=min(values[0], makespan_s),
        upper_s=max(values[-1], makespan_s),
        quantiles={f"{level:g}": value for level, value in zip(levels, values, strict=True)},
        mean_s=float(makespans.mean()),
        samples=samples,
    )


def _what_ifs(request: ReplayRequest, replayer: Replayer, durations: Floats, makespan_s: float) -> list[WhatIf]:
    rows = []
    for override, matched in zip(request.overrides, request.matches(), strict=True):
        changed = durations.copy()
        changed[matched] = override.ratio * np.maximum(changed[matched] + override.delay_s, 0.0)
        changed_s = float(replayer.makespans(changed[None])[0])
        rows.append(WhatIf(**dict(override), nodes=len(matched), makespan_s=changed_s, saving_s=makespan_s - changed_s))
    return rows


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


#: Most node durations in memory at a time, 8 bytes each.
_CHUNK = 2_000_000


@dataclass(frozen=True)
class DurationSpread:
    """Errors of the predictions as factors around 1."""

    # (draws,): logarithm of the factor for one standard deviation to either side.
    below: Floats
    above: Floats
    draw: Ints  # (prices,): draw of each price: equal programs on equal devices have the same error
    device: Ints  # (draws,): device of each draw

    def factors(self, samples: int, seed: int, correlation: float) -> Floats:
        """Sampled factors, shape samples x prices.

        A draw z from the normal distribution gives exp(z x below) or exp(z x above), by its sign: a
        lognormal in two pieces, whose median is the prediction and whose quantiles are the interval's ends.
        ``correlation`` is that of the draws of different programs on one device.
        """
        random = np.random.default_rng(seed)
        z = random.standard_normal((samples, len(self.below)))
        if correlation:
            shared = random.standard_normal((samples, int(self.device.max()) + 1))[:, self.device]
            z = np.sqrt(correlation) * shared + np.sqrt(1.0 - correlation) * z
        factors: Floats = np.exp(z * np.where(z < 0, self.below, self.above))
        return factors[:, self.draw]


def spread_of(requests: Sequence[PriceRequest], prices: Sequence[Prediction]) -> DurationSpread:
    """The errors of predictions, from their intervals."""
    keys = [
        (json.dumps(request.device, sort_keys=True), price.name, str(price.program_hash), price.backend)
        for request, price in zip(requests, prices, strict=True)
    ]
    numbers = {key: i for i, key in enumerate(sorted(set(keys)))}  # independent of the order of the request
    below, above = np.zeros(len(numbers)), np.zeros(len(numbers))
    for key, price in zip(keys, prices, strict=True):
        below[numbers[key]], above[numbers[key]] = _slopes(price)
    devices = {name: i for i, name in enumerate(sorted({key[0] for key in keys}))}
    draw = np.array([numbers[key] for key in keys], dtype=np.int64)
    return DurationSpread(below, above, draw, np.array([devices[key[0]] for key in numbers], dtype=np.int64))


def _slopes(price: Prediction) -> tuple[float, float]:
    assert price.latency_s is not None and price.lower_s is not None and price.upper_s is not None
    levels = [float(level) for level in price.quantiles]
    low, high = min(levels), max(levels)
    below = np.log(price.latency_s / price.lower_s) / -NormalDist().inv_cdf(low) if low < 0.5 else 0.0
    above = np.log(price.upper_s / price.latency_s) / NormalDist().inv_cdf(high) if high > 0.5 else 0.0
    return float(below), float(above)


def sample_makespans(replayer: Replayer, nodes: NodeDurations, factors: Floats) -> Floats:
    """Makespans with the predictions scaled by sampled factors, one for each sample."""
    rows = max(1, _CHUNK // max(len(nodes.given_s), 1))
    makespans = [
        replayer.makespans(np.stack([nodes.durations(row) for row in factors[at : at + rows]]))
        for at in range(0, len(factors), rows)
    ]
    return np.concatenate(makespans)


def trace_events(timeline: Timeline, programs: Sequence[str | None]) -> list[dict[str, Any]]:
    """The events of a trace: a complete event ("X") for each node on each stream that it holds, times in µs.

    Processes are devices, threads are streams. The argument ``critical`` marks nodes on the critical path.
    ``programs``: program of each node, for its arguments.
    """
    streams = [(use.device, use.stream) for use in timeline.streams]
    process = {device: i for i, device in enumerate(dict.fromkeys(device for device, _ in streams))}
    thread = {stream: i for i, stream in enumerate(streams)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": device}}
        for device, pid in process.items()
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": process[device], "tid": tid, "args": {"name": stream}}
        for (device, stream), tid in thread.items()
    ]
    critical = set(timeline.critical_path)
    starts, lengths = (timeline.start_s * 1e6).tolist(), (timeline.duration_s * 1e6).tolist()
    for i, node in enumerate(timeline.graph.nodes):
        arguments: dict[str, Any] = {"critical": i in critical}
        program = programs[i]
        if program is not None:
            arguments["program"] = program
        for stream in dict.fromkeys(((node.device, node.stream), *node.also)):
            event = {"ph": "X", "name": node.id, "cat": node.kind, "pid": process[stream[0]], "tid": thread[stream]}
            events.append(event | {"ts": starts[i], "dur": lengths[i], "args": arguments})
    return events


_COLOURS = {"compute": BLUE, "comm": YELLOW, "gap": PALE_GREY}
_MOST_STREAMS, _MOST_TEXTS, _MOST_CLASSES = 64, 120, 8


def draw(request: ReplayRequest, plan: ReplayPlan) -> Figure:
    """The timeline by (device, stream); colours are classes, black outlines the critical path.

    Raises DataError: the plan has no timeline, because the request has ``timeline: false``.
    """
    if plan.timeline is None:
        raise DataError("the plan has no timeline to draw", hint='leave "timeline" out of the request')
    streams = [(use.device, use.stream) for use in plan.streams][:_MOST_STREAMS]
    row = {stream: i for i, stream in enumerate(streams)}
    ranks = {node.id: named for node in request.nodes if (named := named_ranks(node)) is not None}
    colours = colours_of(list(dict.fromkeys(node.class_ for node in plan.timeline)), _COLOURS)
    critical = {node.id for node in plan.critical_path}
    bars = [
        Bar(
            row[device, node.stream],
            node.start_s,
            node.end_s,
            colours[node.class_],
            node.id if len(plan.timeline) <= _MOST_TEXTS else "",
            outlined=node.id in critical,
        )
        for node in plan.timeline[: plot.MAX_BARS]
        for device in ranks.get(node.id, [node.device])
        if (device, node.stream) in row
    ]
    figure = new_figure(10, 1.4 + 0.42 * len(streams))
    axes = figure.subplots()
    draw_timeline(axes, bars, [f"{device} / {stream}" for device, stream in streams], plan.makespan_s)
    title = f"makespan {format_latency(plan.makespan_s)}, {100 * plan.gap:.1f} % above the lower bound"
    if len(bars) > plot.MAX_BARS or len(plan.timeline) > plot.MAX_BARS or len(plan.streams) > _MOST_STREAMS:
        title += f" (part of {len(plan.timeline):,} nodes on {len(plan.streams)} streams)"
    axes.set_title(title)
    draw_legend(figure, dict(list(colours.items())[:_MOST_CLASSES]), outlined="critical path")
    return figure
