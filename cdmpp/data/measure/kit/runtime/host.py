"""Host part of a job: how long PyTorch's host takes per call, for a model of the host.

An item has ``case`` (a key of ``CASES``, or "graph_launch"), ``queue`` and, for chains and graphs, ``nodes``.

``idle``
    The GPU has no work when a call begins: it is synchronised before each call, outside the timed span.
``full``
    A spinning kernel occupies the GPU. The calls queue behind it, so the host never waits.

Times are seconds of the host per call (``repeats_s["host"]``). A CUDA graph also has seconds of the GPU per launch
(``repeats_s["device"]``).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as nn

from .library import PROJECT, Item, device_facts, error_line, find_device, module_command, use_caches
from .library_calls import Call, CallError

#: Numbers of kernels of chains and of nodes of CUDA graphs.
CHAIN_NODES, GRAPH_NODES = (1, 8, 64), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
QUEUES = ("idle", "full")
_REPEATS, _CALLS = 7, 64
#: Cycles of the spinning kernel, some 50 ms, and how often it is doubled if the calls outlast it.
_SPIN_CYCLES, _DOUBLINGS = 10**8, 4
#: A GPU queues at least this many launches before the host waits.
_QUEUED_LAUNCHES = 512
_WIDTH = 64


def _nothing(device: torch.device, nodes: int) -> Call:
    return lambda: None


def _view(device: torch.device, nodes: int) -> Call:
    x = torch.ones(_WIDTH, _WIDTH, device=device)
    return lambda: x.view(-1)


def _dispatch_only(device: torch.device, nodes: int) -> Call:
    x = torch.ones(0, device=device)  # an addition of no elements launches no kernel
    return lambda: torch.add(x, x, out=x)


def _kernel_launch(device: torch.device, nodes: int) -> Call:
    x, result = torch.ones(_WIDTH, device=device), torch.empty(_WIDTH, device=device)
    return lambda: torch.add(x, x, out=result)


def _allocation(device: torch.device, nodes: int) -> Call:
    return lambda: torch.empty(_WIDTH, device=device)


def _kernel_and_allocation(device: torch.device, nodes: int) -> Call:
    x = torch.ones(_WIDTH, device=device)
    return lambda: x + x


def _linear(device: torch.device, nodes: int) -> Call:
    x, w = torch.ones(_WIDTH, _WIDTH, device=device), torch.ones(_WIDTH, _WIDTH, device=device)
    return lambda: nn.linear(x, w)


def _linear_module(device: torch.device, nodes: int) -> Call:
    x, module = torch.ones(_WIDTH, _WIDTH, device=device), torch.nn.Linear(_WIDTH, _WIDTH, device=device)
    module.requires_grad_(False)
    return lambda: module(x)


def _chain(nodes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(nodes):
            x = torch.sin(x)
        return x

    return run


def _chain_forward(device: torch.device, nodes: int) -> Call:
    run, x = _chain(nodes), torch.ones(_WIDTH, device=device)
    return lambda: run(x)


def _autograd_forward(device: torch.device, nodes: int) -> Call:
    run, x = _chain(nodes), torch.ones(_WIDTH, device=device, requires_grad=True)
    return lambda: run(x)


def _autograd_backward(device: torch.device, nodes: int) -> Call:
    x = torch.ones(_WIDTH, device=device, requires_grad=True)
    result, gradient = _chain(nodes)(x), torch.ones(_WIDTH, device=device)
    return lambda: torch.autograd.grad(result, (x,), gradient, retain_graph=True)


def _inference_chain(device: torch.device, nodes: int) -> Call:
    run, x = _chain(nodes), torch.ones(_WIDTH, device=device)

    @torch.inference_mode()
    def call() -> torch.Tensor:
        return run(x)

    return call


def _compiled_chain(device: torch.device, nodes: int) -> Call:
    torch._dynamo.reset()
    run, x = torch.compile(_chain(nodes), dynamic=False), torch.ones(_WIDTH, device=device)
    return lambda: run(x)


def _compiled_module(device: torch.device, nodes: int) -> Call:
    torch._dynamo.reset()
    module = torch.nn.Linear(_WIDTH, _WIDTH, device=device).requires_grad_(False)
    run, x = torch.compile(module, dynamic=False), torch.ones(_WIDTH, _WIDTH, device=device)
    return lambda: run(x)


def _autocast_region(device: torch.device, nodes: int) -> Call:
    def call() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            pass

    return call


def _autocast_linear(device: torch.device, nodes: int, *, cached: bool = False) -> Call:
    """Both operands are cast in each call; with ``cached`` the cast of the weight is kept within a region."""
    x = torch.ones(_WIDTH, _WIDTH, device=device)
    w = torch.ones(_WIDTH, _WIDTH, device=device, requires_grad=cached)  # only parameters are cached

    def call() -> None:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=cached):
            for _ in range(nodes):
                nn.linear(x, w)

    return call


def _autocast_linear_cached(device: torch.device, nodes: int) -> Call:
    return _autocast_linear(device, nodes, cached=True)


def _cast(device: torch.device, nodes: int) -> Call:
    x = torch.ones(_WIDTH, _WIDTH, device=device)
    return lambda: x.to(torch.bfloat16)


#: Cases of one call, and cases of a chain of ``nodes`` calls.
SINGLE: Mapping[str, Callable[[torch.device, int], Call]] = {
    "nothing": _nothing,
    "view": _view,
    "dispatch_only": _dispatch_only,
    "kernel_launch": _kernel_launch,
    "allocation": _allocation,
    "kernel_and_allocation": _kernel_and_allocation,
    "linear": _linear,
    "linear_module": _linear_module,
    "compiled_linear_module": _compiled_module,
    "cast": _cast,
    "autocast_region": _autocast_region,
}
CHAINS: Mapping[str, Callable[[torch.device, int], Call]] = {
    "chain": _chain_forward,
    "inference_chain": _inference_chain,
    "compiled_chain": _compiled_chain,
    "autograd_forward": _autograd_forward,
    "autograd_backward": _autograd_backward,
    "autocast_linear": _autocast_linear,
    "autocast_linear_cached": _autocast_linear_cached,
}
CASES = {**SINGLE, **CHAINS}
GRAPH_LAUNCH = "graph_launch"


def items() -> list[Item]:
    """Return the items of a host part."""
    cases = [(case, 1) for case in SINGLE]
    cases += [(case, nodes) for case in CHAINS for nodes in CHAIN_NODES]
    cases += [(GRAPH_LAUNCH, nodes) for nodes in GRAPH_NODES]
    return [
        {"id": f"{case}-{nodes}-{queue}", "case": case, "nodes": nodes, "queue": queue}
        for case, nodes in cases
        for queue in QUEUES
    ]


class Kind:
    """Cases of a host part; the methods are those that ``run.py`` calls."""

    def __init__(self, part: Any, folder: Path) -> None:
        self._folder = folder
        self._compiled = any("compiled" in item["case"] for item in part.items)
        self._device = torch.device("cpu")
        use_caches(folder)

    def prepare(self, deadline: float) -> None:
        """Compile the compiled cases until ``deadline`` (``time.monotonic``)."""
        done = self._folder / "host-compiled"
        if self._compiled and not done.exists():
            find_device()  # an error here is a message of run.py
            with suppress(subprocess.TimeoutExpired):  # the rest is compiled when it is measured
                wait_s = max(0.0, deadline - time.monotonic())
                subprocess.run(module_command(__name__, self._folder), cwd=PROJECT, timeout=wait_s, check=False)
                done.touch()

    def open(self) -> dict[str, Any]:
        """Prepare PyTorch in the process that measures."""
        self._device = find_device()
        return device_facts(self._device)

    def measure(self, item: Item) -> dict[str, Any]:
        """Time one case."""
        try:
            return {"repeats_s": self._times(item), "failure": ""}
        except Exception as error:
            return {"repeats_s": {}, "failure": error_line(error)}

    def _times(self, item: Item) -> dict[str, list[float]]:
        case, nodes, queue = item["case"], item["nodes"], item["queue"]
        if queue not in QUEUES:
            raise CallError(f"unknown queue {queue!r}: " + ", ".join(QUEUES))
        if self._device.type != "cuda" and (queue == "full" or case == GRAPH_LAUNCH):
            raise CallError("a CPU has no queue of launches and no CUDA graphs")
        if case == GRAPH_LAUNCH:
            graph = _graph(self._device, nodes)
            host = self._host_times(graph.replay, queue, kernels=1)
            return {"host": host, "device": [_device_time(graph) for _ in range(_REPEATS)]}
        if case not in CASES:
            raise CallError(f"unknown case {case!r}: " + ", ".join([*CASES, GRAPH_LAUNCH]))
        return {"host": self._host_times(CASES[case](self._device, nodes), queue, kernels=4 * nodes)}

    def _host_times(self, call: Call, queue: str, kernels: int) -> list[float]:
        for _ in range(3):  # compilation, selection of kernels, filling of caches
            call()
        self._synchronise()
        if queue == "idle":
            return [self._idle(call) for _ in range(_REPEATS)]
        calls = max(1, min(_CALLS, _QUEUED_LAUNCHES // kernels))
        return [_behind_spinning_kernel(call, calls) for _ in range(_REPEATS)]

    def _idle(self, call: Call) -> float:
        total = 0.0
        for _ in range(_CALLS):
            self._synchronise()
            start = time.perf_counter()
            call()
            total += time.perf_counter() - start
        return total / _CALLS

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _behind_spinning_kernel(call: Call, calls: int) -> float:
    """Seconds of the host per call while the GPU is busy from the first call to the last."""
    cycles = _SPIN_CYCLES
    for _ in range(_DOUBLINGS):
        torch.cuda.synchronize()
        busy: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        busy.record()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = time.perf_counter() - start
        was_busy = not busy.query()
        torch.cuda.synchronize()
        if was_busy:
            return seconds / calls
        cycles *= 2
    raise CallError(f"the GPU finished a spinning kernel of {cycles // 2} cycles before the host made {calls} calls")


def _graph(device: torch.device, nodes: int) -> Any:
    x, result = torch.ones(_WIDTH, device=device), torch.empty(_WIDTH, device=device)
    torch.add(x, x, out=result)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            torch.add(x, x, out=result)
    return graph


def _device_time(graph: Any) -> float:
    """Seconds of the GPU per launch, between events around one launch with an empty queue."""
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))


def compile_cases(folder: Path) -> None:
    """Compile all compiled cases; used by the process of :meth:`Kind.prepare`."""
    use_caches(folder)
    device = find_device()
    for item in items():
        if "compiled" in item["case"] and item["queue"] == "idle":
            try:
                CASES[item["case"]](device, item["nodes"])()
            except Exception as error:  # the measurement records it as the item's failure
                print(f"{item['id']} does not compile: {error_line(error)}", file=sys.stderr)


if __name__ == "__main__":
    compile_cases(Path(sys.argv[1]))
