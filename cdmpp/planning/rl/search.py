"""The whole plan: sizes, split, streaming and migration, chosen on drawn steps and judged on others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.planning.rl.bounds import lower_bounds
from cdmpp.planning.rl.dispatch import Dispatcher, Split
from cdmpp.planning.rl.elastic import Trigger, triggers
from cdmpp.planning.rl.evaluate import Outcome, colocated, evaluate, evaluate_ends, inference_of, trainer_of
from cdmpp.planning.rl.generation import Engine, Floats
from cdmpp.planning.rl.lengths import Drawn, Lengths, Ranker, draw_steps
from cdmpp.planning.rl.migration import Link, Migration, best_migration, migrated
from cdmpp.planning.rl.sizes import Front, Objective, Sizes, Terms, steps_of, with_step

#: Sizes for which a tail split is tried: the best without one.
WITH_SPLIT = 8
#: Steps that a migration is chosen on.
FEW = 8
#: Sizes that are tried whatever the budget: compiling, where that is yet to be done, takes longer than these.
LEAST_SIZES = 4
#: Samples move for nothing.
NO_LINK = Link(0.0, 1.0)


@dataclass(frozen=True)
class Problem:
    """A step of reinforcement learning to plan.

    Attributes
    ----------
    lengths : Lengths
    ranker : Ranker
    samples : int
        Of a step.
    terms : Terms
    link : Link
    objective : {"time", "cost"}
    slack : float
        Share by which a step may be longer than the shortest where that is cheaper.
    most_step_s : float or None
        A step must not take longer on average.
    draws : int
        Steps to choose on, and as many others to judge on.
    seed : int
    doubt : float
        Chance that a ranker whose misses are "near" misses any of the longest instead.
    """

    lengths: Lengths
    ranker: Ranker
    samples: int
    terms: Terms
    link: Link = NO_LINK
    objective: Objective = "time"
    slack: float = 0.0
    most_step_s: float | None = None
    draws: int = 16
    seed: int = 0
    doubt: float = 0.0

    def dispatcher(self, engine: Engine, drawn: Drawn, which: int) -> Dispatcher:
        """Of an engine on drawn steps, with what is feared of the ranker beside them."""
        if self.ranker.misses == "any":
            return Dispatcher(engine, drawn)
        return Dispatcher(engine, drawn, self.drawn(which, rough=True), self.doubt)

    def drawn(self, which: int, rough: bool = False) -> Drawn:
        """Steps: 0 to choose on, 1 to judge on; ``rough``: ranked by one that misses any of the longest."""
        seed = np.random.SeedSequence(self.seed).spawn(4)[which + 2 * rough]
        ranker = replace(self.ranker, misses="any") if rough else self.ranker
        return draw_steps(self.lengths, ranker, self.samples, self.draws, seed)


@dataclass(frozen=True)
class Plan:
    """What was chosen, and how it does on steps that it was not chosen on.

    Attributes
    ----------
    sizes : Sizes
        ``step_s`` and ``price`` are means over the judged steps.
    outcome : Outcome
    migration : Migration or None
        On the judged steps; ``applied`` says whether the step counts on it.
    applied : bool
    plain : Outcome
        The same sizes without a split or migration.
    random, rule, guesses : Outcome
        The same with samples taken in any order, with StreamRL's rule by quantiles, and with splits that
        trust guesses of lengths.
    serial : Outcome
        The same without streaming: training after generation.
    colocated : (float, float) or None
        Seconds and price if all units of one pool generate and then train, at best.
    without : Outcome
        The plan without migration.
    candidate : Split
        The best split into two groups, whether the plan has it or not.
    floor_s, bound_s, bound_price : float
        The longest sample alone; lower bounds of step and price over all sizes.
    stage_bound_s : float
        Lower bound of generation with these units.
    front : list of Sizes
        Best by time and price.
    table : list of Trigger
        Empty where nothing is trained.
    tried, complete : int, bool
        Generation sizes simulated, and whether that is all of them.
    left_out : dict of str to str
        Pools that cannot generate, and why.
    drawn : Drawn
        The judged steps.
    """

    sizes: Sizes
    outcome: Outcome
    migration: Migration | None
    applied: bool
    plain: Outcome
    random: Outcome
    rule: Outcome
    guesses: Outcome
    serial: Outcome
    colocated: tuple[float, float] | None
    without: Outcome
    candidate: Split
    floor_s: float
    bound_s: float
    bound_price: float
    stage_bound_s: float
    front: list[Sizes]
    table: list[Trigger]
    tried: int
    complete: bool
    left_out: dict[str, str]
    drawn: Drawn


@dataclass(frozen=True)
class Found:
    """Sizes as far as they were searched.

    Attributes
    ----------
    front : list of Sizes
        The best by time and price.
    tried, complete : int, bool
        How many sizes of generation were simulated, and if that is all.
    others : list of Sizes
        The best of those whose generation units run inference, shared and separate: a migration may make
        them better than the front.
    """

    front: list[Sizes]
    tried: int
    complete: bool
    others: list[Sizes]


def search(
    problem: Problem,
    watch: SearchControl | None = None,
    max_steps: int | None = None,
    written: Callable[[Plan], dict[str, Any]] | None = None,
) -> Plan:
    """Plan a step.

    Parameters
    ----------
    problem : Problem
    watch : SearchControl, optional
        Ends the search for sizes early.
    max_steps : int, optional
        Generation sizes to simulate at most.
    written : callable, optional
        Makes the answer of a plan, for those who ask on the way.

    Raises
    ------
    FieldError
        No pool generates, or given sizes fit none.
    InfeasibleError
        No memory holds the longest sample, or no step is as short as asked.
    """
    watch = watch or SearchControl()
    terms = problem.terms
    left_out = usable(problem)
    places = [
        number for number, pool in enumerate(terms.pools) if pool.engine is not None and pool.name not in left_out
    ]
    engines = {number: terms.pools[number].generates() for number in places}
    chosen_on, judged_on = problem.drawn(0), problem.drawn(1)
    dispatchers = {number: problem.dispatcher(engine, chosen_on, 0) for number, engine in engines.items()}
    judges = {number: problem.dispatcher(engine, judged_on, 1) for number, engine in engines.items()}

    def made(found: Found, watch: SearchControl) -> Plan:
        return _plan(problem, dispatchers, judges, left_out, found, watch)

    def answer(found: Found) -> dict[str, Any]:
        over = SearchControl()
        over.stop()
        plan = made(found, over)
        return {} if written is None else written(plan)

    return made(_sizes(problem, dispatchers, watch, max_steps, answer), watch)


def _plan(
    problem: Problem,
    dispatchers: dict[int, Dispatcher],
    judges: dict[int, Dispatcher],
    left_out: dict[str, str],
    found: Found,
    watch: SearchControl,
) -> Plan:
    """The best of the sizes, judged, with what comes after: migration, baselines, the elastic table."""
    terms = problem.terms
    few = {number: Dispatcher(each.engine, each.drawn.first(FEW)) for number, each in dispatchers.items()}
    sizes, gathered = _with_migration(problem, few, found, watch)
    units = sizes.generation_units
    dispatcher, judge = dispatchers[sizes.generation], judges[sizes.generation]
    candidate = sizes.split
    if not candidate.tail and units > 1 and dispatcher.samples > 1:
        candidate = dispatcher.best_split(units)
    whole = _recut(terms, sizes, dispatcher, Split(0, units))
    plain, outcome = evaluate(terms, whole, judge), evaluate(terms, sizes, judge)
    if sizes.split.tail and outcome.step_s.mean() > plain.step_s.mean():
        # What gained on the steps that it was chosen on loses on others: no split.
        sizes, outcome = whole, plain
        gathered = _gather(problem, few[sizes.generation], sizes, watch)
    without, migration, applied = outcome, None, False
    each, split = inference_of(terms, sizes), sizes.split
    if gathered is not None:
        migration = migrated(judge, split, gathered.threshold, gathered.remaining, problem.link, each)
        again = _recut(terms, sizes, few[sizes.generation], split, gathered.ready_s)
        moved = evaluate(terms, again, judge, migration)
        if each > 0 and moved.step_s.mean() < outcome.step_s.mean():
            sizes, outcome, applied = again, moved, True
        elif each > 0:
            migration = None
    table: list[Trigger] = []
    if sizes.training is not None and not sizes.shared:
        pool = replace(terms.pools[sizes.generation], inference_s=each)
        table = triggers(pool, candidate, trainer_of(terms, sizes), sizes.training_units, judge.drawn)
    bound_s, bound_price = lower_bounds(terms, judges)
    return Plan(
        sizes=with_step(sizes, float(outcome.step_s.mean()), terms),
        outcome=outcome,
        migration=migration,
        applied=applied,
        plain=plain,
        random=evaluate_ends(terms, sizes, judge, judge.random_finish(units)),
        rule=evaluate_ends(terms, sizes, judge, judge.finish(judge.by_rule(units))),
        guesses=evaluate_ends(terms, sizes, judge, judge.guessed_finish(units)),
        serial=evaluate(terms, replace(sizes, batches=1), judge),
        colocated=colocated(terms, problem.objective, judges),
        without=without,
        candidate=candidate,
        floor_s=float(judge.floor().mean()),
        bound_s=bound_s,
        bound_price=bound_price,
        stage_bound_s=float(judge.bound(units).mean()),
        front=found.front,
        table=table,
        tried=found.tried,
        complete=found.complete,
        left_out=left_out,
        drawn=judge.drawn,
    )


def _with_migration(
    problem: Problem, dispatchers: dict[int, Dispatcher], found: Found, watch: SearchControl
) -> tuple[Sizes, Migration | None]:
    """The best sizes with their migration: what has inference to run beside the tail may overtake others."""
    sizes = _choose(problem, found.front)
    gathered = _gather(problem, dispatchers[sizes.generation], sizes, watch)

    def value(sizes: Sizes, gathered: Migration | None) -> float:
        dispatcher = dispatchers[sizes.generation]
        if gathered is None or inference_of(problem.terms, sizes) == 0:
            return _recut(problem.terms, sizes, dispatcher, sizes.split).value(problem.objective)
        again = _recut(problem.terms, sizes, dispatcher, sizes.split, gathered.ready_s)
        if problem.most_step_s is not None and again.step_s > problem.most_step_s:
            return np.inf
        return again.value(problem.objective)

    best = value(sizes, gathered)
    for other in found.others:
        if watch.expired or other is sizes:
            continue
        tried = _gather(problem, dispatchers[other.generation], other, watch)
        if tried is not None and value(other, tried) < best:
            sizes, gathered, best = other, tried, value(other, tried)
    return sizes, gathered


def _gather(problem: Problem, dispatcher: Dispatcher, sizes: Sizes, watch: SearchControl) -> Migration | None:
    def step_of(ready_s: Floats) -> float:
        return _recut(problem.terms, sizes, dispatcher, sizes.split, ready_s).step_s

    each = inference_of(problem.terms, sizes)
    return best_migration(dispatcher, sizes.split, problem.link, each, watch, step_of)


def _recut(terms: Terms, sizes: Sizes, dispatcher: Dispatcher, split: Split, ready_s: Floats | None = None) -> Sizes:
    """The same sizes when samples are ready at other times: the step may be cut otherwise."""
    (found,) = steps_of(terms, sizes.generation, dispatcher, split, ready_s, sizes)
    return found


def usable(problem: Problem) -> dict[str, str]:
    """Pools that generate nothing because their memory holds no longest sample: name to why.

    Raises
    ------
    FieldError, InfeasibleError
        None is left.
    """
    pools = [pool for pool in problem.terms.pools if pool.engine is not None]
    if not pools:
        raise FieldError("no pool generates", path="pools", hint='leave "stages" out, or name "generation"')
    left_out, last = {}, None
    for pool in pools:
        try:
            pool.generates().check(problem.lengths.longest)
        except InfeasibleError as error:
            left_out[pool.name], last = error.message, error
    if len(left_out) == len(pools) and last is not None:
        raise last
    return left_out


def _sizes(
    problem: Problem,
    dispatchers: dict[int, Dispatcher],
    watch: SearchControl,
    max_steps: int | None,
    answer: Callable[[Found], Any],
) -> Found:
    terms = problem.terms
    front = Front(any(pool.price_per_hour for pool in terms.pools))
    orders = {number: terms.generation_sizes(number) for number in dispatchers}
    if not terms.trains and problem.objective == "time" and problem.slack == 0:
        # Nothing else wants the units, and more instances are no slower.
        orders = {number: sizes[:1] for number, sizes in orders.items()}
    longest = max(map(len, orders.values()))
    # Pool by pool at each place of the order, so that an early end has seen something of each.
    queue = [(number, orders[number][at]) for at in range(longest) for number in orders if at < len(orders[number])]
    best: dict[tuple[int, int], float] = {}
    tried, began_s = 0, watch.left_s
    for pool, units in queue:
        if tried == 1:
            # The first may have had to wait for its code to be compiled.
            began_s = watch.left_s
        # Half of the budget: what follows is worth as much as more sizes.
        spent = watch.left_s <= began_s / 2 and watch.budget_s is not None
        enough = tried >= LEAST_SIZES and (spent or watch.expired)
        if best and (enough or (max_steps is not None and tried >= max_steps)):
            break
        found = steps_of(terms, pool, dispatchers[pool], Split(0, units))
        front.add(found)
        tried += 1
        if found:
            best[pool, units] = min(one.value(problem.objective) for one in found)
            so_far = Found(list(front.found), tried, False, [])
            limit = problem.most_step_s
            allowed = limit is None or any(one.step_s <= limit for one in front.found)
            watch.report(
                done=tried / len(queue), best=min(best.values()), answer=partial(answer, so_far) if allowed else None
            )
    by_way: dict[bool, Sizes] = {}
    for place, (pool, units) in enumerate(sorted(best, key=lambda key: best[key])[:WITH_SPLIT]):
        if place and watch.expired:
            break
        dispatcher = dispatchers[pool]
        split = dispatcher.best(units)
        found = steps_of(terms, pool, dispatcher, split)
        front.add(found)
        for one in found if terms.trains else []:
            if inference_of(terms, one) > 0 and (
                one.shared not in by_way or one.value(problem.objective) < by_way[one.shared].value(problem.objective)
            ):
                by_way[one.shared] = one
    return Found(front.found, tried, tried == len(queue), list(by_way.values()))


def _choose(problem: Problem, front: list[Sizes]) -> Sizes:
    if not front:
        raise FieldError(
            "no pool has units for both stages",
            path="pools",
            hint="generation and training need a unit each; give more units, or smaller sizes",
        )
    shortest = min(one.step_s for one in front)
    limit = problem.most_step_s
    if limit is not None and shortest > limit:
        raise InfeasibleError(
            f"no sizes make a step of at most {limit:g} s; the shortest takes {shortest:.6g} s on average",
            path="most_step_s",
            hint="allow that much, or give more units",
        )
    allowed = [one for one in front if limit is None or one.step_s <= limit]
    if problem.objective == "cost":
        return min(allowed, key=lambda one: (one.price, one.step_s))
    near = [one for one in allowed if one.step_s <= shortest * (1 + problem.slack)]
    return min(near, key=lambda one: (one.price, one.units, one.step_s))
