"""Types of all operators on all devices, within the limits of memory and time.

A synchronous iteration ends with its slowest device, and the limits of an exchange
(:mod:`cdmpp.plan.precision.tables`) can be checked for each device alone. So for a given time limit the devices are
solved one by one without loss. Where no levels are within a limit, the error names the smallest limit that works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cdmpp.errors import InfeasibleError
from cdmpp.plan.precision.milp import Effort, ErrorSearch, Solution, minimise_memory, minimise_time
from cdmpp.plan.precision.pricing import DeviceCosts, Levels, Pricing, best_simple, fastest_uniform, heap, lowest
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.memory import IGNORE_HINT


def within_memory(costs: DeviceCosts, d: int, control: SearchControl) -> Levels:
    """Fewest bits where they fit; else the levels of least memory.

    Parameters
    ----------
    costs : DeviceCosts
    d : int
        Index of the device in the request.
    control : SearchControl

    Raises
    ------
    InfeasibleError
        No levels fit.
    """
    start = lowest(costs)
    if Pricing(costs, start).memory_bytes <= costs.memory_bytes:
        return start
    least = minimise_memory(costs, control)
    if least.objective <= costs.memory_bytes:
        return least.levels
    path = f"devices.{d}.memory_bytes"
    need = math.ceil(least.objective)
    smallest = "the plan of least memory" if least.proven else "the smallest plan found"
    raise InfeasibleError.at(
        path,
        f"{costs.name!r} has {costs.memory_bytes:.0f} bytes; {smallest} needs {need}",
        hint=_more_time(control, least.proven)
        + f"at least {need}, or smaller batches, or recomputation (fewer kept elements); {IGNORE_HINT}",
    )


def within_time(
    devices: Sequence[DeviceCosts], starts: Sequence[Levels], limit_s: float, control: SearchControl
) -> list[Levels]:
    """Levels within memory and time, by device; ``starts`` are within the memory.

    Raises
    ------
    InfeasibleError
        No levels are found on some device.
    """
    fastest = [minimise_time(costs, start, limit_s, control) for costs, start in zip(devices, starts, strict=True)]
    slowest = max(range(len(devices)), key=lambda d: fastest[d].objective)
    if fastest[slowest].objective > limit_s:
        least_s = rounded_up(fastest[slowest].objective)
        bound_s = max(solution.bound for solution in fastest)
        raise InfeasibleError.at(
            "iteration_limit_s",
            f"{limit_s} s; the fastest plan found takes {least_s} s on {devices[slowest].name!r}, and none takes less "
            f"than {bound_s:.6g} s",
            hint=_more_time(control, fastest[slowest].proven) + f"at least {least_s}",
        )
    return [solution.levels for solution in fastest]


def _more_time(control: SearchControl, proven: bool) -> str:
    """Advice where the search for any plan ended with the budget."""
    return "" if proven or not control.expired else "the budget ended this search: raise budget_s; or "


def rounded_up(value: float) -> float:
    """The next number of six digits that is not smaller (> 0): a limit that a request can state."""
    digits = 5 - math.floor(math.log10(value))
    if digits > 300:
        return math.nextafter(value, math.inf)
    out = math.ceil(value * 10.0**digits) / 10.0**digits
    return out if out >= value else math.nextafter(value, math.inf)


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
