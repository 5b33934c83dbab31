"""Search for a whole plan: sizes, split, streaming and migration, chosen on search steps, judged on held-out ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.errors import InfeasibleError
from cdmpp.planning.rl.bounds import lower_bounds
from cdmpp.planning.rl.dispatch import Dispatcher, TailSplit
from cdmpp.planning.rl.elastic import elastic_table
from cdmpp.planning.rl.engine import Floats
from cdmpp.planning.rl.evaluate import StepOutcome, colocated, evaluate, evaluate_finish
from cdmpp.planning.rl.lengths import SampledSteps
from cdmpp.planning.rl.migration import Migration, best_migration, simulate_migration
from cdmpp.planning.rl.plan_schema import ElasticPart
from cdmpp.planning.rl.problem import RlProblem
from cdmpp.planning.rl.size_search import SizeSearchResult, choose_sizes, search_sizes
from cdmpp.planning.rl.sizes import PoolSizes, SizingProblem, candidate_sizes

#: Number of search steps on which a migration is chosen.
MIGRATION_DRAWS = 8


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan, its baselines and its bounds, all on held-out steps.

    Attributes
    ----------
    sizes : PoolSizes
        ``step_s`` and ``price`` are means over the held-out steps.
    outcome : StepOutcome
    migration : Migration or None
    migration_applied : bool
        Whether ``outcome`` includes the migration.
    lpt : StepOutcome
        Baseline: longest first, without split and migration.
    random, quantile_rule, guessed : StepOutcome
        Baselines: random order, StreamRL's split by quantiles, and splits that trust guesses of lengths.
    unstreamed : StepOutcome
        Baseline: training after generation, in one batch.
    unmigrated : StepOutcome
        Baseline: the plan without migration.
    colocated : (float, float) or None
        Baseline: seconds and price if all units of one pool generate and then train.
    best_split : TailSplit
        The best split into two groups, used or not.
    longest_alone_s : float
        Decoding of the longest sample alone.
    bound_s, bound_price : float
        Lower bounds of the step over all sizes.
    generation_bound_s : float
        Lower bound of generation with these units.
    front : list of PoolSizes
        The Pareto front of time and price.
    elastic : list of ElasticPart
        Empty without separate training.
    sizes_tried : int
        Number of generation sizes that were simulated.
    complete : bool
        Whether these are all sizes.
    left_out : dict of str to str
        Name of each pool whose memory is too small, and the reason.
    steps : SampledSteps
        The held-out steps.
    """

    sizes: PoolSizes
    outcome: StepOutcome
    migration: Migration | None
    migration_applied: bool
    lpt: StepOutcome
    random: StepOutcome
    quantile_rule: StepOutcome
    guessed: StepOutcome
    unstreamed: StepOutcome
    unmigrated: StepOutcome
    colocated: tuple[float, float] | None
    best_split: TailSplit
    longest_alone_s: float
    bound_s: float
    bound_price: float
    generation_bound_s: float
    front: list[PoolSizes]
    elastic: list[ElasticPart]
    sizes_tried: int
    complete: bool
    left_out: dict[str, str]
    steps: SampledSteps


def search(
    problem: RlProblem,
    control: SearchControl | None = None,
    max_steps: int | None = None,
    make_answer: Callable[[SearchResult], Any] | None = None,
) -> SearchResult:
    """Plan a step.

    Parameters
    ----------
    problem : RlProblem
    control : SearchControl, optional
        Ends the search for sizes early.
    max_steps : int, optional
        Most generation sizes to simulate.
    make_answer : callable, optional
        Makes the answer of an intermediate result, for progress listeners.

    Raises
    ------
    FieldError
        Fixed sizes fit no pool.
    InfeasibleError
        The longest sample fits into no memory, or every step is longer than the limit.
    """
    control = control or SearchControl()
    left_out = pools_without_memory(problem)
    engines = {
        index: pool.engine
        for index, pool in enumerate(problem.sizing.pools)
        if pool.engine is not None and pool.name not in left_out
    }
    steps, held_out_steps = problem.steps(held_out=False), problem.steps(held_out=True)
    dispatchers = {index: problem.dispatcher(engine, steps, False) for index, engine in engines.items()}
    held_out = {index: problem.dispatcher(engine, held_out_steps, True) for index, engine in engines.items()}

    def answer(result: SizeSearchResult) -> Any:
        stopped = SearchControl()
        stopped.stop()
        plan = _complete(problem, dispatchers, held_out, left_out, result, stopped)
        return None if make_answer is None else make_answer(plan)

    result = search_sizes(problem, dispatchers, control, max_steps, answer)
    return _complete(problem, dispatchers, held_out, left_out, result, control)


def pools_without_memory(problem: RlProblem) -> dict[str, str]:
    """Generation pools whose memory does not hold the longest sample: name to reason.

    Raises
    ------
    InfeasibleError
        No pool remains.
    """
    pools = [pool for pool in problem.sizing.pools if pool.engine is not None]
    reasons: dict[str, str] = {}
    for pool in pools:
        try:
            pool.generation_engine().check(problem.lengths.longest)
        except InfeasibleError as error:
            reasons[pool.name] = error.message
            if len(reasons) == len(pools):
                raise
    return reasons


def _complete(
    problem: RlProblem,
    dispatchers: dict[int, Dispatcher],
    held_out: dict[int, Dispatcher],
    left_out: dict[str, str],
    result: SizeSearchResult,
    control: SearchControl,
) -> SearchResult:
    """Choose sizes and migration, and evaluate them with all baselines on the held-out steps."""
    sizing = problem.sizing
    short_dispatchers = {
        index: Dispatcher(dispatcher.engine, dispatcher.steps.first(MIGRATION_DRAWS))
        for index, dispatcher in dispatchers.items()
    }
    sizes, migration = _sizes_with_migration(problem, short_dispatchers, result, control)
    units = sizes.generation_units
    dispatcher, short_dispatcher = dispatchers[sizes.generation], short_dispatchers[sizes.generation]
    judge = held_out[sizes.generation]
    best_split = sizes.split
    if not best_split.tail and units > 1 and dispatcher.samples > 1:
        best_split = dispatcher.best_split(units)
    unsplit = _resimulated(sizing, sizes, dispatcher, TailSplit(0, units))
    lpt, outcome = evaluate(sizing, unsplit, judge), evaluate(sizing, sizes, judge)
    if sizes.split.tail and outcome.step_s.mean() > lpt.step_s.mean():
        # The split gains on the search steps and loses on the held-out steps.
        sizes, outcome = unsplit, lpt
        migration = _best_migration(problem, short_dispatcher, sizes, control)
    unmigrated, applied = outcome, False
    inference_s, split = sizing.generation_inference_s(sizes), sizes.split
    if migration is not None:
        ready_s = migration.ready_s
        migration = simulate_migration(
            judge, split, migration.threshold, migration.remaining, problem.link, inference_s
        )
        migrated_sizes = _resimulated(sizing, sizes, short_dispatcher, split, ready_s)
        migrated = evaluate(sizing, migrated_sizes, judge, migration)
        if inference_s > 0 and migrated.step_s.mean() < outcome.step_s.mean():
            sizes, outcome, applied = migrated_sizes, migrated, True
        elif inference_s > 0:
            migration = None
    elastic: list[ElasticPart] = []
    if sizes.training is not None and not sizes.shared:
        pool = replace(sizing.pools[sizes.generation], inference_s=inference_s)
        free_units = pool.units - (sizes.units if sizes.training == sizes.generation else units)
        elastic = elastic_table(pool, best_split, sizing.cost_of(sizes), sizes.training_units, judge.steps, free_units)
    bound_s, bound_price = lower_bounds(sizing, held_out)
    step_s = float(outcome.step_s.mean())
    return SearchResult(
        sizes=replace(sizes, step_s=step_s, price=step_s * sizing.price_per_s(sizes)),
        outcome=outcome,
        migration=migration,
        migration_applied=applied,
        lpt=lpt,
        random=evaluate_finish(sizing, sizes, judge, judge.random_finish_times(units)),
        quantile_rule=evaluate_finish(sizing, sizes, judge, judge.finish_times(judge.quantile_rule_split(units))),
        guessed=evaluate_finish(sizing, sizes, judge, judge.guessed_finish_times(units)),
        unstreamed=evaluate(sizing, replace(sizes, batches=1), judge),
        unmigrated=unmigrated,
        colocated=colocated(sizing, problem.objective, held_out),
        best_split=best_split,
        longest_alone_s=float(judge.longest_alone_s().mean()),
        bound_s=bound_s,
        bound_price=bound_price,
        generation_bound_s=float(judge.lower_bound_s(units).mean()),
        front=result.front,
        elastic=elastic,
        sizes_tried=result.tried,
        complete=result.complete,
        left_out=left_out,
        steps=judge.steps,
    )


def _sizes_with_migration(
    problem: RlProblem, dispatchers: dict[int, Dispatcher], result: SizeSearchResult, control: SearchControl
) -> tuple[PoolSizes, Migration | None]:
    """The best sizes with their migration: inference beside the tail may make sizes better than the front."""
    sizes = choose_sizes(problem, result.front)
    migration = _best_migration(problem, dispatchers[sizes.generation], sizes, control)

    def value(sizes: PoolSizes, migration: Migration | None) -> float:
        dispatcher = dispatchers[sizes.generation]
        if migration is None or problem.sizing.generation_inference_s(sizes) == 0:
            return _resimulated(problem.sizing, sizes, dispatcher, sizes.split).value(problem.objective)
        migrated = _resimulated(problem.sizing, sizes, dispatcher, sizes.split, migration.ready_s)
        if problem.most_step_s is not None and migrated.step_s > problem.most_step_s:
            return np.inf
        return migrated.value(problem.objective)

    best = value(sizes, migration)
    for other in result.inference_sizes:
        if control.expired or other is sizes:
            continue
        other_migration = _best_migration(problem, dispatchers[other.generation], other, control)
        if other_migration is not None and value(other, other_migration) < best:
            sizes, migration, best = other, other_migration, value(other, other_migration)
    return sizes, migration


def _best_migration(
    problem: RlProblem, dispatcher: Dispatcher, sizes: PoolSizes, control: SearchControl
) -> Migration | None:
    def step_of(ready_s: Floats) -> float:
        return _resimulated(problem.sizing, sizes, dispatcher, sizes.split, ready_s).step_s

    inference_s = problem.sizing.generation_inference_s(sizes)
    return best_migration(dispatcher, sizes.split, problem.link, inference_s, control, step_of)


def _resimulated(
    sizing: SizingProblem, sizes: PoolSizes, dispatcher: Dispatcher, split: TailSplit, ready_s: Floats | None = None
) -> PoolSizes:
    """The same sizes with another split or other ready times; the number of batches is chosen again."""
    (resimulated,) = candidate_sizes(sizing, sizes.generation, dispatcher, split, ready_s, sizes)
    return resimulated
