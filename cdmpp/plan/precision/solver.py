"""Solving a precision request: tables, the search, and the plan with its baselines and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cdmpp.plan.precision import programs
from cdmpp.plan.precision.explain import explain, rejected_raises
from cdmpp.plan.precision.network import Network, read_network
from cdmpp.plan.precision.pricing import DeviceCosts, Levels, Pricing, lowest, uniform
from cdmpp.plan.precision.schema import BaselinePlan, DevicePlan, PrecisionPlan, PrecisionRequest
from cdmpp.plan.precision.search import JobSolution, search, total
from cdmpp.plan.precision.tables import DeviceTables, build_tables
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.request import PriceRequest
from cdmpp.programs.elements import BASIC_DTYPES


def price_requests(request: PrecisionRequest) -> list[PriceRequest]:
    """Programs of the operators whose costs are not given, in each type of each device.

    Raises
    ------
    FieldError
        Parts of the request contradict each other, or a program or a device is missing.
    """
    return programs.price_requests(read_network(request))


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
