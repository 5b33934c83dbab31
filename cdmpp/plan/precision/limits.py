"""Levels within the limits of memory and time on each device, and errors that name the smallest limit that works."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cdmpp.errors import InfeasibleError
from cdmpp.plan.precision.milp import minimise_memory, minimise_time
from cdmpp.plan.precision.pricing import DeviceCosts, Levels, Pricing, lowest
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
    raise InfeasibleError(
        f"{path}: {costs.name!r} has {costs.memory_bytes:.0f} bytes; {smallest} needs {need}",
        path=path,
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
        raise InfeasibleError(
            f"iteration_limit_s: {limit_s} s; the fastest plan found takes {least_s} s on "
            f"{devices[slowest].name!r}, and none takes less than {bound_s:.6g} s",
            path="iteration_limit_s",
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
