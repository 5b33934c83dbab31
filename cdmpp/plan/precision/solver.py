"""Solving a precision request: tables, the search, and the plan with its baselines and reasons.

The reasons are what limits the time, which raises were rejected, and where the error comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from cdmpp.plan.precision.network import Network, read_network
from cdmpp.plan.precision.pricing import DeviceCosts, Levels, Pricing, lowest, uniform
from cdmpp.plan.precision.schema import (
    BaselinePlan,
    BrokenLimit,
    DevicePlan,
    PrecisionPlan,
    PrecisionRequest,
    RejectedRaise,
)
from cdmpp.plan.precision.search import JobSolution, search, total
from cdmpp.plan.precision.tables import DeviceTables, build_tables
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.programs.elements import BASIC_DTYPES
from cdmpp.utils.units import format_latency, format_si


def solve(request: PrecisionRequest, control: SearchControl) -> PrecisionPlan:
    """The plan of least error within each device's memory and the iteration's time.

    Raises
    ------
    FieldError
        Parts of the request contradict each other, or a cost is missing.
    InfeasibleError
        No plan is within the limits.
    MissingDependencyError
        highspy is not installed.
    """
    network = read_network(request)
    tables = build_tables(request, network)
    devices = [table.costs for table in tables]

    def report(job: JobSolution) -> None:
        # The search changes these objects; the plan is made later, or never.
        snapshot = replace(job, solutions=[replace(solution) for solution in job.solutions])
        control.report(
            best=total(devices, [solution.objective for solution in snapshot.solutions]),
            bound=total(devices, [solution.bound for solution in snapshot.solutions]),
            answer=lambda: _plan(network, tables, snapshot),
        )

    job = search(
        devices, request.iteration_limit_s, control, max_steps=request.max_steps, seed=request.seed, report=report
    )
    return _plan(network, tables, job)


def _plan(network: Network, tables: Sequence[DeviceTables], job: JobSolution) -> PrecisionPlan:
    devices = [table.costs for table in tables]
    levels = [solution.levels for solution in job.solutions]
    priced = [Pricing(costs, chosen) for costs, chosen in zip(devices, levels, strict=True)]
    sensitivity = total(devices, [pricing.sensitivity for pricing in priced])
    simpler = baseline_plans(devices, job)
    rejected = rejected_raises(network, priced, job.limit_s)
    return PrecisionPlan(
        sensitivity=sensitivity,
        lower_bound=min(total(devices, [solution.bound for solution in job.solutions]), sensitivity),
        iteration_s=max(pricing.iteration_s for pricing in priced),
        iteration_lower_s=max(Pricing(t.lower, chosen).iteration_s for t, chosen in zip(tables, levels, strict=True)),
        iteration_upper_s=max(Pricing(t.upper, chosen).iteration_s for t, chosen in zip(tables, levels, strict=True)),
        iteration_limit_s=job.limit_s,
        limit_of=job.limit_of,
        devices=[_device_plan(network, tables, job, d, pricing) for d, pricing in enumerate(priced)],
        rejected=rejected,
        baselines={plan.name: plan.sensitivity for plan in simpler if plan.feasible},
        baseline_plans=simpler,
        explanation=explain(network, tables, priced, job.limit_s, job.limit_of, rejected),
    )


def _device_plan(
    network: Network, tables: Sequence[DeviceTables], job: JobSolution, d: int, pricing: Pricing
) -> DevicePlan:
    costs, solution = tables[d].costs, job.solutions[d]
    dtypes = [names[level] for names, level in zip(costs.dtypes, pricing.levels, strict=True)]
    return DevicePlan(
        name=costs.name,
        dtypes={operator.id: dtype for operator, dtype in zip(network.operators, dtypes, strict=True)},
        iteration_s=pricing.iteration_s,
        compute_s=float(pricing.slots_s.sum()),
        casts_s=pricing.casts_s,
        memory_bytes=pricing.memory_bytes,
        memory_limit_bytes=network.devices[d].memory_bytes,
        sensitivity=pricing.sensitivity,
        lower_bound=solution.bound,
        proven=solution.proven,
        cast_source=tables[d].cast_source,
    )


def baseline_plans(devices: Sequence[DeviceCosts], job: JobSolution) -> list[BaselinePlan]:
    """All lowest, all float32, the best of one type for each device, the start, and QSync's heap alone."""
    one_type: list[Levels] = []
    for costs in devices:
        plans = [Pricing(costs, uniform(costs, dtype)) for dtype in BASIC_DTYPES]
        feasible = [plan for plan in plans if plan.within(job.limit_s)]
        one_type.append(min(feasible or plans[:1], key=lambda plan: plan.sensitivity).levels)
    choices = {
        "all_lowest": [lowest(costs) for costs in devices],
        "all_float32": [uniform(costs, "float32") for costs in devices],
        "best_uniform": one_type,
        "start": job.starts,
        "heap": job.heaps,
    }
    out: list[BaselinePlan] = []
    for name, levels in choices.items():
        priced = [Pricing(costs, chosen) for costs, chosen in zip(devices, levels, strict=True)]
        out.append(
            BaselinePlan(
                name=name,
                sensitivity=total(devices, [pricing.sensitivity for pricing in priced]),
                iteration_s=max(pricing.iteration_s for pricing in priced),
                memory_bytes={pricing.costs.name: pricing.memory_bytes for pricing in priced},
                feasible=all(pricing.within(job.limit_s) for pricing in priced),
            )
        )
    return out


_MOST = 3


def rejected_raises(network: Network, priced: Sequence[Pricing], limit_s: float) -> list[RejectedRaise]:
    """Every raise by one level that would reduce the error and breaks a limit, largest reduction first.

    Parameters
    ----------
    network : Network
    priced : sequence of Pricing
        The plan, by device.
    limit_s : float
        Time limit of an iteration.
    """
    raises: list[tuple[float, int, int, RejectedRaise]] = []
    for d, pricing in enumerate(priced):
        for i, operator in enumerate(network.operators):
            rejected = _rejected_raise(pricing, i, operator.id, limit_s)
            if rejected is not None:
                raises.append((-rejected.reduction, d, i, rejected))
    return [rejected for *_, rejected in sorted(raises, key=lambda entry: entry[:3])]


def _rejected_raise(pricing: Pricing, i: int, operator: str, limit_s: float) -> RejectedRaise | None:
    costs, level = pricing.costs, pricing.levels[i]
    dtypes, errors = costs.dtypes[i], costs.sensitivity[i]
    if level + 1 == len(dtypes) or errors[level] <= errors[level + 1]:
        return None
    pricing.change(i, level + 1)
    memory, seconds = pricing.memory_bytes, pricing.iteration_s
    pricing.change(i, level)
    broken = [name for name, breaks in (("memory", memory > costs.memory_bytes), ("time", seconds > limit_s)) if breaks]
    if not broken:
        return None  # the search ended before it tried this raise
    kinds: dict[str, BrokenLimit] = {"memory": "memory", "time": "time", "memory and time": "memory and time"}
    return RejectedRaise(
        device=costs.name,
        operator=operator,
        source=dtypes[level],
        target=dtypes[level + 1],
        reduction=float(errors[level] - errors[level + 1]),
        breaks=kinds[" and ".join(broken)],
        iteration_s=seconds,
        memory_bytes=memory,
    )


def explain(
    network: Network,
    tables: Sequence[DeviceTables],
    priced: Sequence[Pricing],
    limit_s: float,
    limit_of: Literal["request", "start"],
    rejected: Sequence[RejectedRaise],
) -> list[str]:
    """Sentences, the most important first."""
    origin = "the request's" if limit_of == "request" else "the time of the fastest plan of one type on each device"
    sentences = [f"the time limit of {format_latency(limit_s)} is {origin}"]
    slowest = max(range(len(priced)), key=lambda d: priced[d].iteration_s)
    sentences += _time(network, tables[slowest], priced[slowest])
    for pricing in priced:
        available = pricing.costs.memory_bytes
        if np.isfinite(available):
            sentences.append(
                f"{pricing.costs.name} uses {format_si(pricing.memory_bytes, 'B')} of {format_si(available, 'B')} "
                f"({100 * pricing.memory_bytes / available:.0f} %)"
            )
    sentences += [_error(network, pricing) for pricing in priced]
    by_name = {pricing.costs.name: pricing.costs for pricing in priced}
    for refused in rejected[:_MOST]:
        over = []
        if "time" in refused.breaks:
            over.append(f"{format_latency(refused.iteration_s - limit_s)} over the time limit")
        if "memory" in refused.breaks:
            excess = refused.memory_bytes - by_name[refused.device].memory_bytes
            over.append(f"{format_si(excess, 'B')} over the memory limit")
        sentences.append(
            f"{refused.operator} is not raised to {refused.target} on {refused.device}: " + " and ".join(over)
        )
    return sentences


def _error(network: Network, pricing: Pricing) -> str:
    """Operators that add most of a device's error."""
    costs = pricing.costs
    added = np.array([errors[level] for errors, level in zip(costs.sensitivity, pricing.levels, strict=True)])
    total = float(added.sum())
    if total <= 0:
        return f"{costs.name} adds no error"
    largest = np.argsort(-added, kind="stable")[:_MOST]
    parts = ", ".join(
        f"{network.operators[i].id} in {costs.dtypes[i][pricing.levels[i]]} {100 * added[i] / total:.0f} %"
        for i in largest
        if added[i] > 0
    )
    return f"the error of {costs.name} comes from {parts}"


def _time(network: Network, table: DeviceTables, pricing: Pricing) -> list[str]:
    """Slowest part of the iteration, and operators that take most of its time."""
    costs = pricing.costs
    ends = np.cumsum(pricing.slots_s)[costs.after] + costs.tail_s
    last = int(np.argmax(ends))
    computes = float(pricing.slots_s.sum())
    if last == len(ends) - 1:
        part = "its computation"
    else:
        operator = network.operators[2 * costs.size - 1 - int(costs.after[last])]
        part = f"the exchange that starts after the backward pass of {operator.id}"
    sentences = [
        f"{costs.name} is the slowest device, limited by {part}: it computes {format_latency(computes)}, "
        f"{format_latency(pricing.casts_s)} of it casts"
    ]
    forward, backward = table.operators.forward, table.operators.backward
    seconds = [forward[i][level].latency_s + backward[i][level].latency_s for i, level in enumerate(pricing.levels)]
    for i in sorted(range(costs.size), key=lambda i: (-seconds[i], i))[:_MOST]:
        level = pricing.levels[i]
        programs = forward[i][level].largest()
        share = 100 * seconds[i] / computes if computes else 0.0
        sentences.append(
            f"{network.operators[i].id} in {costs.dtypes[i][level]} takes {share:.0f} % of it"
            + (f" (forward: {programs})" if programs else "")
        )
    return sentences
