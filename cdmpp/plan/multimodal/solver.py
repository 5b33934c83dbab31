"""Solver of multimodal pipeline requests: the search, the plan from its solutions, and the explanation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.plan.base.passes import WAYS, Execution, draw_passes, pass_colours
from cdmpp.plan.multimodal.knobs import peak_bytes
from cdmpp.plan.multimodal.modules import Knob, Module
from cdmpp.plan.multimodal.planner import StepSolution, plan_steps
from cdmpp.plan.multimodal.schema import (
    CacheSummary,
    LayoutEntry,
    MultimodalPlan,
    MultimodalRequest,
    RankMemory,
    StepPlan,
    SubBatches,
)
from cdmpp.plan.multimodal.search import CacheCounts
from cdmpp.plan.multimodal.tasks import Schedule, Tasks, schedule_orders
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import draw_legend, new_figure
from cdmpp.predict.requests.pricing import Cost
from cdmpp.predict.requests.request import Interval
from cdmpp.utils.jit import COMPILED
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def solve(request: MultimodalRequest, control: SearchControl) -> MultimodalPlan:
    """Search for a short schedule of each step on a common placement; the budget begins when its code is compiled."""
    compile_loops()
    control.restart()
    batches = [batch for _, batch in request.named_batches()]
    costs, counts = request.costs(), CacheCounts()
    bounds = None
    transfers = [module.transfer.points()[1] for module in request.modules if module.transfer is not None]
    if any(cost.parts for curves in (*costs, transfers) for curve in curves for cost in curve):
        bounds = request.resolved_modules("lower_s"), request.resolved_modules("upper_s")

    def plan_of(solutions: Sequence[StepSolution], unrestricted_s: float | None = None) -> MultimodalPlan:
        """The plan of the only step, or those of all steps and their sums."""
        steps = [make_step_plan(solution, request.efficiency, bounds) for solution in solutions]
        first, several = steps[0], request.batches is not None
        total = {
            name: sum(getattr(step, name) for step in steps)
            for name in ("makespan_s", "lower_bound_s", "searched_lower_bound_s")
        }
        names = [name for name in first.baselines if all(name in step.baselines for step in steps)]
        baselines = {name: sum(step.baselines[name] for step in steps) for name in names}
        ends = [(step.interval.lower_s, step.interval.upper_s) for step in steps if step.interval is not None]
        lower_s, upper_s = (sum(column) for column in zip(*ends, strict=True)) if ends else (0.0, 0.0)
        execution = None if unrestricted_s is None else Execution.of(total["makespan_s"], unrestricted_s)
        lines = explain(solutions, costs, total["makespan_s"], baselines)
        return MultimodalPlan(
            **total,
            baselines=baselines,
            interval=Interval(lower_s=lower_s, upper_s=upper_s) if ends else None,
            **{name: None if several else getattr(first, name) for name in ("batch", "sub_batches", "memory", "order")},
            layout=first.layout,
            bubble=sum(step.bubble * step.makespan_s for step in steps) / total["makespan_s"],
            plans=steps if several else None,
            cache=CacheSummary(
                hits=counts.hits, misses=counts.misses, hit_rate=counts.hits / max(1, counts.hits + counts.misses)
            ),
            steps=sum(solution.steps for solution in solutions),
            complete=all(solution.complete for solution in solutions),
            execution=execution,
            explanation=[*lines, *([str(execution)] if execution else [])],
        )

    def on_progress(solutions: Sequence[StepSolution]) -> None:
        control.report(
            best=sum(solution.schedule.makespan_s for solution in solutions),
            bound=sum(solution.bound_s for solution in solutions),
            answer=partial(plan_of, solutions),
        )

    def search(control: SearchControl, **more: Any) -> list[StepSolution]:
        return plan_steps(
            request.resolved_modules(),
            [[batch[module.name] for module in request.modules] for batch in batches],
            request.ranks,
            memory=request.memory,
            efficiency=request.efficiency,
            samples=request.samples_index,
            control=control,
            seed=request.seed,
            max_steps=request.max_steps,
            counts=counts,
            **more,
        )

    if not request.executable:
        return plan_of(search(control, on_progress=on_progress))
    executable = search(control.part(control.budget_s and control.left_s / 2), executable=True, on_progress=on_progress)
    free = search(control.part())
    return plan_of(executable, sum(solution.schedule.makespan_s for solution in free))


@cache
def compile_loops() -> None:
    """Compile the search, or load it from the cache, before the budget of a search begins: seconds the first time."""
    if COMPILED:
        sizes, seconds = np.array([1.0, 2.0]), np.array([1.0, 1.5])
        modules = [
            Module(name, (1.0,) * 2, sizes, seconds, 2 * seconds, after) for name, after in (("a", ()), ("b", (0,)))
        ]
        plan_steps(modules, [[2, 3]], 2, control=SearchControl(60.0), max_steps=20)


def make_step_plan(
    solution: StepSolution, efficiency: float, bounds: tuple[Sequence[Module], Sequence[Module]] | None
) -> StepPlan:
    """Plan of one step; ``bounds``: the modules at the lower and at the upper bounds of their predicted costs."""
    schedule = solution.schedule
    tasks, orders = schedule.tasks, schedule.orders
    names = [module.name for module in tasks.modules]
    busy_s = float(tasks.duration_s.sum())
    total_s = schedule.makespan_s * tasks.ranks
    interval = None
    if bounds is not None:
        lower_s, upper_s = (
            schedule_orders(tasks.with_costs(modules, tasks.knobs), orders).makespan_s for modules in bounds
        )
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
    work_s = module.units_s(units)
    return SubBatches(
        rule_size=module.efficient_size(efficiency),
        size=max(units, default=0),
        count=len(units),
        items=list(units),
        efficiency=float(sum(units) / work_s / module.items_per_s.max()) if units else 0.0,
    )


def _memory(tasks: Tasks, orders: Sequence[Sequence[int]]) -> list[RankMemory]:
    """Peak memory and knobs of each rank."""
    knobs: list[dict[str, list[Knob]]] = [{} for _ in range(tasks.ranks)]
    for module, row, chosen in zip(tasks.modules, tasks.placement.chunks, tasks.knobs, strict=True):
        for chunk, knob in zip(row, chosen, strict=True):
            knobs[chunk.rank].setdefault(module.name, []).append(knob)
    peaks = peak_bytes(tasks, orders)
    return [RankMemory(rank=rank, peak_bytes=peak, knobs=knobs[rank]) for rank, peak in enumerate(peaks)]


def order_entries(schedule: Schedule) -> Any:
    """Passes of each rank, in order, as mappings: validated several times as fast as models made one by one."""
    tasks, names = schedule.tasks, ("module", "segment", "micro_batch", "pass", "start_s", "end_s")
    labels: list[tuple[str, int, int]] = [("", 0, 0)] * tasks.half
    for i, grid in enumerate(tasks.ids):
        for c, chunk in enumerate(tasks.placement.chunks[i]):
            for unit, task in enumerate(grid[:, c].tolist()):
                labels[task] = (tasks.modules[i].name, chunk.segment, unit)
    starts_s, ends_s = schedule.start_s.tolist(), (schedule.start_s + tasks.duration_s).tolist()
    passes = [*((*label, "F") for label in labels), *((*label, "B") for label in labels)]
    return [
        [dict(zip(names, (*passes[t], starts_s[t], ends_s[t]), strict=True)) for t in order]
        for order in schedule.orders
    ]


def explain(
    solutions: Sequence[StepSolution],
    costs: Sequence[tuple[list[Cost], list[Cost]]],
    makespan_s: float,
    baselines: dict[str, float],
) -> list[str]:
    """Sentences that explain the makespan of all steps.

    ``costs``: forward and backward cost of a layer of each module, by size. ``baselines``: makespans in seconds.
    """
    longest = max(solutions, key=lambda solution: solution.schedule.makespan_s)
    tasks = longest.schedule.tasks
    lines = [_busiest_rank(tasks, longest.schedule.makespan_s)]
    if "1f1b" in baselines:
        counts = ", ".join(str(solution.micro_batches) for solution in solutions)
        lines.append(
            f"1F1B with contiguous modules takes {format_latency(baselines['1f1b'])} "
            f"({100 * (baselines['1f1b'] / makespan_s - 1):.1f} % longer; micro-batches: {counts})"
        )
    else:
        lines.append("1F1B with contiguous modules does not fit the memory")
    if any(solution.left_out for solution in solutions):
        lines.append(
            "plans of so many passes that they or their answer would exceed budget_s were left out; a larger one may "
            "find shorter plans"
        )
    kept = tasks.with_knobs(tasks.uniform_knobs("keep"))
    added_s = _work_by_rank(tasks, tasks.duration_s - kept.duration_s)
    if added_s.any():
        rank = int(added_s.argmax())
        lines.append(
            f"recomputation and offloading for the memory limit add up to {format_latency(float(added_s[rank]))} "
            f"of work to a rank ({rank})"
        )
    for module, units, (forward, backward) in zip(tasks.modules, tasks.items, costs, strict=True):
        if units:
            lines.append(_module(module, units, forward, backward))
    return lines


def _work_by_rank(tasks: Tasks, seconds: np.ndarray) -> np.ndarray:
    return np.bincount(tasks.rank_of_all, weights=seconds, minlength=tasks.ranks)


def _busiest_rank(tasks: Tasks, makespan_s: float) -> str:
    work_s = _work_by_rank(tasks, tasks.duration_s)
    rank = int(work_s.argmax())
    shares = []
    for i, module in enumerate(tasks.modules):
        for c, chunk in enumerate(tasks.placement.chunks[i]):
            if chunk.rank == rank and len(tasks.ids[i]) and chunk.layers:
                ids = tasks.ids[i][:, c]
                seconds = float(tasks.duration_s[ids].sum() + tasks.duration_s[tasks.half + ids].sum())
                knob = "" if tasks.knobs[i][c] == "keep" else f", {tasks.knobs[i][c]}"
                shares.append((seconds, f"{module.name} segment {chunk.segment} ({chunk.layers} layers{knob})"))
    shares.sort(reverse=True)
    return f"rank {rank} has the most work, {100 * work_s[rank] / makespan_s:.0f} % of its step: " + ", ".join(
        f"{text} {100 * seconds / work_s[rank]:.0f} %" for seconds, text in shares[:4]
    )


def _module(module: Module, units: Sequence[int], forward: list[Cost], backward: list[Cost]) -> str:
    """Sub-micro-batches of a module, the time of a layer, and its dominating programs."""
    size = max(units)
    forward_s, backward_s = module.layer_s(size)
    line = (
        f"{module.name}: {len(units)} sub-micro-batches of up to {size} items reach "
        f"{100 * module.efficiency(size):.0f} % of the best items per second; a layer takes "
        f"{format_latency(forward_s)} forward and {format_latency(backward_s)} backward"
    )
    point = int(np.searchsorted(module.sizes, size).clip(0, len(module.sizes) - 1))
    programs = [
        f"{name}: {costs[point].largest()}"
        for name, costs in (("forward", forward), ("backward", backward))
        if costs[point].parts
    ]
    return line + (f" ({'; '.join(programs)})" if programs else "")


def draw(request: MultimodalRequest, plan: MultimodalPlan) -> Figure:
    """One row for each rank, one panel for each step, on a common time axis."""
    names, steps = [module.name for module in request.modules], plan.step_plans()
    figure = new_figure(11, 0.8 + len(steps) * (0.8 + 0.32 * request.ranks))
    panels = figure.subplots(len(steps), 1, squeeze=False, sharex=True)[:, 0]
    longest_s, colours = max(step.makespan_s for step in steps), pass_colours(names)
    for number, (axes, step) in enumerate(zip(panels, steps, strict=True)):
        draw_passes(axes, step.order, lambda p: colours[p.module, p.pass_], longest_s, makespan=step.makespan_s)
        axes.set_title("" if plan.plans is None else f"step {number}", loc="left", fontsize=10)
        if axes is not panels[-1]:
            axes.set_xlabel("")
    draw_legend(figure, dict(zip([f"{name} {way}" for name in names for way in WAYS], colours.values(), strict=True)))
    return figure
