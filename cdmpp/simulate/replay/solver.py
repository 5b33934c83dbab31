"""Solving a replay request: the replay, its what-ifs, and the interval of the makespan."""

from __future__ import annotations

import numpy as np

from cdmpp.predict.requests.budget import SearchControl
from cdmpp.simulate.replay.build import NodeDurations, price_nodes
from cdmpp.simulate.replay.collector import paused_collector
from cdmpp.simulate.replay.critical_path import explain, path_by_program, programs_of
from cdmpp.simulate.replay.engine import Replayer
from cdmpp.simulate.replay.graph import Floats
from cdmpp.simulate.replay.interval import sample_makespans, spread_of
from cdmpp.simulate.replay.rows import NodeRows
from cdmpp.simulate.replay.schema import (
    DeviceRow,
    MakespanInterval,
    PathNode,
    ReplayPlan,
    ReplayRequest,
    StreamRow,
    Trace,
    WhatIf,
)
from cdmpp.simulate.replay.timeline import Timeline
from cdmpp.simulate.replay.trace import trace_events

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
        streams=[
            StreamRow(device=use.device, stream=use.stream, busy_s=use.busy_s, idle_s=use.idle_s, nodes=use.nodes)
            for use in timeline.streams
        ],
        devices=[
            DeviceRow(device=device, exposed_comm_s=seconds)
            for device, seconds in timeline.exposed_comm_by_device_s.items()
        ],
        exposed_comm_s=timeline.exposed_comm_s,
        what_if=_what_ifs(request, replayer, durations.durations(), makespan_s),
        timeline=NodeRows(
            [node.id for node in nodes],
            [node.device for node in nodes],
            [node.stream for node in nodes],
            checked.classes,
            starts,
            ends,
        )
        if request.timeline
        else None,
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
        rows.append(
            WhatIf(
                node=override.node,
                device=override.device,
                stream=override.stream,
                class_=override.class_,
                ratio=override.ratio,
                delay_s=override.delay_s,
                nodes=len(matched),
                makespan_s=changed_s,
                saving_s=makespan_s - changed_s,
            )
        )
    return rows
