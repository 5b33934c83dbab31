"""What one run of a library call is, by protocol.

``eager``
    One call from the host. CUDA: between two events around the call, nothing queued before it, so that the
    launch is inside. CPU: by the host's clock.
``graph``
    CUDA only: one of the calls of a captured graph, which follow each other without the host.
``kernel``
    CUDA only: the time of the kernels alone, as the driver's tracing interface states it. A CPU kernel cannot
    be told from the call around it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cdmpp.errors import MeasurementError
from cdmpp.measure.library_calls import Call
from cdmpp.measure.timing import Evaluate

#: Calls in a captured graph: as many as take this long, so that replaying it is nothing beside them.
_GRAPH_S, _CALLS_IN_GRAPH = 2e-3, 20
#: Each traced run is some events to be kept.
_MOST_TRACED = 200


def _eager(call: Call, device: torch.device) -> Evaluate:
    if device.type == "cuda":
        return _eager_cuda(call, device)

    def evaluate(number: int, repeat: int) -> Sequence[float]:
        figures = []
        for _ in range(repeat):
            start = time.perf_counter()
            for _ in range(number):
                call()
            figures.append((time.perf_counter() - start) / number)
        return figures

    return evaluate


def _events() -> tuple[Any, Any]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, end


def _eager_cuda(call: Call, device: torch.device) -> Evaluate:
    def once() -> float:
        start, end = _events()
        torch.cuda.synchronize(device)
        start.record()
        call()
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end))

    def evaluate(number: int, repeat: int) -> Sequence[float]:
        with torch.cuda.device(device):
            return [sum(once() for _ in range(number)) / number for _ in range(repeat)]

    return evaluate


def _graph(call: Call, device: torch.device) -> Evaluate:
    once = _eager_cuda(call, device)
    calls = min(_CALLS_IN_GRAPH, max(1, math.ceil(_GRAPH_S / min(once(1, 2)))))
    with torch.cuda.device(device):
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # what is done once must not be captured
            for _ in range(3):
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()

    def evaluate(number: int, repeat: int) -> Sequence[float]:
        replays = -(-number // calls)
        figures = []
        with torch.cuda.device(device):
            for _ in range(repeat):
                start, end = _events()
                torch.cuda.synchronize(device)
                start.record()
                for _ in range(replays):
                    graph.replay()
                end.record()
                end.synchronize()
                figures.append(1e-3 * float(start.elapsed_time(end)) / (replays * calls))
        return figures

    return evaluate


def _kernel(call: Call, device: torch.device) -> Evaluate:
    def traced(number: int) -> float:
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(number):
                call()
            torch.cuda.synchronize(device)
        total_us = sum(
            event.self_device_time_total
            for event in trace.key_averages()
            if event.device_type == torch.profiler.DeviceType.CUDA
        )
        if not total_us:
            raise MeasurementError(
                "the profiler saw no kernel: its tracing interface (CUPTI) may not be used here",
                hint="--protocol graph or eager, or allow performance counters to users of the driver",
            )
        return 1e-6 * float(total_us) / number

    def evaluate(number: int, repeat: int) -> Sequence[float]:
        with torch.cuda.device(device):
            return [traced(min(number, _MOST_TRACED)) for _ in range(repeat)]

    return evaluate


#: Protocol -> how a call is timed on a device.
EVALUATORS: Mapping[str, Callable[[Call, torch.device], Evaluate]] = {
    "eager": _eager,
    "graph": _graph,
    "kernel": _kernel,
}
