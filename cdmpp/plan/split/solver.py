"""Solving a split request: layers from costs, the search, its stages, and why the slowest stage is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdmpp.errors import FieldError
from cdmpp.plan.split.schema import PASSES, SplitPlan, SplitRequest, StagePlan, device_name
from cdmpp.plan.split.search import Layer, LayerTable, Rank, Split, SplitResult, equal_count, greedy, split, stage_costs
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.memory import memory_limit
from cdmpp.predict.requests.plot import BLUE, GREEN, GREY, RED, byte_unit, draw_legend, new_figure, time_unit
from cdmpp.predict.requests.pricing import Cost, PricedProgram, cost_of
from cdmpp.simulate.emulator.emulate import Emulator
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class _Problem:
    """Layers one by one, and ranks.

    ``costs`` has the sum of both passes of each layer, by kind of device.
    """

    request: SplitRequest
    layers: list[Layer]
    costs: list[list[Cost]]
    ranks: list[Rank]

    @property
    def table(self) -> LayerTable:
        """The layers as arrays."""
        recompute = self.request.memory == "recompute"
        return LayerTable(self.layers, self.request.micro_batches, recompute=recompute)


def solve(request: SplitRequest, control: SearchControl) -> SplitPlan:
    """The best split within the budget.

    Raises FieldError: more ranks than layers, too many layers, or too many orders of the ranks.
    Raises InfeasibleError: no split fits into the memory.
    """
    problem = _problem(request)
    emulator = Emulator()
    result = split(
        problem.table,
        problem.ranks,
        request.goal,
        any_order=request.any_order,
        control=control,
        max_steps=request.max_steps,
        emulator=emulator,
        # Called while the search continues; an emulator must not be shared with it.
        describe=lambda so_far: _plan(problem, so_far, Emulator()),
    )
    return _plan(problem, result, emulator)


def figure_of(request: SplitRequest, plan: SplitPlan) -> float:
    """The objective of a plan with the costs of this request."""
    problem = _problem(request)
    order = tuple(stage.rank for stage in plan.stages)
    table = problem.table
    ranks = tuple(problem.ranks[r] for r in order)
    again = Split(table, ranks, order, (0, *plan.boundaries, len(table)))
    return again.slowest_s if plan.goal == "slowest" else again.step(Emulator()).makespan_s


def _problem(request: SplitRequest) -> _Problem:
    layers: list[Layer] = []
    costs: list[list[Cost]] = []
    for number, form in enumerate(request.layers):
        forward, backward = (request.costs(number, name) for name in PASSES)
        if request.memory == "recompute":
            backward = [_both(f, b) for f, b in zip(forward, backward, strict=True)]
        layer = Layer(
            tuple(cost.latency_s for cost in forward),
            tuple(cost.latency_s for cost in backward),
            form.activation_bytes,
            form.weight_bytes,
            cost_of(form.transfer, form.transfer_s).latency_s,
            form.name or f"layer {number}",
            form.boundary_bytes,
        )
        layers += [layer] * form.count
        costs += [[_both(f, b) for f, b in zip(forward, backward, strict=True)]] * form.count
    devices = request.devices
    ranks = [
        Rank(devices.index(form.device), memory_limit(form.memory_bytes, [form.device], request.ignore_memory))
        for form in request.rank_forms
    ]
    if len(ranks) > len(layers):
        raise FieldError.at(
            "ranks", f"{len(ranks)}, and {len(layers)} layers", hint="each rank needs at least one layer"
        )
    return _Problem(request, layers, costs, ranks)


def _both(first: Cost, second: Cost) -> Cost:
    return Cost(
        first.latency_s + second.latency_s,
        first.lower_s + second.lower_s,
        first.upper_s + second.upper_s,
        first.parts + second.parts,
    )


def _plan(problem: _Problem, result: SplitResult, emulator: Emulator) -> SplitPlan:
    best, table, ranks = result.split, result.split.table, problem.ranks
    cache = dict(zip(("hits", "misses"), emulator.lookups(), strict=True))
    step = best.step(emulator)
    goal, devices = problem.request.goal, problem.request.devices

    def value_s(other: Split) -> float:
        return other.slowest_s if goal == "slowest" else other.step(emulator).makespan_s

    baselines = {"equal_count": equal_count(table, ranks), "greedy": greedy(table, ranks)}
    too_large = [name for name, baseline in baselines.items() if not baseline.fits()]
    forward, backward = stage_costs(best)
    explanation = explain(best, [device_name(device) for device in devices], problem.costs)
    if too_large:
        explanation.append(f"{' and '.join(too_large)} would not fit into the memory")
    fastest_s = [min(f + b for f, b in zip(layer.forward_s, layer.backward_s, strict=True)) for layer in table.layers]
    return SplitPlan(
        goal=goal,
        value_s=result.value_s,
        lower_bound_s=result.bound_s,
        complete=result.complete,
        divisible_bound_s=sum(fastest_s) / len(ranks),
        stages=[
            StagePlan(
                stage=s,
                rank=best.order[s],
                device=None if devices[rank.kind] is None else device_name(devices[rank.kind]),
                first_layer=first,
                last_layer=end - 1,
                layers=[table.layers[first].name, table.layers[end - 1].name],
                forward_s=forward[s],
                backward_s=backward[s],
                peak_bytes=best.bytes_held[s],
            )
            for s, (rank, first, end) in enumerate(best.runs())
        ],
        boundaries=list(best.begin[1:-1]),
        slowest_s=best.slowest_s,
        step_s=step.makespan_s,
        bubble=step.bubble,
        fwd_costs={str(s): seconds for s, seconds in forward.items()},
        bwd_costs={str(s): seconds for s, seconds in backward.items()},
        baselines={name: value_s(baseline) for name, baseline in baselines.items()},
        explanation=explanation,
        steps=result.steps,
        cache=cache,
        too_large=too_large,
    )


def explain(best: Split, devices: Sequence[str], costs: Sequence[Sequence[Cost]]) -> list[str]:
    """The slowest stage, its programs, and the effect of moving its outer layers to its neighbours."""
    times = best.stage_s
    slow = max(range(len(times)), key=times.__getitem__)
    rank, (first, end) = best.ranks[slow], best.begin[slow : slow + 2]
    mean = sum(times) / len(times)
    share = times[slow] / mean - 1.0 if mean > 0 else 0.0
    lines = [
        f"stage {slow} (layers {first} to {end - 1} on {devices[rank.kind]}) is the longest: "
        f"{format_latency(times[slow])} for both passes, {100 * share:.1f} % above the mean"
    ]
    merged: dict[str, PricedProgram] = {}
    for layer in range(first, end):
        for part in costs[layer][rank.kind].parts:
            before = merged.get(part.name, PricedProgram(part.name, 0, 0.0))
            merged[part.name] = PricedProgram(part.name, before.count + part.count, before.latency_s + part.latency_s)
    if merged:
        lines.append(f"stage {slow} is long because of " + Cost(0, 0, 0, tuple(merged.values())).largest(3))
    names = [layer.name for layer in best.table.layers]
    layer_s = {at: best.table.time_s(rank.kind, at, at + 1) for at in range(first, end)}
    longest = max(layer_s, key=layer_s.__getitem__)
    lines.append(
        f"its layers are {names[first]} to {names[end - 1]}; the longest one is {names[longest]} with "
        f"{format_latency(layer_s[longest])}"
    )
    for neighbour, at, which in ((slow - 1, first, "first"), (slow + 1, end - 1, "last")):
        if 0 <= neighbour < len(times) and end - first > 1:
            moved_s = times[neighbour] + best.table.time_s(best.ranks[neighbour].kind, at, at + 1)
            lines.append(f"with its {which} layer stage {neighbour} would take {format_latency(moved_s)}")
    return lines


def draw(request: SplitRequest, plan: SplitPlan) -> Figure:
    """Bars of the stages with the slowest stages of the baselines, and memory with its limits."""
    stages = plan.stages
    with_memory = any(stage.peak_bytes for stage in stages)
    figure = new_figure(10 if with_memory else 7, 1.8 + 0.32 * len(stages))
    axes, *others = figure.subplots(1, 2 if with_memory else 1, squeeze=False, sharey=True)[0]
    rows = range(len(stages))
    factor, unit = time_unit(plan.slowest_s)
    forward = [factor * stage.forward_s for stage in stages]
    axes.barh(rows, forward, color=BLUE)
    axes.barh(rows, [factor * stage.backward_s for stage in stages], left=forward, color=GREEN)
    if plan.goal == "slowest":
        for (name, seconds), style in zip(plan.baselines.items(), ("--", ":"), strict=True):
            axes.axvline(factor * seconds, color=GREY, linestyle=style, label=f"slowest stage of {name}")
    axes.set_yticks(rows, [f"stage {s.stage}: layers {s.first_layer} to {s.last_layer}" for s in stages])
    axes.set_ylim(len(stages) - 0.4, -0.6)
    axes.set_xlabel(f"one micro-batch ({unit})")
    axes.set_title(f"1F1B step: {factor * plan.step_s:.4g} {unit}, bubble {100 * plan.bubble:.1f} %")
    for panel in others:
        _draw_memory(panel, request, plan)
    draw_legend(figure, {"forward": BLUE, "backward": GREEN})
    return figure


def _draw_memory(axes: Axes, request: SplitRequest, plan: SplitPlan) -> None:
    factor, unit = byte_unit(max(stage.peak_bytes for stage in plan.stages))
    axes.barh(range(len(plan.stages)), [factor * stage.peak_bytes for stage in plan.stages], color=GREY)
    for row, stage in enumerate(plan.stages):
        limit = request.rank_forms[stage.rank].memory_bytes
        if limit is not None:
            axes.plot([factor * limit] * 2, [row - 0.4, row + 0.4], color=RED, label="memory limit")
    axes.set_xlabel(f"peak memory ({unit})")
