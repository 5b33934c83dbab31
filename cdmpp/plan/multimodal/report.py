"""Plan of a multimodal request from the solutions of its steps."""

from __future__ import annotations

from collections.abc import Sequence

from cdmpp.plan.multimodal.explanation import explain
from cdmpp.plan.multimodal.knobs import peak_bytes
from cdmpp.plan.multimodal.memory import Knob
from cdmpp.plan.multimodal.modules import EFFICIENCY, Module
from cdmpp.plan.multimodal.plan_schema import (
    CacheSummary,
    Entry,
    LayoutEntry,
    MultimodalPlan,
    RankMemory,
    StepPlan,
    SubBatches,
)
from cdmpp.plan.multimodal.schedule import Schedule, schedule_orders
from cdmpp.plan.multimodal.solution import StepSolution
from cdmpp.plan.multimodal.tasks import Tasks
from cdmpp.plan.multimodal.tree import CacheCounts
from cdmpp.predict.requests.pricing import Cost
from cdmpp.predict.requests.request import Interval


def make_plan(
    solutions: Sequence[StepSolution],
    steps: Sequence[StepPlan],
    costs: Sequence[tuple[list[Cost], list[Cost]]],
    counts: CacheCounts,
    *,
    several: bool,
) -> MultimodalPlan:
    """The plan of a request: that of its only step, or those of all steps and their sums.

    Parameters
    ----------
    solutions, steps : sequence of StepSolution, sequence of StepPlan
    costs : sequence of (list of Cost, list of Cost)
        Forward and backward cost of a layer of each module, by size.
    counts : CacheCounts
    several : bool
        The request has ``batches``.
    """
    first = steps[0]
    makespan_s = sum(step.makespan_s for step in steps)
    bound_s = sum(step.lower_bound_s for step in steps)
    names = [name for name in first.baselines if all(name in step.baselines for step in steps)]
    baselines = {name: sum(step.baselines[name] for step in steps) for name in names}
    intervals = [step.interval for step in steps if step.interval is not None]
    return MultimodalPlan(
        makespan_s=makespan_s,
        lower_bound_s=bound_s,
        searched_lower_bound_s=sum(step.searched_lower_bound_s for step in steps),
        baselines=baselines,
        interval=Interval(lower_s=sum(i.lower_s for i in intervals), upper_s=sum(i.upper_s for i in intervals))
        if intervals
        else None,
        batch=None if several else first.batch,
        sub_batches=None if several else first.sub_batches,
        layout=first.layout,
        memory=None if several else first.memory,
        order=None if several else first.order,
        bubble=sum(step.bubble * step.makespan_s for step in steps) / makespan_s,
        plans=list(steps) if several else None,
        cache=CacheSummary(
            hits=counts.hits, misses=counts.misses, hit_rate=counts.hits / counts.total if counts.total else 0.0
        ),
        steps=sum(solution.steps for solution in solutions),
        complete=all(solution.complete for solution in solutions),
        explanation=explain(solutions, costs, makespan_s, bound_s, baselines),
    )


def make_step_plan(
    solution: StepSolution,
    efficiency: float = EFFICIENCY,
    bounds: tuple[Sequence[Module], Sequence[Module]] | None = None,
) -> StepPlan:
    """Plan of one step.

    Parameters
    ----------
    solution : StepSolution
    efficiency : float
        Share of the peak items per second that the rule's sub-micro-batches reach.
    bounds : pair of sequence of Module, optional
        The modules at the lower and at the upper bounds of their predicted costs.
    """
    schedule = solution.schedule
    tasks, orders = schedule.tasks, schedule.orders
    names = [module.name for module in tasks.modules]
    busy_s = float(tasks.duration_s.sum())
    total_s = schedule.makespan_s * tasks.ranks
    interval = None
    if bounds is not None:
        lower_s, upper_s = (schedule_orders(tasks.with_costs(modules), orders).makespan_s for modules in bounds)
        interval = Interval(lower_s=lower_s, upper_s=upper_s)
    return StepPlan(
        batch=dict(zip(names, solution.batch, strict=True)),
        makespan_s=schedule.makespan_s,
        lower_bound_s=solution.bound_s,
        searched_lower_bound_s=solution.searched_bound_s,
        gap=schedule.makespan_s / solution.bound_s - 1,
        baselines=solution.baselines_s,
        interval=interval,
        sub_batches={
            module.name: _sub_batches(module, units, efficiency)
            for module, units in zip(tasks.modules, tasks.items, strict=True)
        },
        layout=[
            LayoutEntry(
                module=names[i], segment=chunk.segment, rank=chunk.rank, first_layer=chunk.first, layers=chunk.layers
            )
            for i, row in enumerate(tasks.placement.chunks)
            for chunk in row
        ],
        memory=_memory(tasks, orders),
        order=order_entries(schedule),
        bubble=1 - busy_s / total_s if total_s else 0.0,
    )


def _sub_batches(module: Module, units: Sequence[int], efficiency: float) -> SubBatches:
    work_s = sum(sum(module.layer_s(n)) for n in units)
    return SubBatches(
        rule_size=module.efficient_size(efficiency),
        size=max(units, default=0),
        count=len(units),
        items=list(units),
        efficiency=sum(units) / work_s / module.peak_items_per_s if units else 0.0,
    )


def _memory(tasks: Tasks, orders: Sequence[Sequence[int]]) -> list[RankMemory]:
    """Peak memory and knobs of each rank."""
    knobs: list[dict[str, list[Knob]]] = [{} for _ in range(tasks.ranks)]
    for module, row, chosen in zip(tasks.modules, tasks.placement.chunks, tasks.knobs, strict=True):
        for chunk, knob in zip(row, chosen, strict=True):
            knobs[chunk.rank].setdefault(module.name, []).append(knob)
    peaks = peak_bytes(tasks, orders)
    return [RankMemory(rank=rank, peak_bytes=peak, knobs=knobs[rank]) for rank, peak in enumerate(peaks)]


def order_entries(schedule: Schedule) -> list[list[Entry]]:
    """Passes of each rank, in order."""
    tasks, start_s = schedule.tasks, schedule.start_s
    labels: list[tuple[str, int, int]] = [("", 0, 0)] * tasks.half  # module, segment, unit
    for i, grid in enumerate(tasks.ids):
        for c, chunk in enumerate(tasks.placement.chunks[i]):
            for unit in range(len(grid)):
                labels[int(grid[unit, c])] = (tasks.modules[i].name, chunk.segment, unit)
    entries = []
    for order in schedule.orders:
        row = []
        for task in order:
            module, segment, unit = labels[task % tasks.half]
            row.append(
                Entry(
                    module=module,
                    segment=segment,
                    pass_="F" if task < tasks.half else "B",
                    micro_batch=unit,
                    start_s=float(start_s[task]),
                    end_s=float(start_s[task] + tasks.duration_s[task]),
                )
            )
        entries.append(row)
    return entries
