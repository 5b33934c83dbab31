"""Search for pool sizes: simulates candidates coarse to fine, then splits the best, and chooses one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.rl.candidates import candidate_sizes, pareto_front
from cdmpp.plan.rl.dispatch import Dispatcher, TailSplit
from cdmpp.plan.rl.mix_search import search_mixes
from cdmpp.plan.rl.problem import RlProblem
from cdmpp.plan.rl.sizes import MOST_COUNTS, PoolSizes
from cdmpp.predict.requests.budget import SearchControl

#: Number of generation sizes, best first, for which a tail split is tried.
SPLIT_TRIALS = 8
#: Sizes of a pool that are tried coarse to fine; of more, the search then goes on around the best.
COARSE_SIZES = 33
#: Share of the budget that is left when the search for sizes, for divisions and for splits ends.
SIZES_LEAVE, MIX_LEAVES, SPLITS_LEAVE = 0.5, 0.45, 0.35


@dataclass(frozen=True)
class SizeSearchResult:
    """Result of the search for sizes.

    Attributes
    ----------
    front : list of PoolSizes
        The Pareto front of time and price.
    tried : int
        Number of generation sizes that were simulated.
    complete : bool
        Whether these are all sizes.
    inference_sizes : list of PoolSizes
        The best shared and the best separate sizes whose generation units run inference. With a migration they
        may be better than the front.
    one_pool : list of PoolSizes
        The front without mixes and tail splits.
    """

    front: list[PoolSizes]
    tried: int
    complete: bool
    inference_sizes: list[PoolSizes]
    one_pool: list[PoolSizes] = field(default_factory=list)


def search_sizes(
    problem: RlProblem,
    dispatchers: dict[int, Dispatcher],
    control: SearchControl,
    listener: SearchControl,
    max_steps: int | None,
    make_answer: Callable[[SizeSearchResult], Any],
) -> SizeSearchResult:
    """Simulate generation sizes with all training sizes.

    Parameters
    ----------
    problem : RlProblem
    dispatchers : dict of int to Dispatcher
        By index of the generation pool, on the search steps.
    control : SearchControl
        The search uses a part of its budget; the rest is for the following steps.
    listener : SearchControl
        Receives the progress.
    max_steps : int or None
        Most generation sizes to simulate.
    make_answer : callable
        Makes the answer of an intermediate result, for progress listeners.
    """
    sizing = problem.sizing
    priced = any(pool.price_per_hour > 0 for pool in sizing.pools)
    front: list[PoolSizes] = []
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
        front = pareto_front(front + candidates, priced)
        queue.done(size)
        if candidates:
            best[size] = min(sizes.value(problem.objective) for sizes in candidates)
            so_far = SizeSearchResult(front, queue.tried, False, [])
            limit = problem.most_step_s
            allowed = limit is None or any(sizes.step_s <= limit for sizes in front)
            listener.report(
                done=queue.tried / queue.whole,
                best=min(best.values()),
                answer=partial(make_answer, so_far) if allowed else None,
            )
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
        front = pareto_front(front + candidates, priced)
        for sizes in candidates if sizing.trains else []:
            if sizing.generation_inference_s(sizes) == 0:
                continue
            other = inference_sizes.get(sizes.shared)
            if other is None or sizes.value(problem.objective) < other.value(problem.objective):
                inference_sizes[sizes.shared] = sizes
    return SizeSearchResult(front, queue.tried, complete, list(inference_sizes.values()), one_pool)


def _between(
    problem: RlProblem, pool: int, dispatcher: Dispatcher, split: TailSplit, candidates: list[PoolSizes]
) -> list[PoolSizes]:
    """Sizes around the best candidate that a grid of training units leaves out; none if it leaves out none."""
    separate = [sizes for sizes in candidates if sizes.training is not None and not sizes.shared]
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
        longest = max(map(len, orders.values()))
        self._queue = [
            (pool, order[rank]) for rank in range(longest) for pool, order in orders.items() if rank < len(order)
        ]
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
        """The next size; None if all were tried.

        ``best``: best value of each size that was tried and has candidates.
        """
        if self.tried >= self._coarse and best:
            pool, units = min(best, key=lambda size: best[size])
            others = [other for index, other in self._tried if index == pool]
            for neighbour in (
                max((other for other in others if other < units), default=units),
                min((other for other in others if other > units), default=units),
            ):
                middle = (pool, (units + neighbour) // 2)
                if abs(units - neighbour) > 1 and middle not in self._tried:
                    return middle
        while self._at < len(self._queue) and self._queue[self._at] in self._tried:
            self._at += 1
        return self._queue[self._at] if self._at < len(self._queue) else None


def choose_sizes(problem: RlProblem, front: list[PoolSizes]) -> PoolSizes:
    """The best sizes of a Pareto front.

    Raises
    ------
    FieldError
        The front is empty.
    InfeasibleError
        Every step is longer than ``most_step_s``.
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
