"""A timeline as Chrome trace events, for chrome://tracing and Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdmpp.simulate.replay.timeline import Timeline


def trace_events(timeline: Timeline, programs: Sequence[str | None]) -> list[dict[str, Any]]:
    """The events of a trace.

    Parameters
    ----------
    timeline : Timeline
    programs : sequence of str or None, length nodes
        Program of each node, for its arguments.

    Returns
    -------
    list of dict
        A complete event ("X") for each node on each stream that it holds, times in µs. Processes are devices,
        threads are streams. The argument ``critical`` marks nodes on the critical path.
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
            events.append(
                {
                    "ph": "X",
                    "name": node.id,
                    "cat": node.kind,
                    "pid": process[stream[0]],
                    "tid": thread[stream],
                    "ts": starts[i],
                    "dur": lengths[i],
                    "args": arguments,
                }
            )
    return events
