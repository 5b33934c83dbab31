"""Solving a simulate request: stages from costs, the step, its baselines and bounds, and the explanation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.memory import IGNORE_HINT
from cdmpp.predict.requests.plot import (
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    RED,
    YELLOW,
    Bar,
    byte_unit,
    draw_legend,
    draw_timeline,
    new_figure,
)
from cdmpp.predict.requests.pricing import Cost, PricedProgram, cost_of
from cdmpp.predict.requests.request import Interval
from cdmpp.simulate.emulator.emulate import EmulatedStep, Emulator, lower_bound
from cdmpp.simulate.emulator.orders import SCHEDULES, Orders, ScheduleName
from cdmpp.simulate.emulator.schema import CacheUse, RankUse, SimulatePlan, SimulateRequest, StageForm, TimelinePass
from cdmpp.simulate.emulator.stages import Ints, PassCost, Stage
from cdmpp.utils.units import format_latency, format_si

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SERIAL = "one_at_a_time"


@dataclass(frozen=True)
class _Simulation:
    """Simulates steps of one request; they differ by stages, schedule and micro-batches."""

    request: SimulateRequest
    emulator: Emulator
    transfer_s: float | list[float]

    @property
    def host_bandwidth_bytes_per_s(self) -> float:
        return self.request.host_bandwidth_bytes_per_s or float("inf")

    def run(self, stages: Sequence[Stage], schedule: ScheduleName | Orders, classes: Sequence[int]) -> EmulatedStep:
        return self.emulator.simulate(
            stages,
            classes,
            schedule,
            ranks=self.request.ranks_used,
            transfer_s=self.transfer_s,
            host_bandwidth_bytes_per_s=self.host_bandwidth_bytes_per_s,
        )


def solve(request: SimulateRequest, control: SearchControl) -> SimulatePlan:
    """Simulate a step and its baselines.

    Raises FieldError: the schedule does not fit the stages, its orders wait for each other, or weight gradients take
    longer than the whole backward pass.
    Raises InfeasibleError: a rank needs more than its memory.
    """
    costs = [_stage_costs(s, form) for s, form in enumerate(request.stages)]
    stages = [stage.middle for stage in costs]
    transfer = request.transfer_costs()
    simulation = _Simulation(request, Emulator(request.reuse), _seconds(transfer, "latency_s"))
    classes, *replicas = request.class_of_each
    ranks, transfer_s = request.ranks_used, simulation.transfer_s
    schedule = request.schedule if isinstance(request.schedule, str) else request.schedule.passes()
    step = simulation.run(stages, schedule, classes)
    copies = [simulation.run(stages, schedule, replica) for replica in replicas]
    structure = step.structure
    table = simulation.emulator.table(stages, simulation.host_bandwidth_bytes_per_s)
    same_passes_s = lower_bound(structure, table, classes, transfer_s)
    # Any schedule may delay weight gradients.
    free = replace(structure, split=np.ones_like(structure.split))
    bound_s = lower_bound(free, table, classes, transfer_s)
    others = _published(simulation, step, stages, classes)
    _check_memory(simulation, stages, schedule, step, copies, others)
    interval = None
    predicted = [cost for cost in (transfer if isinstance(transfer, list) else [transfer]) if cost.parts]
    if predicted or any(stage.forward.parts or stage.backward.parts for stage in costs):
        ends = {"lower_s": [stage.lower for stage in costs], "upper_s": [stage.upper for stage in costs]}
        lower, upper = (
            replace(simulation, transfer_s=_seconds(transfer, figure)).run(bounds, schedule, classes)
            for figure, bounds in ends.items()
        )
        interval = Interval(lower_s=lower.makespan_s, upper_s=upper.makespan_s)
    name = request.schedule if isinstance(request.schedule, str) else "order"
    baselines = {other: simulated for other, simulated in others.items() if other != name}
    serial_s = sum(_alone_s(stages, c, transfer_s, structure.rank_of) for c in classes)
    makespan_s, busy_s = step.makespan_s, step.busy_s
    slowest_s = max([makespan_s, *(copy.makespan_s for copy in copies)])
    explanation = explain(step, costs, same_passes_s, bound_s, baselines)
    if predicted:
        longest = max(predicted, key=lambda cost: cost.latency_s)
        seconds = format_latency(longest.latency_s)
        explanation.append(f"the longest transfer between stages takes {seconds}: {longest.largest()}")
    sync = cost_of(request.gradient_sync, request.gradient_sync_s)
    if sync.parts:
        explanation.append(f"the sum of the gradients takes {format_latency(sync.latency_s)}: {sync.largest()}")
    if slowest_s > makespan_s:
        late = [copy.makespan_s for copy in copies].index(slowest_s)
        explanation.append(
            f"the step waits for copy {late} of the replicas, {format_latency(slowest_s - makespan_s)} "
            "longer than for this pipeline"
        )
    hits, misses = simulation.emulator.lookups()
    return SimulatePlan(
        schedule=name,
        makespan_s=makespan_s,
        replicas_s=[copy.makespan_s for copy in copies],
        step_s=slowest_s + sync.latency_s,
        lower_bound_s=bound_s,
        same_passes_bound_s=same_passes_s,
        interval=interval,
        bubble=step.bubble,
        peak_bytes=float(step.peak_bytes.max()),
        ranks=[
            RankUse(
                rank=rank,
                stages=np.flatnonzero(structure.rank_of == rank).tolist(),
                busy_s=float(busy_s[rank]),
                bubble=1.0 - float(busy_s[rank]) / makespan_s if makespan_s > 0 else 0.0,
                peak_bytes=float(step.peak_bytes[rank]),
            )
            for rank in range(ranks)
        ],
        baselines={other: simulated.makespan_s for other, simulated in baselines.items()} | {SERIAL: serial_s},
        baseline_peak_bytes={other: float(simulated.peak_bytes.max()) for other, simulated in baselines.items()},
        explanation=explanation,
        timeline=_passes(step, 0, ranks) if request.timeline else None,
        copies=_passes(step, ranks, len(structure.begin) - 1) if request.timeline else [],
        cache=CacheUse(hits=hits, misses=misses, hit_rate=hits / (hits + misses) if hits else 0.0),
    )


def _seconds(transfer: Cost | list[Cost], figure: str) -> float | list[float]:
    """One figure of the transfers: "latency_s", "lower_s" or "upper_s"."""
    if isinstance(transfer, list):
        return [float(getattr(cost, figure)) for cost in transfer]
    return float(getattr(transfer, figure))


def _stage_costs(number: int, form: StageForm) -> StageCosts:
    costs: list[tuple[Cost, Cost, Cost | None]] = []
    for path, passes in form.passes(number):
        forward, backward = cost_of(passes.forward, passes.forward_s), cost_of(passes.backward, passes.backward_s)
        weight = None
        if passes.weight is not None or passes.weight_s is not None:
            weight = cost_of(passes.weight, passes.weight_s)
            if weight.latency_s > backward.latency_s:
                raise FieldError.at(
                    f"{path}.weight_s",
                    f"{weight.latency_s:g} s, more than the whole backward pass of {backward.latency_s:g} s",
                    hint="backward_s includes the weight gradients",
                )
        costs.append((forward, backward, weight))
    middle, lower, upper = (_stage(number, form, costs, figure) for figure in ("latency_s", "lower_s", "upper_s"))
    return StageCosts(middle, lower, upper, costs[0][0], costs[0][1])


def _stage(number: int, form: StageForm, costs: Sequence[tuple[Cost, Cost, Cost | None]], figure: str) -> Stage:
    passes = []
    for (_, given), (forward, backward, weight) in zip(form.passes(number), costs, strict=True):
        backward_s = getattr(backward, figure)
        # The bounds of a part may exceed those of the whole pass.
        weight_s = None if weight is None else min(getattr(weight, figure), backward_s)
        kept = given.activation_bytes, given.boundary_bytes
        passes.append(PassCost(getattr(forward, figure), backward_s, weight_s, *kept))
    return Stage(**vars(passes[0]), weight_bytes=form.weight_bytes, memory=form.memory, classes=tuple(passes[1:]))


def _published(
    simulation: _Simulation, step: EmulatedStep, stages: Sequence[Stage], classes: Sequence[int]
) -> dict[str, EmulatedStep]:
    """The step under each published schedule that fits."""
    structure, ranks = step.structure, simulation.request.ranks_used
    steps: dict[str, EmulatedStep] = {}
    # An explicit order may place stages as no published schedule does.
    if not (structure.rank_of == np.arange(structure.stages) % ranks).all():
        return steps
    for name in SCHEDULES:
        if name == "interleaved" and structure.stages == ranks:
            continue  # with one stage on each rank it is 1F1B with more memory
        try:
            steps[name] = simulation.run(stages, name, classes)
        except FieldError:
            continue  # the schedule needs another number of stages or micro-batches
    return steps


def _check_memory(
    simulation: _Simulation,
    stages: Sequence[Stage],
    schedule: ScheduleName | Orders,
    step: EmulatedStep,
    copies: Sequence[EmulatedStep],
    others: dict[str, EmulatedStep],
) -> None:
    """Raise InfeasibleError where a rank needs more than its memory, with the smallest limit that is enough."""
    request, structure = simulation.request, step.structure
    limits = np.array(
        [request.memory_limit(np.flatnonzero(structure.rank_of == rank).tolist()) for rank in range(structure.ranks)]
    )
    largest = max([step, *copies], key=lambda copy: float((copy.peak_bytes / limits).max()))
    rank = int((largest.peak_bytes / limits).argmax())
    needed, limit = float(largest.peak_bytes[rank]), float(limits[rank])
    if needed <= limit:
        return
    alternatives: dict[str, EmulatedStep] = {}
    if largest is step:
        recomputed = [replace(stage, memory="recompute") for stage in stages]
        again = simulation.run(recomputed, schedule, request.class_of_each[0])
        alternatives = {**others, "all stages recomputed": again}
    name, better = min(alternatives.items(), key=lambda way: way[1].peak_bytes.max(), default=("", largest))
    hint = "raise the limit" if request.memory_bytes is not None else "use more ranks, or recompute or offload stages"
    if better.peak_bytes.max() < needed:
        fits = "which fits" if (better.peak_bytes <= limits).all() else "which does not fit either"
        hint = f"with {name} it would be {better.peak_bytes.max():.12g}, {fits}"
    source = "" if request.memory_bytes is not None else ", the memory of its device"
    raise InfeasibleError.at(
        "memory_bytes",
        f"{limit:.12g}{source}, but rank {rank} needs up to {needed:.12g} bytes "
        f"({format_si(needed, 'B')}): the smallest limit for this schedule is {needed:.12g}",
        hint=f"{hint}; {IGNORE_HINT}",
    )


def _alone_s(stages: Sequence[Stage], c: int, transfer_s: float | Sequence[float], rank_of: Ints) -> float:
    """Seconds of one micro-batch of class ``c`` on idle ranks."""
    total = 0.0
    for s, stage in enumerate(stages):
        cost = stage if c == 0 else stage.classes[c - 1]
        total += cost.forward_s * (2 if stage.memory == "recompute" else 1) + cost.backward_s
        if s and rank_of[s] != rank_of[s - 1]:
            total += 2 * (transfer_s if isinstance(transfer_s, int | float) else transfer_s[s - 1])
    return total


def _passes(step: EmulatedStep, first: int, end: int) -> list[TimelinePass]:
    """The passes of some rows in their order; rows from the number of ranks on are host links."""
    structure = step.structure
    return [
        TimelinePass(
            rank=row % structure.ranks,
            stage=stage,
            kind=kind,
            micro_batch=micro_batch,
            start_s=float(step.start_s[task]),
            end_s=float(step.end_s[task]),
        )
        for row in range(first, end)
        for task in step.row(row).tolist()
        for kind, stage, micro_batch in (structure.name(task),)
    ]


@dataclass(frozen=True)
class StageCosts:
    """A stage with its costs."""

    # With the predictions, and with their lower and upper bounds.
    middle: Stage
    lower: Stage
    upper: Stage
    # Class 0.
    forward: Cost
    backward: Cost

    @property
    def both_s(self) -> float:
        """Forward and backward pass of one micro-batch."""
        return self.forward.latency_s + self.backward.latency_s

    def parts(self) -> dict[str, PricedProgram]:
        """The programs of both passes by name; empty where the costs are given."""
        merged: dict[str, PricedProgram] = {}
        for part in (*self.forward.parts, *self.backward.parts):
            before = merged.get(part.name, PricedProgram(part.name, 0, 0.0))
            merged[part.name] = PricedProgram(part.name, before.count + part.count, before.latency_s + part.latency_s)
        return merged


def explain(
    step: EmulatedStep,
    stages: Sequence[StageCosts],
    same_passes_s: float,
    bound_s: float,
    others: Mapping[str, EmulatedStep],
) -> list[str]:
    """Sentences about a step.

    ``same_passes_s``: lower bound of all orders of the same passes. ``bound_s``: lower bound of all schedules of the
    stages. ``others``: the step under other schedules.
    """
    makespan_s = step.makespan_s
    if makespan_s <= 0:
        return ["no pass takes any time"]
    lines = [
        f"the ranks wait {100 * step.bubble:.1f} % of the step of {format_latency(makespan_s)}; "
        + _possible_saving("another order of the same passes", makespan_s, same_passes_s),
        _busiest_rank(step),
        _slowest_stage(stages),
    ]
    if step.structure.any_split and any(stage.middle.weight_s is None for stage in stages):
        lines.append("weight gradients are assumed to take half of the backward pass where they are not given")
    shorter = {name: other for name, other in others.items() if other.makespan_s < makespan_s}
    if shorter:
        name = min(shorter, key=lambda name: shorter[name].makespan_s)
        needed, now = (format_si(float(s.peak_bytes.max()), "B") for s in (shorter[name], step))
        step_s = shorter[name].makespan_s
        memory = "the same peak memory" if needed == now else f"a peak memory of {needed} instead of {now} on a rank"
        lines.append(
            f"with the schedule {name} the step takes {format_latency(step_s)}, "
            f"{100 * (1 - step_s / makespan_s):.1f} % less, and {memory}; "
            + _possible_saving("another schedule", step_s, bound_s)
        )
    return lines


def _possible_saving(what: str, makespan_s: float, bound_s: float) -> str:
    """How much shorter than ``makespan_s`` a step can be at most, rounded as it is shown."""
    share = f"{100 * (1 - bound_s / makespan_s):.1f}"
    return f"{what} cannot shorten it" if share in ("0.0", "-0.0") else f"{what} can shorten it by {share} % at most"


def _busiest_rank(step: EmulatedStep) -> str:
    rank = int(step.busy_s.argmax())
    row = step.row(rank)
    start, end = step.start_s[row], step.end_s[row]
    first_s, last_s = float(start[0]), step.makespan_s - float(end[-1])
    between_s = step.makespan_s - float(step.busy_s[rank]) - first_s - last_s
    waits = [format_latency(max(wait_s, 0.0)) for wait_s in (first_s, between_s, last_s)]
    return (
        f"rank {rank} is the busiest: {100 * float(step.busy_s[rank]) / step.makespan_s:.1f} % of the step; it "
        f"waits {waits[0]} for its first pass, {waits[1]} between passes and {waits[2]} after the last"
    )


def _slowest_stage(stages: Sequence[StageCosts]) -> str:
    by_stage = [stage.both_s for stage in stages]
    mean = sum(by_stage) / len(by_stage)
    slowest = max(range(len(stages)), key=by_stage.__getitem__)
    parts = tuple(stages[slowest].parts().values())
    programs = ": " + Cost(0.0, 0.0, 0.0, parts).largest(3) if parts else ""
    if by_stage[slowest] <= 1.0001 * mean:
        return f"the stages are equally long: {format_latency(mean)} for both passes of a micro-batch{programs}"
    shortest = min(range(len(stages)), key=by_stage.__getitem__)
    return (
        f"stage {slowest} is long: {format_latency(by_stage[slowest])} for both passes of a micro-batch, "
        f"{by_stage[slowest] / mean:.2f} times the mean of the stages{programs}"
        f"{_difference(stages[slowest], stages[shortest], shortest)}"
    )


def _difference(slow: StageCosts, fast: StageCosts, number: int) -> str:
    """Programs in which a stage exceeds the fastest stage, ``number``."""
    parts, other = slow.parts(), fast.parts()
    more = {name: part.latency_s - (other[name].latency_s if name in other else 0.0) for name, part in parts.items()}
    names = sorted((name for name in more if more[name] > 0), key=lambda name: -more[name])[:2]
    if not names or not other:
        return ""
    return f"; more than stage {number}: " + ", ".join(f"{name} ({format_latency(more[name])})" for name in names)


_COLOURS = {"F": BLUE, "B": GREEN, "W": YELLOW, "out": RED, "in": PURPLE}
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients", "out": "copy to the host", "in": "copy back"}


def draw(request: SimulateRequest, plan: SimulatePlan) -> Figure:
    """Rows of ranks over time; beside them their peak memory, where there is any.

    Raises FieldError: the plan has no timeline.
    """
    if plan.timeline is None:
        raise FieldError("a figure needs the timeline", path="timeline", hint='leave out "timeline": false')
    ranks = len(plan.ranks)
    figure = new_figure(11, 1.6 + 0.42 * min(ranks, 40))
    with_memory = plan.peak_bytes > 0
    axes, *others = figure.subplots(
        1, 1 + with_memory, squeeze=False, sharey=True, gridspec_kw={"width_ratios": [5, 1][: 1 + with_memory]}
    )[0]
    passes = [*plan.timeline, *plan.copies]
    layers = 1 + max(p.stage for p in passes) // ranks
    bars = [_bar(p, ranks, layers) for p in passes]
    draw_timeline(axes, bars, [f"rank {rank.rank}" for rank in plan.ranks], plan.makespan_s)
    axes.set_title(f"{plan.schedule}: bubble {100 * plan.bubble:.1f} %, {100 * plan.gap:.1f} % above the lower bound")
    for panel in others:
        factor, unit = byte_unit(plan.peak_bytes)
        panel.barh(range(ranks), [factor * rank.peak_bytes for rank in plan.ranks], color=GREY, height=0.7)
        if request.memory_bytes is not None:
            panel.axvline(factor * request.memory_bytes, color=RED, label="memory limit")
        panel.set_xlabel(f"peak memory ({unit})")
    kinds = {p.kind for p in passes}
    draw_legend(figure, {_NAMES[kind]: colour for kind, colour in _COLOURS.items() if kind in kinds})
    return figure


def _bar(timeline_pass: TimelinePass, ranks: int, layers: int) -> Bar:
    """Copies are narrow and below the passes; later virtual stages of a rank are paler."""
    from matplotlib.colors import to_rgba

    copied = timeline_pass.kind in ("out", "in")
    return Bar(
        timeline_pass.rank + (0.4 if copied else 0.0),
        timeline_pass.start_s,
        timeline_pass.end_s,
        to_rgba(_COLOURS[timeline_pass.kind], 1.0 - 0.5 * (timeline_pass.stage // ranks) / layers),
        "" if copied else str(timeline_pass.micro_batch),
        height=0.12 if copied else 0.7,
    )
