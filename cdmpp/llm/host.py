"""Host time of an inference step: what a step takes beyond its kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostCost:
    """Host time of one step.

    Attributes
    ----------
    launch_s : float
        Seconds in which the host launches one kernel. The host runs ahead of the device: launches are visible only
        where they take longer than the kernels.
    step_s : float
        Seconds of the step in which the device waits: scheduling, preparation of inputs, sampled tokens.
    """

    launch_s: float
    step_s: float


#: A step that is one captured graph, and a step whose kernels the host launches. The launch is the median difference
#: of event time (a call from the host) and kernel time (profiler) of the same call, over 4,407 calls of vLLM's layers
#: with kernels below 20 us (``ops_frontier``, docs/data.md). No data set separates the host's time between steps.
GRAPH = HostCost(launch_s=0.0, step_s=0.0)
EAGER = HostCost(launch_s=19.5e-6, step_s=0.0)


def host_cost(captured: bool) -> HostCost:
    """Host time of a step; ``captured``: whether it is one CUDA graph. Prefill steps are not: their sizes differ."""
    return GRAPH if captured else EAGER


def step_seconds(kernels_s: float, launches: int, cost: HostCost) -> float:
    """Duration of a step: the longer of kernels and launches, and the host's time between steps."""
    return max(kernels_s, launches * cost.launch_s) + cost.step_s
