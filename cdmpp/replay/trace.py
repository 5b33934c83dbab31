"""A timeline as Chrome trace events, for chrome://tracing and Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdmpp.replay.timeline import Timeline


def trace_events(timeline: Timeline, programs: Sequence[str | None]) -> dict[str, Any]:
    """The trace as a JSON object.

    Parameters
    ----------
    timeline : Timeline
    programs : sequence of str or None, length nodes
        What each node runs, for its arguments.

    Returns
    -------
    dict
        ``traceEvents``: a complete event ("X") for each node on each stream that it holds, times in µs; the
        processes are devices, the threads streams. Nodes on the critical path say so in their arguments.
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
        for where in dict.fromkeys(((node.device, node.stream), *node.also)):
            events.append(
                {
                    "ph": "X",
                    "name": node.id,
                    "cat": node.kind,
                    "pid": process[where[0]],
                    "tid": thread[where],
                    "ts": starts[i],
                    "dur": lengths[i],
                    "args": arguments,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
