"""Timing of a library call under each protocol. Like ``library_calls`` this file imports nothing from cdmpp.

``eager``
    One call from the host. CUDA: time between two events around the call, with an empty queue, so that it
    includes the launch. CPU: the host's clock.
``graph``
    CUDA only: one call of a captured graph, which runs calls back to back without the host.
``kernel``
    CUDA only: the time of the kernels, from the driver's tracing interface. On a CPU a kernel cannot be
    separated from the call around it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .library_calls import Call, CallError

#: Runs a call ``number`` times for each of ``repeat`` repeats; seconds per run, one value per repeat.
Evaluate = Callable[[int, int], Sequence[float]]

#: Duration and maximum number of calls of a captured graph, so that the cost of its replay is negligible.
_GRAPH_S, _CALLS_IN_GRAPH = 2e-3, 20
#: Maximum number of traced runs, because each keeps several events in memory.
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
        # A backward pass runs on the stream of its forward pass: capture that one where it is not the default.
        stream: Any = torch.cuda.current_stream(device)
        if stream == torch.cuda.default_stream(device):
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # one-time initialisation must not be captured
            for _ in range(3):
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
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
            raise CallError(
                "the profiler recorded no kernel: its tracing interface (CUPTI) may be forbidden here. Use the "
                "protocol graph or eager, or allow users to read the driver's performance counters"
            )
        return 1e-6 * float(total_us) / number

    def evaluate(number: int, repeat: int) -> Sequence[float]:
        with torch.cuda.device(device):
            return [traced(min(number, _MOST_TRACED)) for _ in range(repeat)]

    return evaluate


#: Timer of each protocol.
EVALUATORS: Mapping[str, Callable[[Call, torch.device], Evaluate]] = {
    "eager": _eager,
    "graph": _graph,
    "kernel": _kernel,
}
