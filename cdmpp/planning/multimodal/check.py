"""Whether a plan holds what it says: run anew from request and plan alone, without the search's schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cdmpp.planning.multimodal.modules import Module, links
from cdmpp.planning.multimodal.schema import LayoutEntry, MultimodalAnswer, MultimodalRequest, StepPlan
from cdmpp.planning.multimodal.tasks import Memory, chunk_figures
from cdmpp.prediction import Prediction

#: Of the makespan, and of the bytes: how far a claim may be from what was found.
TOLERANCE = 1e-9
_MOST_FAULTS = 20
#: Module, place in its chain of layout entries, pass, sub-micro-batch.
_Task = tuple[int, int, str, int]


def check(request: MultimodalRequest, answer: Any, prices: Sequence[Prediction] = ()) -> list[str]:
    """What is wrong with an answer; empty where nothing is.

    The layout covers every layer once; the sub-micro-batches hold the step's items; every pass is there once,
    on its rank, as long as its costs and its memory knob say, after what it needs, and beside no other; the
    makespan, the peaks of memory, the gap and the sums over steps are as claimed, and no baseline is shorter.

    Parameters
    ----------
    request : MultimodalRequest
    answer : JSON value
    prices : sequence of Prediction
        Of ``request.price_requests()``.
    """
    try:
        claim = MultimodalAnswer.model_validate(answer)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        return [f"{'.'.join(map(str, one['loc'])) or 'answer'}: {one['msg']}" for one in found[:_MOST_FAULTS]]
    faults = list(_faults(request, claim, prices))
    more = len(faults) - _MOST_FAULTS
    return [*faults[:_MOST_FAULTS], f"and {more} more"] if more > 0 else faults


def _faults(request: MultimodalRequest, claim: MultimodalAnswer, prices: Sequence[Prediction]) -> Iterator[str]:
    modules = request.priced(prices)
    named = [batch for _, batch in request.named_batches()]
    plans = claim.plans
    if plans is None:
        if claim.order is None or claim.memory is None or claim.sub_batches is None or claim.batch is None:
            yield "order: an answer without plans has batch, sub_batches, memory and order"
            return
        plans = [
            StepPlan.model_validate(
                {name: getattr(claim, name) for name in StepPlan.model_fields if name != "layout"}
                | {"layout": claim.layout}
            )
        ]
    if len(plans) != len(named):
        yield f"plans: {len(plans)} for {len(named)} steps"
        return
    for number, (plan, batch) in enumerate(zip(plans, named, strict=True)):
        where = f"plans.{number}." if claim.plans is not None else ""
        if plan.batch != batch:
            yield f"{where}batch: not that of the request"
            continue
        if plan.layout != claim.layout:
            yield f"{where}layout: not that of the other steps"
        step = _Step(request.memory, modules, request.ranks, request.samples_at, plan, where)
        yield from step.faults()
    for name in ("makespan_s", "lower_bound_s"):
        total = sum(getattr(plan, name) for plan in plans)
        if abs(total - getattr(claim, name)) > TOLERANCE * total:
            yield f"{name}: {getattr(claim, name):.9g}, the steps' sum is {total:.9g}"
    yield from _figures(claim, "")


def _figures(claim: MultimodalAnswer | StepPlan, where: str) -> Iterator[str]:
    if claim.lower_bound_s > claim.makespan_s * (1 + TOLERANCE) or claim.lower_bound_s <= 0:
        yield f"{where}lower_bound_s: {claim.lower_bound_s:.9g}, makespan_s is {claim.makespan_s:.9g}"
    elif abs(claim.makespan_s / claim.lower_bound_s - 1 - claim.gap) > TOLERANCE:
        yield f"{where}gap: {claim.gap:.9g}, makespan_s / lower_bound_s - 1 is another"
    # One placement for several steps may be worse in one of them.
    if isinstance(claim, MultimodalAnswer):
        for name, seconds in claim.baselines.items():
            if seconds < claim.makespan_s * (1 - TOLERANCE):
                yield f"baselines.{name}: {seconds:.9g}, better than the plan"


@dataclass
class _Step:
    memory: Memory
    modules: list[Module]
    ranks: int
    samples: int | None
    plan: StepPlan
    where: str

    def faults(self) -> Iterator[str]:
        """Faults of one step's plan."""
        found = [*self._layout(), *self._items()]
        if found:
            yield from found
            return
        self.chains = [self._chain(module) for module in self.modules]
        self.units = [self.plan.sub_batches[module.name].items for module in self.modules]
        self.belong = links(self.modules, [sum(units) for units in self.units], self.samples).all
        found = list(self._complete())
        if not found:
            found = [*self._times(), *self._memory(), *_figures(self.plan, self.where)]
        yield from found

    def _chain(self, module: Module) -> list[LayoutEntry]:
        return [entry for entry in self.plan.layout if entry.module == module.name]

    def _layout(self) -> Iterator[str]:
        for module in self.modules:
            at, seen = 0, set[tuple[int, int]]()
            for entry in self._chain(module):
                if entry.first_layer != at or entry.layers < 0 or not 0 <= entry.rank < self.ranks:
                    yield f"{self.where}layout: {module.name} does not go on at layer {at} on a rank"
                if (entry.segment, entry.rank) in seen:
                    yield f"{self.where}layout: {module.name} segment {entry.segment} is twice on a rank"
                seen.add((entry.segment, entry.rank))
                at += entry.layers
            if at != len(module.layers):
                yield f"{self.where}layout: {module.name} has {at} of {len(module.layers)} layers"

    def _items(self) -> Iterator[str]:
        for module in self.modules:
            cut = self.plan.sub_batches.get(module.name)
            wanted = self.plan.batch[module.name]
            if cut is None or sum(cut.items) != wanted or any(n < 1 for n in cut.items):
                yield f"{self.where}sub_batches.{module.name}: not the {wanted} items of the step"
            elif len(cut.items) != cut.count or max(cut.items, default=0) != cut.size:
                yield f"{self.where}sub_batches.{module.name}: count or size is another"

    def _complete(self) -> Iterator[str]:
        if len(self.plan.order) != self.ranks:
            yield f"{self.where}order: {len(self.plan.order)} ranks, the request has {self.ranks}"
            return
        places = {
            (module.name, entry.segment, entry.rank): (i, at)
            for i, module in enumerate(self.modules)
            for at, entry in enumerate(self.chains[i])
        }
        self.times: dict[_Task, tuple[float, float]] = {}
        self.orders: list[list[_Task]] = []
        for rank, row in enumerate(self.plan.order):
            order: list[_Task] = []
            for number, entry in enumerate(row):
                said = f"{self.where}order.{rank}.{number}"
                place = places.get((entry.module, entry.segment, rank))
                if place is None or not 0 <= entry.micro_batch < len(self.units[place[0]]):
                    yield f"{said}: no such pass on rank {rank}"
                    continue
                task = (*place, entry.pass_, entry.micro_batch)
                if task in self.times:
                    yield f"{said}: runs twice"
                self.times[task] = (entry.start_s, entry.end_s)
                order.append(task)
            self.orders.append(order)
        chains = zip(self.chains, self.units, strict=True)
        wanted = 2 * sum(len(chain) * len(units) for chain, units in chains)
        if len(self.times) != wanted:
            yield f"{self.where}order: {len(self.times)} passes of {wanted}"

    def _cost(self, task: _Task) -> tuple[float, float, float]:
        """Seconds, bytes kept between the passes, and bytes more while this one runs."""
        i, at, way, unit = task
        entry = self.chains[i][at]
        mine = [e for e in self.chains[i] if e.rank == entry.rank]
        knob = self.plan.memory[entry.rank].knobs[self.modules[i].name][mine.index(entry)]
        forward_s, backward_s, kept, more_forward, more_backward = chunk_figures(
            self.modules[i], (entry.first_layer, entry.layers), self.units[i][unit], knob, self.memory
        )
        return (forward_s, kept, more_forward) if way == "F" else (backward_s, kept, more_backward)

    def _needed(self, task: _Task) -> list[_Task]:
        i, at, way, unit = task
        last = len(self.chains[i]) - 1
        if way == "F" and at > 0:
            return [(i, at - 1, "F", unit)]
        if way == "B" and at < last:
            return [(i, at + 1, "B", unit)]
        out: list[_Task] = [(i, last, "F", unit)] if way == "B" else []
        mine = self._items_of(i, unit)
        for link in self.belong:
            # Forward, data comes from the one that sends; backward, from the one that received.
            sender, receiver = (link.single, link.other) if link.forward else (link.other, link.single)
            j = sender if way == "F" else receiver
            if i != (receiver if way == "F" else sender):
                continue
            place = len(self.chains[j]) - 1 if way == "F" else 0
            n, total = sum(self.units[link.single]), sum(self.units[link.other])
            for v in range(len(self.units[j])):
                theirs = self._items_of(j, v)
                singles, others = (mine, theirs) if link.single == i else (theirs, mine)
                if any(item * total // n in others for item in singles):
                    out.append((j, place, way, v))
        return out

    def _items_of(self, i: int, unit: int) -> range:
        first = sum(self.units[i][:unit])
        return range(first, first + self.units[i][unit])

    def _times(self) -> Iterator[str]:
        slack = TOLERANCE * self.plan.makespan_s
        for rank, order in enumerate(self.orders):
            free_s = 0.0
            for number, task in enumerate(order):
                start_s, end_s = self.times[task]
                said = f"{self.where}order.{rank}.{number}: {self._name(task)}"
                cost_s = self._cost(task)[0]
                if abs(end_s - start_s - cost_s) > slack:
                    yield f"{said} takes {end_s - start_s:.9g} s, its cost is {cost_s:.9g} s"
                if start_s < free_s - slack:
                    yield f"{said} starts at {start_s:.9g} s, the pass before it ends at {free_s:.9g} s"
                for earlier in self._needed(task):
                    if start_s < self.times[earlier][1] - slack:
                        yield (
                            f"{said} starts at {start_s:.9g} s, {self._name(earlier)} ends at "
                            f"{self.times[earlier][1]:.9g} s"
                        )
                free_s = max(free_s, end_s)
        last_s = max(end_s for _, end_s in self.times.values())
        if abs(last_s - self.plan.makespan_s) > slack:
            yield f"{self.where}makespan_s: {self.plan.makespan_s:.9g}, the last pass ends at {last_s:.9g} s"

    def _memory(self) -> Iterator[str]:
        for rank, order in enumerate(self.orders):
            still = sum(
                entry.layers * module.weight_bytes
                for module, chain in zip(self.modules, self.chains, strict=True)
                for entry in chain
                if entry.rank == rank
            )
            held, peak = still, still
            for task in order:
                _, kept, more = self._cost(task)
                if task[2] == "F":
                    held += kept
                    peak = max(peak, held + more)
                else:
                    peak = max(peak, held + more)
                    held -= kept
            claimed = self.plan.memory[rank].peak_bytes
            if abs(peak - claimed) > TOLERANCE * max(peak, 1.0):
                yield f"{self.where}memory.{rank}: {claimed:.9g} bytes, the order holds {peak:.9g}"
            if peak > self.memory.limit_bytes * (1 + TOLERANCE):
                limit = self.memory.limit_bytes
                yield f"{self.where}memory.{rank}: {peak:.9g} bytes, the limit is {limit:.9g}"

    def _name(self, task: _Task) -> str:
        i, at, way, unit = task
        return f"{way} of {self.modules[i].name} sub-micro-batch {unit}, segment {self.chains[i][at].segment}"
