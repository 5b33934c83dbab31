"""Solving a precision request: tables, the search, and the plan with its baselines and reasons.

A synchronous iteration ends with its slowest device, and the limits of an exchange
(:mod:`cdmpp.plan.precision.tables`) can be checked for each device alone. So for a given time limit the devices are
solved one by one without loss. Where no levels are within a limit, the error names the smallest limit that works.

The reasons are what limits the time, which raises were rejected, and where the error comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from cdmpp.errors import InfeasibleError
from cdmpp.plan.precision.milp import Effort, ErrorSearch, Solution, minimise_memory, minimise_time
from cdmpp.plan.precision.network import Network, read_network
from cdmpp.plan.precision.pricing import (
    DeviceCosts,
    Levels,
    Pricing,
    best_simple,
    fastest_uniform,
    heap,
    lowest,
    uniform,
)
from cdmpp.plan.precision.schema import (
    BaselinePlan,
    BrokenLimit,
    DevicePlan,
    PrecisionPlan,
    PrecisionRequest,
    RejectedRaise,
)
from cdmpp.plan.precision.tables import DeviceTables, build_tables
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.memory import IGNORE_HINT
from cdmpp.predict.requests.plot import new_figure
from cdmpp.programs.elements import BASIC_DTYPES
from cdmpp.utils.units import format_latency, format_si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def within_memory(costs: DeviceCosts, d: int, control: SearchControl) -> Levels:
    """Fewest bits where they fit; else the levels of least memory. Raises InfeasibleError: none fit device ``d``."""
    start = lowest(costs)
    if Pricing(costs, start).memory_bytes <= costs.memory_bytes:
        return start
    least = minimise_memory(costs, control)
    if least.objective <= costs.memory_bytes:
        return least.levels
    need = math.ceil(least.objective)
    smallest = "the plan of least memory" if least.proven else "the smallest plan found"
    raise InfeasibleError.at(
        f"devices.{d}.memory_bytes",
        f"{costs.name!r} has {costs.memory_bytes:.0f} bytes; {smallest} needs {need}",
        hint=_more_time(control, least.proven)
        + f"at least {need}, or smaller batches, or recomputation (fewer kept elements); {IGNORE_HINT}",
    )


def within_time(
    devices: Sequence[DeviceCosts], starts: Sequence[Levels], limit_s: float, control: SearchControl
) -> list[Levels]:
    """Levels within memory and time, by device; ``starts`` are within the memory.

    Raises InfeasibleError: no levels are found on some device.
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
    """Solutions of all devices."""

    limit_s: float  # time limit of an iteration
    limit_of: Literal["request", "start"]  # whether the request gives it, or the start takes it
    # By device: levels that the heap starts from, and levels that it finds.
    starts: list[Levels]
    heaps: list[Levels]
    solutions: list[Solution]  # by device; errors of one worker


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

    ``limit_s``: seconds of an iteration; None: those of the start, the fastest plan of one type on each device.
    ``max_steps``: branch-and-bound nodes of all devices together. ``report``: called with better plans and bounds.
    Raises InfeasibleError: no levels are within a device's memory, or within the time.
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


def solve(request: PrecisionRequest, control: SearchControl) -> PrecisionPlan:
    """The plan of least error within each device's memory and the iteration's time.

    Raises FieldError: parts of the request contradict each other, or a cost is missing.
    Raises InfeasibleError: no plan is within the limits.
    Raises MissingDependencyError: highspy is not installed.
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
    """Every raise by one level that would reduce the error and breaks a limit, largest reduction first."""
    ids = [operator.id for operator in network.operators]
    raises = [_rejected_raise(pricing, i, name, limit_s) for pricing in priced for i, name in enumerate(ids)]
    return sorted((entry for entry in raises if entry is not None), key=lambda entry: -entry.reduction)


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


_COLOURS = {"int8": "#ff725c", "float16": "#efb118", "bfloat16": "#d9a441", "float32": "#4269d0"}
#: Operators up to which their names are written.
_MAX_NAMES = 30


def draw(request: PrecisionRequest, plan: PrecisionPlan) -> Figure:
    """Left: the plan and its baselines. Right: a row for each device, a column for each operator."""
    figure = new_figure(11, 3.6)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
    _draw_plans(left, plan)
    _draw_types(right, plan)
    return figure


def _draw_plans(axes: Axes, plan: PrecisionPlan) -> None:
    drawn: dict[tuple[float, float], BaselinePlan] = {}
    for baseline in plan.baseline_plans:
        drawn.setdefault((1e3 * baseline.iteration_s, baseline.sensitivity), baseline)
    for point, baseline in drawn.items():
        axes.plot(*point, "o", color="#9498a0", fillstyle="full" if baseline.feasible else "none")
        name = baseline.name.replace("_", " ")
        axes.annotate(name, point, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.margins(x=0.25, y=0.15)  # room for the names
    axes.plot(1e3 * plan.iteration_s, plan.sensitivity, "*", markersize=13, color="#3ca951", label="plan")
    axes.axvline(1e3 * plan.iteration_limit_s, color="#ff725c", linewidth=1, label="time limit")
    axes.axhline(plan.lower_bound, color="#6cc5b0", linewidth=1, linestyle="--", label="lower bound")
    axes.set(xlabel="iteration (ms)", ylabel="sum of sensitivities")
    axes.set_title("hollow: breaks a limit", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def _draw_types(axes: Axes, plan: PrecisionPlan) -> None:
    from matplotlib.patches import Patch

    names = list(plan.devices[0].dtypes)
    for row, device in enumerate(plan.devices):
        colours = [_COLOURS[device.dtypes[name]] for name in names]
        axes.bar(range(len(names)), [0.8] * len(names), bottom=row - 0.4, width=0.94, color=colours)
    used = [dtype for dtype in _COLOURS if any(dtype in device.dtypes.values() for device in plan.devices)]
    axes.set_yticks(range(len(plan.devices)), [device.name for device in plan.devices])
    labels = names if len(names) <= _MAX_NAMES else []
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    axes.set_xlabel("operator, in the order of computation")
    axes.legend(
        handles=[Patch(color=_COLOURS[dtype], label=dtype) for dtype in used],
        frameon=False,
        ncols=len(used),
        loc="upper center",
        bbox_to_anchor=(0.5, 1.15),
        fontsize=8,
    )
