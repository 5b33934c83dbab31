"""Host time of an inference step: what a step takes beyond its kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostCost:
    """Host time of one step.

    Attributes
    ----------
    launch_s : (float, float, float)
        Seconds in which the host launches one kernel: point, lower and upper bound. The host runs ahead of the
        device: launches are visible only where they take longer than the kernels.
    step_s : float
        Seconds of the step in which the device waits: scheduling, preparation of inputs, sampled tokens.
    """

    launch_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    step_s: float = 0.0


#: A step that is one captured graph.
GRAPH = HostCost()
#: A step whose kernels the host launches. Median, 10 % and 90 % quantile of the difference of event time (a call from
#: the host) and kernel time (profiler) of the same call, over 4,407 calls of vLLM's layers with kernels below 20 us
#: (table ``ops_frontier``, docs/data.md). No table separates the host's time between steps.
EAGER = HostCost(launch_s=(19.5e-6, 3.7e-6, 50e-6))


def host_cost(captured: bool) -> HostCost:
    """Host time of a step; ``captured``: whether it is one CUDA graph. Prefill steps are not: their sizes differ."""
    return GRAPH if captured else EAGER


def step_seconds(kernels_s: float, launches: int, launch_s: float, step_s: float) -> float:
    """Duration of a step: the longer of kernels and launches, and the host's time between steps."""
    return max(kernels_s, launches * launch_s) + step_s
