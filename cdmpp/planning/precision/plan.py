"""The plan of a whole job: the starting points, the time limit, and the search on each device.

A synchronous iteration ends with its slowest device, and the limits of exchange.py are each device's own. So
with the time limit fixed the devices are planned one by one, and together are as good as planned at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cdmpp.compose.budget import SearchControl
from cdmpp.errors import InfeasibleError
from cdmpp.planning.precision.allocate import Found, Steps, fastest, search, simple
from cdmpp.planning.precision.pricing import DeviceCosts, Levels, Pricing, lowest, uniform
from cdmpp.planning.precision.relaxation import Relaxation
from cdmpp.programs.operators import DTYPE_BYTES

#: Steps of the search for a start that keeps the limits: it ends even where the budget is tiny.
_START_STEPS = 20_000


@dataclass
class Plan:
    """What was found.

    Attributes
    ----------
    limit_s : float
        Of the iteration.
    limit_of : {"request", "start"}
        Whether it was asked for, or is what the lowest precision takes.
    starts, found : list
        By device: the start of the heap, and the plan.
    """

    limit_s: float
    limit_of: str
    starts: list[Levels]
    found: list[Found]


def make_plan(
    devices: Sequence[DeviceCosts],
    limit_s: float | None,
    watch: SearchControl,
    *,
    max_steps: int | None = None,
    seed: int = 0,
    report: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """Types of all operators on all devices.

    Parameters
    ----------
    devices : sequence of DeviceCosts
    limit_s : float or None
        Seconds an iteration may take; None: what it takes where every operator has its fewest bits, or,
        where those break a memory limit, in the plan of least memory (QSync's start).
    watch : SearchControl
    max_steps : int, optional
        Of the search, over all devices.
    seed : int
    report : callable
        Hears of better plans.

    Raises
    ------
    InfeasibleError
        No plan keeps a device's memory, or the time.
    """
    starts = [_within_memory(costs, d) for d, costs in enumerate(devices)]
    limit_of = "start" if limit_s is None else "request"
    if limit_s is None:
        limit_s = max(Pricing(costs, start).iteration_s for costs, start in zip(devices, starts, strict=True))
    else:
        starts = _within_time(devices, starts, limit_s, watch)
    plan = Plan(limit_s, limit_of, starts, [])
    for costs, start in zip(devices, starts, strict=True):
        plan.found.append(simple(costs, start, limit_s))
    for d, costs in enumerate(devices):
        left = len(devices) - d
        until = None if watch.budget_s is None else watch.spent_s + watch.left_s / left
        most = None if max_steps is None else max(max_steps // len(devices), 1)

        def hear(found: Found, d: int = d) -> None:
            plan.found[d] = found
            report(plan)

        plan.found[d] = search(costs, plan.found[d], limit_s, Steps(watch, most, until), hear, seed)
    return plan


def _within_memory(costs: DeviceCosts, d: int) -> Levels:
    """Fewest bits where they fit; else the plan of least memory."""
    start = lowest(costs)
    if Pricing(costs, start).memory_bytes <= costs.memory_bytes:
        return start
    levels, bound = Relaxation(costs).least_memory()
    least = Pricing(costs, levels).memory_bytes
    if least <= costs.memory_bytes:
        return levels
    path = f"devices.{d}.memory_bytes"
    need = math.ceil(least)
    proven = "the plan of least memory" if bound >= least * (1 - 1e-9) else "the least that was found"
    raise InfeasibleError(
        f"{path}: {costs.name!r} has {costs.memory_bytes:.0f} bytes; {proven} needs {need}",
        path=path,
        hint=f"at least {need}, or smaller batches, or recomputation (fewer kept elements)",
    )


def _within_time(
    devices: Sequence[DeviceCosts], starts: list[Levels], limit_s: float, watch: SearchControl
) -> list[Levels]:
    out: list[Levels] = []
    slowest, bound_s, who = 0.0, 0.0, ""
    for costs, start in zip(devices, starts, strict=True):
        if Pricing(costs, start).within(limit_s):
            out.append(start)
            continue
        found = fastest(costs, start, Steps(SearchControl(None), _START_STEPS + 2 * costs.size).go_on, limit_s)
        out.append(found.levels)
        if found.iteration_s > slowest:
            slowest, who = found.iteration_s, costs.name
        bound_s = max(bound_s, found.bound_s)
    if slowest > limit_s:
        least = rounded_up(slowest)
        raise InfeasibleError(
            f"iteration_limit_s: {limit_s} s; the fastest plan that was found takes {least} s on {who!r}, "
            f"and none takes less than {bound_s:.6g} s",
            path="iteration_limit_s",
            hint=f"at least {least}",
        )
    return out


def rounded_up(value: float) -> float:
    """The next number of six digits that is no smaller (> 0): a limit that can be asked for."""
    digits = 5 - math.floor(math.log10(value))
    if digits > 300:
        return math.nextafter(value, math.inf)
    out = math.ceil(value * 10.0**digits) / 10.0**digits
    return out if out >= value else math.nextafter(value, math.inf)


@dataclass(frozen=True)
class Baseline:
    """A simpler plan, and whether it keeps the limits.

    Attributes
    ----------
    sensitivity : float
        Over all workers.
    memory_bytes : list of float
        By device.
    """

    name: str
    sensitivity: float
    iteration_s: float
    memory_bytes: list[float]
    feasible: bool


def baselines(devices: Sequence[DeviceCosts], plan: Plan) -> list[Baseline]:
    """All lowest, all float32, the best of one type for each device, the start, and the heap alone."""
    one_type: list[Levels] = []
    for costs in devices:
        tried = [Pricing(costs, uniform(costs, dtype)) for dtype in DTYPE_BYTES]
        kept = [priced for priced in tried if priced.within(plan.limit_s)]
        one_type.append(min(kept or tried[:1], key=lambda priced: priced.sensitivity).levels)
    choices = {
        "all_lowest": [lowest(costs) for costs in devices],
        "all_float32": [uniform(costs, "float32") for costs in devices],
        "best_uniform": one_type,
        "start": plan.starts,
        "heap": [found.heap for found in plan.found],
    }
    out: list[Baseline] = []
    for name, levels in choices.items():
        priced = [Pricing(costs, at) for costs, at in zip(devices, levels, strict=True)]
        out.append(
            Baseline(
                name,
                total(devices, [one.sensitivity for one in priced]),
                max(one.iteration_s for one in priced),
                [one.memory_bytes for one in priced],
                all(one.within(plan.limit_s) for one in priced),
            )
        )
    return out


def total(devices: Sequence[DeviceCosts], errors: Sequence[float]) -> float:
    """Sum of what one worker of each device adds, over all workers."""
    return float(sum(costs.workers * one for costs, one in zip(devices, errors, strict=True)))
