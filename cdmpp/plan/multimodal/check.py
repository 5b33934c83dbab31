"""Verification of multimodal pipeline plans from request and plan alone, without the search's schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from cdmpp.plan.base.passes import TOLERANCE, time_faults
from cdmpp.plan.base.solve import first_faults, schema_faults
from cdmpp.plan.multimodal.modules import Module, chained, chunk_cost, link_items
from cdmpp.plan.multimodal.schema import MultimodalPlan, MultimodalRequest, StepPlan
from cdmpp.predict.prediction import Prediction

#: Module, place in its chain of layout entries, pass, sub-micro-batch.
_Task = tuple[int, int, str, int]


def check(request: MultimodalRequest, answer: Any, prices: Sequence[Prediction] = ()) -> list[str]:
    """Faults of a plan; empty for a correct one.

    The layout must contain every layer once, and the sub-micro-batches the step's items. Every pass must be there
    once, on its rank, with the duration of its costs and its memory knob, after the passes it depends on, and without
    overlap. Makespan, bubble, peak memory, gap and the sums over steps must be as claimed, and no baseline may be
    shorter. An interval must contain the makespan, and is there only if costs are predicted.

    ``prices``: predictions of ``request.price_requests()``.
    """
    try:
        claim = MultimodalPlan.model_validate(answer)
        plans = claim.step_plans()
    except ValidationError as error:
        return schema_faults(error)
    faults = list(_faults(request.with_prices(prices), answer, claim, plans))
    faults += _interval_faults(claim, bool(prices), "")
    for number, plan in enumerate(claim.plans or []):
        faults += _interval_faults(plan, bool(prices), f"plans.{number}.")
    return first_faults(faults)


def _faults(
    request: MultimodalRequest, answer: Mapping[str, Any], claim: MultimodalPlan, plans: Sequence[StepPlan]
) -> Iterator[str]:
    batches = [batch for _, batch in request.named_batches()]
    if len(plans) != len(batches):
        yield f"plans: {len(plans)} for {len(batches)} steps"
        return
    modules = request.resolved_modules()
    modules = chained(modules) if request.executable else modules
    for number, (plan, batch) in enumerate(zip(plans, batches, strict=True)):
        where = f"plans.{number}." if claim.plans is not None else ""
        if plan.batch != batch:
            yield f"{where}batch: differs from the request"
            continue
        if plan.layout != claim.layout:
            yield f"{where}layout: differs from that of the other steps"
        yield from _StepCheck(request, modules, plan, where).faults()
        yield from _figure_faults(plan, plan.gap, where)
    for name in ("makespan_s", "lower_bound_s", "searched_lower_bound_s"):
        total = sum(getattr(plan, name) for plan in plans)
        if abs(total - getattr(claim, name)) > TOLERANCE * total:
            yield f"{name}: {getattr(claim, name):.9g}, the sum of the steps is {total:.9g}"
    idle_s = sum(plan.bubble * plan.makespan_s for plan in plans)
    if abs(idle_s - claim.bubble * claim.makespan_s) > TOLERANCE * (1 + claim.makespan_s):
        yield f"bubble: {claim.bubble:.9g}, the mean of the steps is {idle_s / claim.makespan_s:.9g}"
    # The model computes the gap from other fields: what the answer claims is in its JSON.
    yield from _figure_faults(claim, answer.get("gap"), "")
    if claim.complete and claim.lower_bound_s < claim.makespan_s * (1 - TOLERANCE):
        yield f"complete: true, but lower_bound_s is {claim.lower_bound_s:.9g} and makespan_s {claim.makespan_s:.9g}"
    if claim.steps < 0:
        yield f"steps: {claim.steps}, not a number of orders"
    # Within a memory limit, or with a stage on each rank, 1F1B may have no schedule.
    if "1f1b" not in claim.baselines and not (math.isfinite(request.memory.limit_bytes) or request.executable):
        yield "baselines.1f1b: missing"
    # One placement for several steps may be worse in one of them, so only the sums are compared.
    for name, seconds in claim.baselines.items():
        if seconds < claim.makespan_s * (1 - TOLERANCE):
            yield f"baselines.{name}: {seconds:.9g}, shorter than the plan"


def _interval_faults(plan: StepPlan | MultimodalPlan, predicted: bool, where: str) -> Iterator[str]:
    """An interval without predicted costs, the reverse, or one that does not contain the makespan."""
    if plan.interval is None:
        if predicted:
            yield f"{where}interval: missing, and costs are predicted"
        return
    if not predicted:
        yield f"{where}interval: given, but no cost is predicted"
    lower_s, upper_s, slack_s = plan.interval.lower_s, plan.interval.upper_s, TOLERANCE * plan.makespan_s
    if not lower_s - slack_s <= plan.makespan_s <= upper_s + slack_s:
        yield f"{where}interval: {lower_s:.9g} to {upper_s:.9g} does not contain makespan_s {plan.makespan_s:.9g}"


def _figure_faults(plan: StepPlan | MultimodalPlan, gap: Any, where: str) -> Iterator[str]:
    """Wrong bounds or gap."""
    makespan_s, bound_s, searched_s = plan.makespan_s, plan.lower_bound_s, plan.searched_lower_bound_s
    if not bound_s * (1 - TOLERANCE) <= searched_s <= makespan_s * (1 + TOLERANCE):
        yield (
            f"{where}searched_lower_bound_s: {searched_s:.9g}, "
            f"not between lower_bound_s {bound_s:.9g} and makespan_s {makespan_s:.9g}"
        )
    if bound_s > makespan_s * (1 + TOLERANCE) or bound_s <= 0:
        yield f"{where}lower_bound_s: {bound_s:.9g}, makespan_s is {makespan_s:.9g}"
    elif not isinstance(gap, float | int) or abs(makespan_s / bound_s - 1 - gap) > TOLERANCE:
        yield f"{where}gap: {gap}, not makespan_s / lower_bound_s - 1"


class _StepCheck:
    """Verification of one step's plan."""

    def __init__(self, request: MultimodalRequest, modules: list[Module], plan: StepPlan, where: str) -> None:
        self.memory, self.ranks, self.executable = request.memory, request.ranks, request.executable
        self.modules, self.plan, self.where = modules, plan, where
        self.samples = request.samples_index
        self.chains = [[entry for entry in plan.layout if entry.module == module.name] for module in modules]

    def faults(self) -> Iterator[str]:
        """Faults of layout, items and knobs; without these, of the passes; without these, of times and memory."""
        faults = [*self._layout_faults(), *self._item_faults()]
        faults = faults or list(self._knob_faults())
        if not faults:
            self.units = [self.plan.sub_batches[module.name].items for module in self.modules]
            faults = list(self._executable_faults())
        if not faults:
            self.links = link_items(self.modules, [sum(units) for units in self.units], self.samples).all
            faults = list(self._pass_faults())
        yield from faults or [*self._time_faults(), *self._memory_faults()]

    def _layout_faults(self) -> Iterator[str]:
        """Layers that are missing, repeated or out of order."""
        for module, chain in zip(self.modules, self.chains, strict=True):
            layer, seen = 0, set[tuple[int, int]]()
            for entry in chain:
                if entry.first_layer != layer or entry.layers < 0 or not 0 <= entry.rank < self.ranks:
                    yield f"{self.where}layout: {module.name} does not continue at layer {layer} on a rank"
                if (entry.segment, entry.rank) in seen:
                    yield f"{self.where}layout: {module.name} segment {entry.segment} is twice on a rank"
                seen.add((entry.segment, entry.rank))
                layer += entry.layers
            if layer != len(module.layers):
                yield f"{self.where}layout: {module.name} has {layer} of {len(module.layers)} layers"

    def _item_faults(self) -> Iterator[str]:
        """Sub-micro-batches that do not contain the step's items."""
        for module in self.modules:
            cut = self.plan.sub_batches.get(module.name)
            expected = self.plan.batch[module.name]
            if cut is None or sum(cut.items) != expected or any(n < 1 for n in cut.items):
                yield f"{self.where}sub_batches.{module.name}: not the {expected} items of the step"
            elif len(cut.items) != cut.count or max(cut.items, default=0) != cut.size:
                yield f"{self.where}sub_batches.{module.name}: count or size differ from items"

    def _executable_faults(self) -> Iterator[str]:
        """A plan that torch.distributed.pipelining does not run, of an executable request."""
        if not self.executable:
            return
        used = [units for units in self.units if units]
        if any(len({*units}) > 1 for units in used) or len({*map(len, used)}) > 1:
            yield f"{self.where}sub_batches: the request is executable, and they are not equal, as many of each module"
        ranks = [e.rank for chain, units in zip(self.chains, self.units, strict=True) for e in chain if units]
        if {*ranks} != {*range(self.ranks)}:
            yield f"{self.where}layout: the request is executable, and a rank has no stage"
        elif len(self.modules) == 1 and ranks != [*range(self.ranks)] * (len(ranks) // self.ranks):
            yield f"{self.where}layout: the request is executable, and stages are not on all ranks in turn"

    def _knob_faults(self) -> Iterator[str]:
        """Rows of memory that are not one for each rank, with a permitted knob for each layout entry on it."""
        rows = [row.rank for row in self.plan.memory]
        if rows != list(range(self.ranks)):
            yield f"{self.where}memory: rows of ranks {rows}, the request has ranks 0 to {self.ranks - 1}"
            return
        names = [module.name for module in self.modules]
        permitted = set(self.memory.knobs) | (set() if math.isfinite(self.memory.limit_bytes) else {"keep"})
        for row in self.plan.memory:
            path = f"{self.where}memory.{row.rank}.knobs"
            for name in row.knobs:
                if name not in names:
                    yield f"{path}: no module is called {name!r}"
            for name, chain in zip(names, self.chains, strict=True):
                knobs = row.knobs.get(name, [])
                entries = sum(entry.rank == row.rank for entry in chain)
                if len(knobs) != entries:
                    yield f"{path}.{name}: {len(knobs)} knobs for {entries} layout entries on rank {row.rank}"
                elif self.plan.batch[name] and not set(knobs) <= permitted:
                    yield f"{path}.{name}: {', '.join(knobs)}; the request permits {', '.join(sorted(permitted))}"

    def _pass_faults(self) -> Iterator[str]:
        """Passes that are missing, repeated or on a wrong rank; collects the others."""
        self.times: dict[_Task, tuple[float, float]] = {}
        self.orders: list[list[_Task]] = []
        if len(self.plan.order) != self.ranks:
            yield f"{self.where}order: {len(self.plan.order)} ranks, the request has {self.ranks}"
            return
        places = {
            (entry.module, entry.segment, entry.rank): (i, at)
            for i, chain in enumerate(self.chains)
            for at, entry in enumerate(chain)
        }
        for rank, row in enumerate(self.plan.order):
            order: list[_Task] = []
            for number, entry in enumerate(row):
                path = f"{self.where}order.{rank}.{number}"
                place = places.get((entry.module, entry.segment, rank))
                if place is None or not 0 <= entry.micro_batch < len(self.units[place[0]]):
                    yield f"{path}: no such pass on rank {rank}"
                    continue
                task = (*place, entry.pass_, entry.micro_batch)
                if task in self.times:
                    yield f"{path}: runs twice"
                self.times[task] = (entry.start_s, entry.end_s)
                order.append(task)
            self.orders.append(order)
        expected = 2 * sum(len(chain) * len(units) for chain, units in zip(self.chains, self.units, strict=True))
        if len(self.times) != expected:
            yield f"{self.where}order: {len(self.times)} passes of {expected}"

    def _cost(self, task: _Task) -> tuple[float, float, float]:
        """Seconds, bytes kept between the passes, and extra bytes while this one runs."""
        i, at, way, unit = task
        entry = self.chains[i][at]
        on_rank = [other for other in self.chains[i] if other.rank == entry.rank]
        knob = self.plan.memory[entry.rank].knobs[self.modules[i].name][on_rank.index(entry)]
        layers = (entry.first_layer, entry.layers)
        cost = chunk_cost(self.modules[i], layers, self.units[i][unit], knob, self.memory)
        if way == "F":
            return cost.forward_s, cost.kept_bytes, cost.extra_forward_bytes
        return cost.backward_s, cost.kept_bytes, cost.extra_backward_bytes

    def _predecessors(self, task: _Task) -> list[_Task]:
        """Passes that must end before this one starts."""
        i, at, way, unit = task
        last = len(self.chains[i]) - 1
        if way == "F" and at > 0:
            return [(i, at - 1, "F", unit)]
        if way == "B" and at < last:
            return [(i, at + 1, "B", unit)]
        predecessors: list[_Task] = [(i, last, "F", unit)] if way == "B" else []
        items = self._items_of(i, unit)
        for link in self.links:
            # Forward, data comes from the sender; backward, from the receiver.
            sender, receiver = (link.single, link.other) if link.forward else (link.other, link.single)
            j = sender if way == "F" else receiver
            if i != (receiver if way == "F" else sender):
                continue
            place = len(self.chains[j]) - 1 if way == "F" else 0
            n, total = sum(self.units[link.single]), sum(self.units[link.other])
            for v in range(len(self.units[j])):
                other_items = self._items_of(j, v)
                singles, others = (items, other_items) if link.single == i else (other_items, items)
                if any(item * total // n in others for item in singles):
                    predecessors.append((j, place, way, v))
        return predecessors

    def _waits_for(self, task: _Task) -> Iterator[tuple[_Task, float]]:
        """The predecessors, each with the seconds until its output, or the gradient of its input, is on the rank."""
        for earlier in self._predecessors(task):
            ranks = {self.chains[i][at].rank for i, at, _, _ in (earlier, task)}
            i, _, _, unit = earlier if task[2] == "F" else task
            yield earlier, self.modules[i].transfer_s(self.units[i][unit]) if len(ranks) > 1 else 0.0

    def _items_of(self, i: int, unit: int) -> range:
        first = sum(self.units[i][:unit])
        return range(first, first + self.units[i][unit])

    def _time_faults(self) -> Iterator[str]:
        """Wrong times, and a wrong bubble."""
        makespan_s = self.plan.makespan_s
        yield from time_faults(
            self.orders, self.times, makespan_s, lambda t: self._cost(t)[0], self._waits_for, self._name, self.where
        )
        last_s = max(end_s for _, end_s in self.times.values())
        busy_s = sum(end_s - start_s for start_s, end_s in self.times.values())
        bubble = 1 - busy_s / (last_s * self.ranks) if last_s else 0.0
        if abs(bubble - self.plan.bubble) > TOLERANCE * 10:
            yield f"{self.where}bubble: {self.plan.bubble:.9g}, the order has {bubble:.9g}"

    def _memory_faults(self) -> Iterator[str]:
        """Wrong peak memory, or more than the limit."""
        for rank, order in enumerate(self.orders):
            rows = zip(self.modules, self.chains, strict=True)
            held = peak = sum(e.layers * module.weight_bytes for module, chain in rows for e in chain if e.rank == rank)
            for task in order:
                _, kept, extra = self._cost(task)
                if task[2] == "F":
                    held += kept
                peak = max(peak, held + extra)
                if task[2] == "B":
                    held -= kept
            path = f"{self.where}memory.{rank}"
            claimed, limit = self.plan.memory[rank].peak_bytes, self.memory.limit_bytes
            if abs(peak - claimed) > TOLERANCE * max(peak, 1.0):
                yield f"{path}: {claimed:.9g} bytes, the order holds {peak:.9g}"
            if peak > limit * (1 + TOLERANCE):
                yield f"{path}: {peak:.9g} bytes, the limit is {limit:.9g}"

    def _name(self, task: _Task) -> str:
        i, at, way, unit = task
        return f"{way} of {self.modules[i].name} sub-micro-batch {unit}, segment {self.chains[i][at].segment}"
