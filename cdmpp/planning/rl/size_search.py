"""Search for pool sizes: simulates candidates coarse to fine, then splits the best, and chooses one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cdmpp.compose.budget import SearchControl
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.planning.rl.dispatch import Dispatcher, TailSplit
from cdmpp.planning.rl.problem import RlProblem
from cdmpp.planning.rl.sizes import PoolSizes, candidate_sizes, pareto_front

#: Number of generation sizes, best first, for which a tail split is tried.
SPLIT_TRIALS = 8
#: Sizes that are tried for any budget: compilation at the first call may take longer than these.
LEAST_SIZES = 4


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
    """

    front: list[PoolSizes]
    tried: int
    complete: bool
    inference_sizes: list[PoolSizes]


def search_sizes(
    problem: RlProblem,
    dispatchers: dict[int, Dispatcher],
    control: SearchControl,
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
        The search uses half of its budget: the steps that follow are worth as much as more sizes.
    max_steps : int or None
        Most generation sizes to simulate.
    make_answer : callable
        Makes the answer of an intermediate result, for progress listeners.
    """
    sizing = problem.sizing
    priced = any(pool.price_per_hour > 0 for pool in sizing.pools)
    front: list[PoolSizes] = []
    queue = _generation_sizes(problem, list(dispatchers))
    best: dict[tuple[int, int], float] = {}
    tried, budget_s = 0, control.left_s
    for pool, units in queue:
        if tried == 1:
            # The first size may have included compilation.
            budget_s = control.left_s
        half_spent = control.left_s <= budget_s / 2 and control.budget_s is not None
        enough = tried >= LEAST_SIZES and (half_spent or control.expired)
        if best and (enough or (max_steps is not None and tried >= max_steps)):
            break
        candidates = candidate_sizes(sizing, pool, dispatchers[pool], TailSplit(0, units))
        front = pareto_front(front + candidates, priced)
        tried += 1
        if candidates:
            best[pool, units] = min(sizes.value(problem.objective) for sizes in candidates)
            so_far = SizeSearchResult(front, tried, False, [])
            limit = problem.most_step_s
            allowed = limit is None or any(sizes.step_s <= limit for sizes in front)
            control.report(
                done=tried / len(queue),
                best=min(best.values()),
                answer=partial(make_answer, so_far) if allowed else None,
            )
    inference_sizes: dict[bool, PoolSizes] = {}  # by PoolSizes.shared
    for trial, (pool, units) in enumerate(sorted(best, key=lambda size: best[size])[:SPLIT_TRIALS]):
        if trial and control.expired:
            break
        dispatcher = dispatchers[pool]
        candidates = candidate_sizes(sizing, pool, dispatcher, dispatcher.choose_split(units))
        front = pareto_front(front + candidates, priced)
        for sizes in candidates if sizing.trains else []:
            if sizing.generation_inference_s(sizes) == 0:
                continue
            other = inference_sizes.get(sizes.shared)
            if other is None or sizes.value(problem.objective) < other.value(problem.objective):
                inference_sizes[sizes.shared] = sizes
    return SizeSearchResult(front, tried, tried == len(queue), list(inference_sizes.values()))


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


def _generation_sizes(problem: RlProblem, pools: list[int]) -> list[tuple[int, int]]:
    """Pairs of pool and units, coarse to fine; the pools alternate, so that an early end covers all of them."""
    sizing = problem.sizing
    orders = {pool: sizing.generation_sizes(pool) for pool in pools}
    if not sizing.trains and problem.objective == "time" and problem.slack == 0:
        # No other stage needs the units, and more instances are not slower.
        orders = {pool: order[:1] for pool, order in orders.items()}
    longest = max(map(len, orders.values()))
    return [(pool, order[rank]) for rank in range(longest) for pool, order in orders.items() if rank < len(order)]
