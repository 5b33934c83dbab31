"""Types of all operators on all devices, within one time limit.

A synchronous iteration ends with its slowest device, and the limits of :mod:`cdmpp.plan.precision.exchange`
can be checked for each device alone. So for a given time limit the devices are solved one by one without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cdmpp.plan.precision.highs import Effort
from cdmpp.plan.precision.limits import within_memory, within_time
from cdmpp.plan.precision.milp import ErrorSearch, Solution
from cdmpp.plan.precision.pricing import DeviceCosts, Levels, Pricing
from cdmpp.plan.precision.qsync import best_simple, fastest_uniform, heap
from cdmpp.predict.requests.budget import SearchControl


@dataclass(frozen=True)
class JobSolution:
    """Solutions of all devices.

    Attributes
    ----------
    limit_s : float
        Time limit of an iteration.
    limit_of : {"request", "start"}
        Whether the request gives it, or the start takes it.
    starts, heaps : list of list of int
        By device: levels that the heap starts from, and levels that it finds.
    solutions : list of Solution
        By device; errors of one worker.
    """

    limit_s: float
    limit_of: Literal["request", "start"]
    starts: list[Levels]
    heaps: list[Levels]
    solutions: list[Solution]


def search(
    devices: Sequence[DeviceCosts],
    limit_s: float | None,
    control: SearchControl,
    *,
    max_steps: int | None = None,
    seed: int = 0,
    report: Callable[[JobSolution], None] = lambda solution: None,
) -> JobSolution:
    """The smallest error on each device.

    Parameters
    ----------
    devices : sequence of DeviceCosts
    limit_s : float or None
        Seconds of an iteration. None: those of the start, which is the fastest plan of one type on each device.
    control : SearchControl
        Its budget is shared by the devices.
    max_steps : int, optional
        Branch-and-bound nodes of all devices together.
    seed : int
    report : callable
        Called with better plans and bounds.

    Raises
    ------
    InfeasibleError
        No levels are within a device's memory, or within the time.
    """
    starts = [within_memory(costs, d, control) for d, costs in enumerate(devices)]
    limit_of: Literal["request", "start"] = "start" if limit_s is None else "request"
    if limit_s is None:
        starts = [fastest_uniform(costs, start) for costs, start in zip(devices, starts, strict=True)]
        limit_s = max(Pricing(costs, start).iteration_s for costs, start in zip(devices, starts, strict=True))
    else:
        starts = within_time(devices, starts, limit_s, control)
    heaps = [heap(costs, start, limit_s) for costs, start in zip(devices, starts, strict=True)]
    job = JobSolution(limit_s, limit_of, starts, heaps, [])
    searches: list[ErrorSearch] = []
    for costs, levels in zip(devices, heaps, strict=True):
        start = best_simple(costs, levels, limit_s)
        searches.append(ErrorSearch(costs, start, limit_s, lambda _: report(job)))
        job.solutions.append(searches[-1].best)
    nodes = None if max_steps is None else max(max_steps // len(devices), 1)
    # All devices get the plan of the relaxation before the first is improved further.
    for step in (ErrorSearch.relax, ErrorSearch.branch_and_bound):
        for d, device_search in enumerate(searches):
            share = None if control.budget_s is None else control.spent_s + control.left_s / (len(devices) - d)
            step(device_search, Effort(control, share, nodes, seed))
    return job


def total(devices: Sequence[DeviceCosts], errors: Sequence[float]) -> float:
    """Sum of the errors of one worker of each device, over all workers."""
    return float(sum(costs.workers * error for costs, error in zip(devices, errors, strict=True)))
