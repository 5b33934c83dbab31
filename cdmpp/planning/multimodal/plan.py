"""Plans of steps: variants to choose from, 1F1B beside them, the search, and the memory that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.planning.multimodal.dispatch import ALTERNATE, BACKWARD_FIRST, LONGEST_WAIT
from cdmpp.planning.multimodal.exact import best_of_all
from cdmpp.planning.multimodal.knobs import choose_knobs, leanest_bytes
from cdmpp.planning.multimodal.modules import Links, Module, links, spread
from cdmpp.planning.multimodal.placement import MAX_SEGMENTS, Placement, contiguous, in_segments, recut, segment_counts
from cdmpp.planning.multimodal.schedule import (
    Rule,
    Schedule,
    dispatched,
    followed,
    lean_orders,
    natural_key,
    one_f_one_b,
    sequence_of,
)
from cdmpp.planning.multimodal.search import Counter, search
from cdmpp.planning.multimodal.tasks import Knob, Knobs, Memory, Tasks, make_tasks

#: PipeWeaver's share of the peak efficiency that a sub-micro-batch keeps.
SHARE = 0.95
#: Tasks of a step: above, even one schedule takes long.
MAX_TASKS = 20_000
#: The sub-micro-batches of the rule, and smaller ones: less efficient, but more of them fill the pipeline.
SHRINK = (1, 2, 4)
#: Share of the budget after which no more placements are looked at.
PREPARE = 0.3
#: Micro-batch counts that are tried for 1F1B, at most.
MAX_COUNTS = 16
#: Passes to simulate for cuts that make 1F1B short: some ten milliseconds compiled, two seconds if not.
MAX_RECUT = 1_000_000
#: 1F1B where possible: forward and backward in turn.
_IN_TURN = Rule(LONGEST_WAIT, ALTERNATE)


@dataclass(frozen=True)
class Plan:
    """The plan of one step.

    Attributes
    ----------
    batch : tuple of int
        Items of each module.
    schedule : Schedule
    bound_s : float
        No schedule of any of the variants that were considered is shorter.
    baselines_s : dict of str to float
        "1f1b": modules packed one behind the other, the best number of micro-batches; "1f1b_segments": the
        rule's segments in their natural order. Absent where they do not fit the memory.
    one_f_one_b : Schedule or None
        That of "1f1b".
    micro_batches : int or None
        Of "1f1b".
    complete : bool
        Every order of segments was tried, or could not be shorter.
    steps : int
        Orders that were tried.
    """

    batch: tuple[int, ...]
    schedule: Schedule
    bound_s: float
    baselines_s: dict[str, float]
    one_f_one_b: Schedule | None
    micro_batches: int | None
    complete: bool
    steps: int

    def as_schedule(self, schedule: Schedule) -> Plan:
        """The same step with another schedule."""
        return replace(self, schedule=schedule)


@dataclass
class _Ready:
    """A step under one placement: what to search, and the best that is known before."""

    variants: list[Tasks]
    bounds_s: list[float]
    best: Schedule | None
    leanest: float = float("inf")
    in_segments: Schedule | None = None
    one_f_one_b: Schedule | None = None
    micro_batches: int | None = None


def plan_step(
    modules: Sequence[Module],
    batch: Sequence[int],
    ranks: int,
    *,
    memory: Memory | None = None,
    share: float = SHARE,
    samples: int | None = None,
    watch: SearchControl | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    counter: Counter | None = None,
) -> Plan:
    """Plan one step: :func:`plan_steps` of a single batch."""
    return plan_steps(
        modules,
        [batch],
        ranks,
        memory=memory,
        share=share,
        samples=samples,
        watch=watch,
        seed=seed,
        max_steps=max_steps,
        counter=counter,
    )[0]


def plan_steps(
    modules: Sequence[Module],
    batches: Sequence[Sequence[int]],
    ranks: int,
    *,
    memory: Memory | None = None,
    share: float = SHARE,
    samples: int | None = None,
    watch: SearchControl | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    counter: Counter | None = None,
    report: Callable[[Callable[[], list[Plan]]], None] | None = None,
    most_tasks: int = MAX_TASKS,
) -> list[Plan]:
    """Place the modules once, and schedule each step on that placement.

    Parameters
    ----------
    modules : sequence of Module
    batches : sequence of sequence of int
        Items of each module in each step.
    ranks : int
    memory : Memory, optional
    share : float
        Of the peak efficiency that the rule's sub-micro-batches keep.
    samples : int, optional
        Module whose items are the samples, to which the others' belong; default: see :func:`links`.
    watch : SearchControl, optional
        Default: a budget of one second.
    max_steps : int, optional
        Orders to try in all steps together.
    report : callable, optional
        Given, in every turn, a function that makes the plans so far.
    most_tasks : int
        Of a step under the rule's sub-micro-batches; more are refused.

    Returns
    -------
    list of Plan

    Raises
    ------
    FieldError
        Modules wait for each other, or a step has too many tasks.
    InfeasibleError
        No plan keeps the memory limit; the message names one that would.

    Notes
    -----
    PipeWeaver, with two additions: sub-micro-batches below the rule's size and 1F1B's own layout are variants
    too, so that a plan is never longer than 1F1B on the same costs.
    """
    memory = memory if memory is not None else Memory()
    watch = watch if watch is not None else SearchControl(1.0)
    counter = counter if counter is not None else Counter()
    rng = np.random.default_rng(seed)
    total = [sum(column) for column in zip(*batches, strict=True)]
    for batch in batches:
        sizes = _sizes(modules, share, 1)
        segments = segment_counts(modules, sizes, ranks)
        units = _units(modules, batch, sizes)
        if 2 * ranks * sum(k * len(each) for k, each in zip(segments, units, strict=True)) > most_tasks:
            raise _too_many(batch, most_tasks)
    rule, *others = _segment_placements(modules, total, ranks, share)
    conventional = _contiguous_placements(modules, total, ranks, links(modules, total, samples))
    placements = [rule, *conventional, *others]
    budget_s = watch.budget_s if watch.budget_s is not None else float("inf")
    ready: list[list[_Ready]] = []
    for placement in placements:
        # The rule's and the conventional placements always; more while there is time left to search them.
        late = max_steps is None and bool(np.isfinite(memory.limit_bytes)) and watch.spent_s > PREPARE * budget_s
        fully = len(ready) <= len(conventional) or not late
        known = [one.best.makespan_s for row in ready for one in row if one.best is not None]
        best_s = min(known, default=float("inf")) if len(batches) == 1 else float("inf")
        ready.append(
            [
                _prepare(
                    modules,
                    batch,
                    placement,
                    ranks,
                    memory,
                    share,
                    placement == rule,
                    best_s,
                    fully,
                    links(modules, batch, samples),
                    most_tasks,
                )
                for batch in batches
            ]
        )
    possible = [row for row in ready if all(one.best is not None for one in row)]
    if not possible:
        _refuse(ready, memory)

    def length(row: Sequence[_Ready]) -> float:
        return sum(one.best.makespan_s for one in row if one.best is not None)

    if len(batches) > 1:  # weights stay where they are: one placement for all steps
        chosen = min(possible, key=length)
        rows = [[one] for one in chosen]
    else:
        rows = [[row[0] for row in sorted(possible, key=length)]]
    segments_row = ready[0]
    usual = min(
        (row for row in ready[1 : 1 + len(conventional)] if all(one.one_f_one_b for one in row)),
        key=lambda row: sum(one.one_f_one_b.makespan_s for one in row if one.one_f_one_b),
        default=None,
    )
    began_s = watch.spent_s
    plans = [
        Plan(
            tuple(batch),
            best,
            min(bound for every in ready for bound in every[at].bounds_s),
            _baselines(usual[at] if usual else None, segments_row[at]),
            usual[at].one_f_one_b if usual else None,
            usual[at].micro_batches if usual else None,
            False,
            0,
        )
        for at, (batch, row) in enumerate(zip(batches, rows, strict=True))
        for best in [min((one.best for one in row if one.best), key=lambda one: one.makespan_s)]
    ]
    for at, row in enumerate(rows):

        def tell(now: Schedule, at: int = at) -> None:
            plans[at] = replace(plans[at], schedule=now)
            if report is not None:
                report(plans.copy)

        variants = [tasks for one in row for tasks in one.variants]
        found = search(
            variants,
            plans[at].schedule,
            watch,
            rng,
            until_s=began_s + (budget_s - began_s) * (at + 1) / len(rows),
            max_steps=None if max_steps is None else max(1, max_steps // len(rows)),
            counter=counter,
            report=tell,
        )
        schedule = _relaxed(found.best)
        schedule, proven = best_of_all(variants, schedule, watch)
        plans[at] = replace(
            plans[at],
            schedule=schedule,
            # Equal sums of seconds in another order differ in their last digits.
            bound_s=schedule.makespan_s
            if proven and len(batches) == 1
            else min(plans[at].bound_s, schedule.makespan_s),
            complete=found.complete or proven,
            steps=found.steps,
        )
    return plans


def _baselines(usual: _Ready | None, own: _Ready) -> dict[str, float]:
    out: dict[str, float] = {}
    if usual is not None and usual.one_f_one_b is not None:
        out["1f1b"] = usual.one_f_one_b.makespan_s
    if own.in_segments is not None:
        out["1f1b_segments"] = own.in_segments.makespan_s
    return out


def _work_s(modules: Sequence[Module], items: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of all units in each module; a trace for one without, so that its layers are spread as well."""
    work = [
        module.work * sum(sum(module.layer_s(n)) for n in units) for module, units in zip(modules, items, strict=True)
    ]
    trace = 1e-6 * sum(work)
    return [seconds if seconds else trace for seconds in work]


def _units(modules: Sequence[Module], batch: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return [spread(n, -(-n // size)) if n else () for n, size in zip(batch, sizes, strict=True)]


def _sizes(modules: Sequence[Module], share: float, shrink: int) -> list[int]:
    return [max(int(module.sizes[0]), module.sub_batch(share) // shrink) for module in modules]


def _segment_placements(modules: Sequence[Module], batch: Sequence[int], ranks: int, share: float) -> list[Placement]:
    """The rule's segments, then one each, and more; balanced for the mix."""
    sizes = _sizes(modules, share, 1)
    items = _units(modules, batch, sizes)
    work_s = _work_s(modules, items)
    rule = segment_counts(modules, sizes, ranks)
    most = [max(1, min(MAX_SEGMENTS, len(module.layers) // ranks)) for module in modules]
    fixed = [module.segments for module in modules]
    options = [
        rule,
        [1] * len(modules),
        [min(2 * k, top) for k, top in zip(rule, most, strict=True)],
        [max(k, min(2, top)) for k, top in zip(rule, most, strict=True)],
    ]
    out: list[Placement] = []
    for counts in options:
        kept = [own if own is not None else k for own, k in zip(fixed, counts, strict=True)]
        # A rank waits for the one before it at least for a chunk of the quickest unit, forward and back.
        lead_s = min(
            module.work * sum(module.layer_s(max(units))) / (ranks * k)
            for module, units, k in zip(modules, items, kept, strict=True)
            if units
        )
        for lead in (0.0, lead_s):
            placement = in_segments(modules, kept, work_s, ranks, lead)
            if placement not in out:
                out.append(placement)
    return out


def _micro_batch_counts(samples: int) -> list[int]:
    """Numbers of micro-batches for 1F1B: from one to one for each sample."""
    return sorted({round(each) for each in np.geomspace(1, samples, MAX_COUNTS)})


def _micro_batches(
    batch: Sequence[int], count: int, belong: Links
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Samples in ``count`` micro-batches with what belongs to them: each unit's items and micro-batch."""
    of_sample = np.repeat(np.arange(count), spread(batch[belong.samples], count))
    items, where = [], []
    for i in range(len(batch)):
        found, sizes = np.unique(of_sample[belong.sample_of(i, batch)], return_counts=True)
        items.append(tuple(sizes.tolist()))
        where.append(tuple(found.tolist()))
    return items, where


def _contiguous_placements(
    modules: Sequence[Module], batch: Sequence[int], ranks: int, belong: Links
) -> list[Placement]:
    """Cut evenly, for one micro-batch and for many; and cut for the shortest 1F1B."""
    out: list[Placement] = []
    found: list[tuple[float, int, Placement]] = []
    left = MAX_RECUT
    for number, count in enumerate(_micro_batch_counts(batch[belong.samples])):
        items, where = _micro_batches(batch, count, belong)
        placement = contiguous(modules, _work_s(modules, items), ranks)
        if placement not in out:
            out.append(placement)
        grid = [np.zeros(count, np.int64) for _ in modules]
        for row, units, micro_batches in zip(grid, items, where, strict=True):
            row[list(micro_batches)] = units
        placement, seconds, left = recut(modules, placement, grid, ranks, left)
        found.append((seconds, number, placement))
    best = min(found)[2]
    even = [out[0], out[-1]] if len(out) > 1 else out
    return even if best in even else [*even, best]


def _prepare(
    modules: Sequence[Module],
    batch: Sequence[int],
    placement: Placement,
    ranks: int,
    memory: Memory,
    share: float,
    is_rule: bool,
    best_s: float,
    fully: bool,
    belong: Links,
    most_tasks: int,
) -> _Ready:
    ready = _Ready([], [], None)
    if placement.name == "contiguous":
        found: list[Tasks] = []
        for count in _micro_batch_counts(batch[belong.samples]):
            items, where = _micro_batches(batch, count, belong)
            if _count(placement, items) > most_tasks:
                continue
            tasks = make_tasks(modules, placement, items, ranks, memory, belong)
            usual = _fitted(tasks, one_f_one_b(tasks, where), ready)
            found.append(tasks)
            if usual is not None and (ready.one_f_one_b is None or usual.makespan_s < ready.one_f_one_b.makespan_s):
                ready.one_f_one_b, ready.micro_batches = usual, count
        if ready.one_f_one_b is not None:  # of all counts the best is enough to search
            found = [tasks for tasks in found if tasks.items == ready.one_f_one_b.tasks.items]
        for tasks in found:
            _add(ready, tasks, best_s)
        return ready
    sizes_seen: list[list[tuple[int, ...]]] = []
    for shrink in SHRINK:
        items = _units(modules, batch, _sizes(modules, share, shrink))
        if items in sizes_seen or _count(placement, items) > most_tasks:
            continue
        sizes_seen.append(items)
        tasks = make_tasks(modules, placement, items, ranks, memory, belong)
        _add(ready, tasks, best_s, fully)
        if shrink == 1 and is_rule:
            order = dispatched(tasks, sequence_of(tasks, natural_key(tasks)), _IN_TURN, limited=False).orders
            ready.in_segments = _fitted(tasks, order, ready)
    return ready


def _too_many(batch: Sequence[int], most_tasks: int) -> FieldError:
    return FieldError(
        f"batch: a step of {list(batch)} items has more than {most_tasks:,} tasks",
        path="batch",
        hint="give curves for larger sub-micro-batches, fewer ranks, fewer items, or fewer steps",
    )


def _count(placement: Placement, items: Sequence[Sequence[int]]) -> int:
    return 2 * sum(len(units) * len(row) for units, row in zip(items, placement.chunks, strict=True))


def _fitted(tasks: Tasks, orders: list[list[int]], ready: _Ready) -> Schedule | None:
    """An order with the knobs that it needs; None where none fit. Keeps the best and the leanest."""
    if np.isfinite(tasks.memory.limit_bytes):
        knobs = choose_knobs(tasks, orders)
        if knobs is None:
            ready.leanest = min(ready.leanest, leanest_bytes(tasks, orders))
            return None
        tasks = tasks.with_knobs(knobs)
    schedule = followed(tasks, orders)
    if ready.best is None or schedule.makespan_s < ready.best.makespan_s:
        ready.best = schedule
    return schedule


def _add(ready: _Ready, tasks: Tasks, best_s: float, fully: bool = True) -> None:
    """Take tasks among the variants, with the knobs under which they may fit; not those that cannot win."""
    ready.bounds_s.append(tasks.bound_s)
    if tasks.bound_s >= best_s or not fully:
        return
    natural = sequence_of(tasks, natural_key(tasks))
    orders = [
        dispatched(tasks, natural, rule, limited=False).orders
        for rule in (_IN_TURN, Rule(LONGEST_WAIT, BACKWARD_FIRST, True))
    ]
    if not np.isfinite(tasks.memory.limit_bytes):
        for order in orders:
            _fitted(tasks, order, ready)
        ready.variants.append(tasks)
        return
    seen: list[Knobs] = [_uniform(tasks, knob) for knob in tasks.memory.knobs]
    for order in [*orders, lean_orders(tasks)]:
        schedule = _fitted(tasks, order, ready)
        if schedule is not None and schedule.tasks.knobs not in seen:
            seen.append(schedule.tasks.knobs)
    ready.variants += [tasks.with_knobs(knobs) for knobs in seen]


def _uniform(tasks: Tasks, knob: Knob) -> Knobs:
    return tuple(tuple(knob for _ in row) for row in tasks.placement.chunks)


def _relaxed(schedule: Schedule) -> Schedule:
    """The same order with the knobs of least added time that it fits under, where that is shorter."""
    if not np.isfinite(schedule.tasks.memory.limit_bytes):
        return schedule
    orders = schedule.orders
    knobs = choose_knobs(schedule.tasks, orders)
    if knobs is None:
        return schedule
    other = followed(schedule.tasks.with_knobs(knobs), orders)
    return other if other.makespan_s < schedule.makespan_s else schedule


def _refuse(ready: Sequence[Sequence[_Ready]], memory: Memory) -> None:
    # A placement needs what its hungriest step needs; the leanest placement decides.
    least = min(max(one.leanest for one in row if one.best is None) for row in ready)
    raise InfeasibleError(
        f"memory_bytes: {memory.limit_bytes:.0f} bytes a rank hold no plan; "
        f"the leanest that was found needs {np.ceil(least):.0f}",
        path="memory_bytes",
        hint="raise memory_bytes, allow more knobs, or use more ranks",
    )
