"""Search for pool sizes: simulates candidates coarse to fine, then mixes of pools and tail splits, and chooses one.

StreamRL's allocation (section 5, algorithm 1) tries every division of the units on one site. On two sites it shrinks
the pool of the faster stage until both stages take equally long. Both cases are one search here: all pairs are
simulated, and the cheapest of those with the shortest step (or the lowest price) is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.rl.dispatch import AnyDispatcher, Dispatcher, Groups, MixDispatcher, TailSplit
from cdmpp.plan.rl.generation import Floats
from cdmpp.plan.rl.migration import inference_after
from cdmpp.plan.rl.problem import RlProblem
from cdmpp.plan.rl.sizes import MIXED, MOST_COUNTS, PoolSizes, SizingProblem, Stage, coarse_to_fine
from cdmpp.plan.rl.training import ReadyTimes, step_times
from cdmpp.predict.requests.budget import SearchControl

#: Number of generation sizes, best first, for which a tail split is tried.
SPLIT_TRIALS = 8
#: Sizes of a pool that are tried coarse to fine; of more, the search then goes on around the best.
COARSE_SIZES = 33
#: Share of the budget that is left when the search for sizes, for divisions and for splits ends.
SIZES_LEAVE, MIX_LEAVES, SPLITS_LEAVE = 0.5, 0.45, 0.35
#: Most combinations of units that are tried before the search goes on around the best.
MOST_COMBINATIONS = 256
#: Units of each pool that generates, in the order of the pools; 0: the pool is not used.
Units = tuple[int, ...]


@dataclass(frozen=True)
class SizeSearchResult:
    """Result of the search for sizes."""

    front: list[PoolSizes]  # the Pareto front of time and price
    tried: int  # number of generation sizes that were simulated
    complete: bool  # whether these are all sizes
    # The best shared and the best separate sizes whose generation units run inference. With a migration they may be
    # better than the front.
    inference_sizes: list[PoolSizes]
    one_pool: list[PoolSizes] = field(default_factory=list)  # the front without mixes and tail splits
    # The Pareto front of sizes that train on other units than those that generate.
    separate: list[PoolSizes] = field(default_factory=list)


def search_sizes(
    problem: RlProblem,
    dispatchers: dict[int, Dispatcher],
    control: SearchControl,
    listener: SearchControl,
    max_steps: int | None,
    make_answer: Callable[[SizeSearchResult], Any],
) -> SizeSearchResult:
    """Simulate generation sizes with all training sizes.

    ``dispatchers``: by index of the generation pool, on the search steps. ``control``: the search uses a part of its
    budget; the rest is for the following steps. ``listener``: receives the progress, with the answers of
    ``make_answer``. ``max_steps``: most generation sizes to simulate.
    """
    sizing = problem.sizing
    priced = any(pool.price_per_hour > 0 for pool in sizing.pools)
    front: list[PoolSizes] = []
    separate: list[PoolSizes] = []

    def keep(candidates: list[PoolSizes]) -> None:
        nonlocal front, separate
        front = pareto_front(front + candidates, priced)
        separate = pareto_front(separate + _separate(candidates), priced)

    queue = SizeQueue(problem, list(dispatchers))
    best: dict[tuple[int, int], float] = {}
    budget_s = control.left_s if control.left_s < np.inf else 0.0
    mixed = sizing.mixes and len(dispatchers) > 1
    sizes_control = control.part(reserve_s=budget_s * (1 - (1 - SIZES_LEAVE) / (2 if mixed else 1)))
    while (size := queue.next(best)) is not None:
        if best and (sizes_control.expired or (max_steps is not None and queue.tried >= max_steps)):
            break
        pool, units = size
        candidates = candidate_sizes(sizing, pool, dispatchers[pool], TailSplit(0, units))
        keep(candidates)
        queue.done(size)
        if candidates:
            best[size] = min(sizes.value(problem.objective) for sizes in candidates)
            limit = problem.most_step_s
            allowed = limit is None or any(sizes.step_s <= limit for sizes in front)
            answer = partial(make_answer, SizeSearchResult(front, queue.tried, False, [])) if allowed else None
            listener.report(done=queue.tried / queue.whole, best=min(best.values()), answer=answer)
    one_pool, complete = list(front), queue.complete and not (mixed and control.stopped)
    if mixed and not control.stopped:
        mixes, all_mixes = search_mixes(problem, dispatchers, control.part(reserve_s=budget_s * MIX_LEAVES))
        complete = complete and all_mixes
        front = pareto_front(front + mixes, priced)
    splits_control = control.part(reserve_s=budget_s * SPLITS_LEAVE)
    inference_sizes: dict[bool, PoolSizes] = {}  # by PoolSizes.shared
    for pool, units in sorted(best, key=lambda size: best[size])[:SPLIT_TRIALS]:
        if splits_control.expired:
            break
        dispatcher = dispatchers[pool]
        split = dispatcher.choose_split(units, lambda: splits_control.expired)
        candidates = candidate_sizes(sizing, pool, dispatcher, split)
        candidates += _between(problem, pool, dispatcher, split, candidates)
        keep(candidates)
        for sizes in candidates if sizing.trains else []:
            other = inference_sizes.get(sizes.shared, sizes)
            better = other is sizes or sizes.value(problem.objective) < other.value(problem.objective)
            if better and sizing.generation_inference_s(sizes) > 0:
                inference_sizes[sizes.shared] = sizes
    return SizeSearchResult(front, queue.tried, complete, list(inference_sizes.values()), one_pool, separate)


def shortest_step_s(problem: RlProblem, control: SearchControl) -> float:
    """The shortest step of pool sizes without tail splits, on the search steps.

    Raises InfeasibleError: no sizes have both stages.
    """
    engines = {i: pool.engine for i, pool in enumerate(problem.sizing.pools) if pool.engine is not None}
    dispatchers = problem.dispatchers(engines, held_out=False)
    queue = SizeQueue(problem, list(dispatchers))
    best: dict[tuple[int, int], float] = {}
    while (size := queue.next(best)) is not None and not (best and control.expired):
        pool, units = size
        queue.done(size)
        candidates = candidate_sizes(problem.sizing, pool, dispatchers[pool], TailSplit(0, units))
        if candidates:
            best[size] = min(sizes.step_s for sizes in candidates)
    if not best:
        raise InfeasibleError("no pool has enough units for both stages", path="pools", hint="give more units")
    return min(best.values())


def _separate(candidates: list[PoolSizes]) -> list[PoolSizes]:
    """Sizes that train on other units than those that generate."""
    return [sizes for sizes in candidates if sizes.training is not None and not sizes.shared]


def _between(
    problem: RlProblem, pool: int, dispatcher: Dispatcher, split: TailSplit, candidates: list[PoolSizes]
) -> list[PoolSizes]:
    """Sizes around the best candidate that a grid of training units leaves out; none if it leaves out none."""
    separate = _separate(candidates)
    if problem.sizing.training_units is not None or not separate:
        return []
    best = min(separate, key=lambda sizes: sizes.value(problem.objective))
    assert best.training is not None
    if problem.sizing.pools[best.training].units <= MOST_COUNTS:
        return []
    return candidate_sizes(problem.sizing, pool, dispatcher, split, near=best)


class SizeQueue:
    """Pairs of pool and units to try, coarse to fine; the pools alternate, so that an early end covers all of them.

    Of a pool with many units, :data:`COARSE_SIZES` are tried, then the middles between the best size and its tried
    neighbours until there are none, then the others.
    """

    def __init__(self, problem: RlProblem, pools: list[int]) -> None:
        sizing = problem.sizing
        orders = {pool: sizing.generation_sizes(pool) for pool in pools}
        if not sizing.trains and problem.objective == "time" and problem.slack == 0:
            # No other stage needs the units, and more instances are not slower.
            orders = {pool: order[:1] for pool, order in orders.items()}
        self._placements = {pool: sizing.pools[pool].placement for pool in pools}
        longest = max(map(len, orders.values()))
        ranks = range(longest)
        self._queue = [(pool, order[rank]) for rank in ranks for pool, order in orders.items() if rank < len(order)]
        self.whole = len(self._queue)
        self._coarse = COARSE_SIZES * len(pools) if self.whole > MOST_COUNTS else self.whole
        self._at = 0
        self._tried: dict[tuple[int, int], None] = {}

    @property
    def tried(self) -> int:
        """Number of sizes tried."""
        return len(self._tried)

    @property
    def complete(self) -> bool:
        """Whether all sizes were tried."""
        return self.tried == self.whole

    def done(self, size: tuple[int, int]) -> None:
        """Count a size as tried."""
        self._tried[size] = None

    def next(self, best: dict[tuple[int, int], float]) -> tuple[int, int] | None:
        """The next size, or None; ``best``: best value of each size that was tried and has candidates."""
        if self.tried >= self._coarse and best:
            pool, units = min(best, key=lambda size: best[size])
            others = [other for index, other in self._tried if index == pool]
            below = max((other for other in others if other < units), default=units)
            above = min((other for other in others if other > units), default=units)
            placement = self._placements[pool]
            for neighbour in (below, above):
                middle = (pool, (units + neighbour) // 2 // placement * placement)
                if abs(units - neighbour) > placement and middle not in self._tried:
                    return middle
        while self._at < len(self._queue) and self._queue[self._at] in self._tried:
            self._at += 1
        return self._queue[self._at] if self._at < len(self._queue) else None


def choose_sizes(problem: RlProblem, front: list[PoolSizes]) -> PoolSizes:
    """The best sizes of a Pareto front.

    Raises FieldError: the front is empty.
    Raises InfeasibleError: every step is longer than ``most_step_s``.
    """
    if not front:
        raise FieldError(
            "no pool has enough units for both stages",
            path="pools",
            hint="generation and training need at least one unit each; give more units, or smaller fixed sizes",
        )
    shortest = min(sizes.step_s for sizes in front)
    limit = problem.most_step_s
    if limit is not None and shortest > limit:
        raise InfeasibleError(
            f"no sizes give a step of at most {limit:g} s; the shortest takes {shortest:.6g} s on average",
            path="most_step_s",
            hint="raise the limit, or give more units",
        )
    allowed = [sizes for sizes in front if limit is None or sizes.step_s <= limit]
    if problem.objective == "cost":
        return min(allowed, key=lambda sizes: (sizes.price, sizes.step_s))
    near = [sizes for sizes in allowed if sizes.step_s <= shortest * (1 + problem.slack)]
    return min(near, key=lambda sizes: (sizes.price, sizes.units, sizes.step_s))


def pareto_front(candidates: Iterable[PoolSizes], priced: bool) -> list[PoolSizes]:
    """Candidates that no other beats in both step time and price (in units if ``priced`` is false), fastest first."""

    def key(sizes: PoolSizes) -> tuple[float, float]:
        return sizes.step_s, sizes.price if priced else float(sizes.units)

    front: list[PoolSizes] = []
    for sizes in sorted(candidates, key=key):
        if not front or key(sizes)[1] < key(front[-1])[1]:
            front.append(sizes)
    return front


def candidate_sizes(
    problem: SizingProblem,
    pool: int,
    dispatcher: AnyDispatcher,
    split: Groups,
    ready_s: Floats | None = None,
    only: PoolSizes | None = None,
    near: PoolSizes | None = None,
) -> list[PoolSizes]:
    """Steps of one generation stage with every training stage beside it, or after it on the same units.

    ``ready_s`` (draws, samples): when each sample is ready, with inference on the generation units; default: inference
    starts after generation. ``only``: the only sizes to evaluate. ``near``: evaluate all numbers of training units
    around these, which a grid of many units leaves out.
    """
    stage = problem.stage(pool, split)
    finish = dispatcher.finish_times(split) if ready_s is None else ready_s
    inferred = inference_after(finish, stage.inference_s, stage.instances) if ready_s is None else ready_s
    if not problem.trains:
        seconds = float(inferred.max(1).mean())
        price = seconds * float(problem.prices_per_s(stage, None, 0))
        return [PoolSizes(pool, stage.instances, None, 0, split, 1, seconds, price)]
    candidates = []
    if pool != MIXED and near is None and (only is None or only.shared):
        candidates = _shared(problem, pool, dispatcher, split, inferred)
    if problem.layout == "shared" or (only is not None and only.shared):
        return candidates
    ready_times: list[tuple[Stage, Floats]] = [("generation", inferred)]
    if any(other.inference_s for other in problem.pools):
        ready_times.append(("training", finish))
    for inference_by, times in ready_times:
        if only is not None and inference_by != only.inference_by:
            continue
        ready = ReadyTimes.of(times, dispatcher.steps.lengths, dispatcher.prompt_tokens)
        for training in range(len(problem.pools)):
            if near is not None and (training, inference_by) != (near.training, near.inference_by):
                continue
            if only is not None:
                counts = np.array([only.training_units] if only.training == training else [], dtype=np.int64)
            else:
                counts = problem.training_sizes(stage, training, None if near is None else near.training_units)
            cost = problem.training_cost(training, inference_by)
            if cost is None or not len(counts):
                continue
            weights_s = problem.weights_s(stage, training)
            steps, batches = step_times(ready, cost, counts, problem.mode, weights_s, problem.staleness)
            means = steps.mean(0)
            prices = means * problem.prices_per_s(stage, training, counts)
            rows = zip(*(column.tolist() for column in (counts, batches, means, prices)), strict=True)
            candidates += [
                PoolSizes(pool, stage.instances, training, count, split, cut, mean, price, False, inference_by)
                for count, cut, mean, price in rows
            ]
    return candidates


def _shared(
    problem: SizingProblem, pool: int, dispatcher: AnyDispatcher, split: Groups, ready_s: Floats
) -> list[PoolSizes]:
    units, cost, fixed = split.instances, problem.pools[pool].training, problem.training_units
    if problem.layout == "separate" or cost is None or (fixed is not None and fixed != units):
        return []
    if not cost.can_train(np.array(units)):
        return []
    whole = cost.whole_s(dispatcher.samples, dispatcher.tokens, float(units))
    seconds = float((ready_s.max(1) + whole).mean()) + problem.shared_s + cost.swap_s(units)
    price = seconds * float(problem.prices_per_s(problem.stage(pool, split), None, 0))
    return [PoolSizes(pool, units, pool, units, split, 1, seconds, price, shared=True)]


def search_mixes(
    problem: RlProblem, dispatchers: dict[int, Dispatcher], control: SearchControl
) -> tuple[list[PoolSizes], bool]:
    """Pareto front of the mixes, and whether all combinations of units were tried.

    If all combinations of units are few (:data:`MOST_COMBINATIONS`), all are tried. Otherwise some numbers of each
    pool are combined, and the best combination is varied in halving steps.

    ``dispatchers``: by index of the generation pool, on the search steps. The first combination, all units, is tried in
    any case.
    """
    sizing = problem.sizing
    pools = list(dispatchers)
    max_units = tuple(sizing.pools[pool].units for pool in pools)
    mixed = MixDispatcher(dispatchers)
    priced = any(pool.price_per_hour > 0 for pool in sizing.pools)
    front: list[PoolSizes] = []
    values: dict[Units, float] = {}

    def value(units: Units) -> float:
        nonlocal front
        if units not in values:
            used = [(pool, count) for pool, count in zip(pools, units, strict=True) if count]
            mix = mixed.divide([pool for pool, _ in used], [count for _, count in used], lambda: control.expired)
            candidates = candidate_sizes(sizing, MIXED, mixed, mix)
            candidates = [sizes for sizes in candidates if not sizing.trains or sizes.training is not None]
            front = pareto_front(front + candidates, priced)
            values[units] = min((sizes.value(problem.objective) for sizes in candidates), default=float("inf"))
        return values[units]

    for units in _combinations(problem, max_units):
        if values and control.expired:
            return front, False
        value(units)
    if not values or _all_fit(max_units) or sizing.generation_units is not None:
        return front, _all_fit(max_units)
    best = min(values, key=lambda units: values[units])
    step = max(max_units) // 4
    while step:
        before = best
        for index, sign in product(range(len(pools)), (-1, 1)):
            count = min(max(best[index] + sign * step, 0), max_units[index])
            units = (*best[:index], count, *best[index + 1 :])
            if not _allowed(problem, units) or units in values:
                continue
            if control.expired:
                return front, False
            if value(units) < values[best]:
                best = units
        if best == before:
            step //= 2
    return front, False


def _all_fit(max_units: Units) -> bool:
    return prod(count + 1 for count in max_units) <= MOST_COMBINATIONS


def _allowed(problem: RlProblem, units: Units) -> bool:
    """Whether at least two pools generate, with the fixed number of units if there is one."""
    fixed = problem.sizing.generation_units
    return sum(count > 0 for count in units) >= 2 and (fixed is None or sum(units) == fixed)


def _combinations(problem: RlProblem, max_units: Units) -> Iterator[Units]:
    """Combinations of units: all units first, then coarse to fine."""
    for_time_alone = not problem.sizing.trains and problem.objective == "time" and problem.slack == 0
    if for_time_alone and _allowed(problem, max_units):
        # No other stage needs the units, and more instances are not slower.
        yield max_units
        return
    orders = [[*coarse_to_fine(count), 0] for count in max_units]
    if not _all_fit(max_units):
        levels = max(int(MOST_COMBINATIONS ** (1 / len(max_units))), 2)
        orders = [[count, 0, *order[1 : levels - 1]] for count, order in zip(max_units, orders, strict=True)]
    fixed = problem.sizing.generation_units
    if fixed is not None:
        # The last pool has what is left.
        orders[-1] = [-1]
    for ranks in sorted(product(*map(range, map(len, orders))), key=lambda ranks: (max(ranks), sum(ranks))):
        units = tuple(order[rank] for order, rank in zip(orders, ranks, strict=True))
        if fixed is not None:
            units = (*units[:-1], fixed - sum(units[:-1]))
        if _allowed(problem, units) and 0 <= units[-1] <= max_units[-1]:
            yield units
