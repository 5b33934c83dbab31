"""From a plan to its answer: figures, and why they are what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.planning.rl.dispatch import Dispatcher, Split
from cdmpp.planning.rl.evaluate import evaluate, inference_of
from cdmpp.planning.rl.generation import generate
from cdmpp.planning.rl.lengths import Drawn
from cdmpp.planning.rl.migration import migrated
from cdmpp.planning.rl.pricing import PricedPool
from cdmpp.planning.rl.search import Plan, Problem
from cdmpp.planning.rl.sizes import Sizes
from cdmpp.units import format_latency

if TYPE_CHECKING:
    from cdmpp.planning.rl.schema import RlRequest

BINS, MOST_POINTS, MOST_FRONT = 32, 64, 64


def write(request: RlRequest, problem: Problem, plan: Plan, priced: Sequence[PricedPool]) -> dict[str, Any]:
    """The answer's fields, less those that every answer has."""
    sizes, terms = plan.sizes, problem.terms
    pool = terms.pools[sizes.generation]
    judge = problem.dispatcher(pool.generates(), plan.drawn, 1)
    value = sizes.value(problem.objective)
    bound = plan.bound_s if problem.objective == "time" else plan.bound_price
    lower, upper = _interval(request, plan, priced)
    split = _split(problem, plan, judge)
    baselines = _baselines(problem, plan)
    return {
        "objective": {"name": problem.objective, "value": value, "lower_bound": bound},
        "mode": terms.mode,
        "step_s": sizes.step_s,
        "step_lower_s": lower,
        "step_upper_s": upper,
        "lower_bound_s": plan.bound_s,
        "price_per_step": sizes.price,
        "generation": _generation(plan, pool.name, judge),
        "training": _training(problem, plan),
        "tail_split": split,
        "dispatch": {"rule": "lpt", "words": _rule(sizes.split, plan.drawn.tail)},
        "streaming": _streaming(problem, plan),
        "migration": _migration(problem, plan),
        "elastic": _elastic(problem, plan),
        "pareto": [_front(problem, one) for one in _thinned(plan.front)],
        "lengths": _lengths(problem, plan.drawn),
        "decode": [_curve(one, request.kv.max_batch) for one in priced if one.curve is not None],
        "draws": len(plan.drawn),
        "sizes_tried": plan.tried,
        "complete": plan.complete,
        "left_out": plan.left_out,
        "baselines": baselines,
        "gap": value / bound - 1,
        "explanation": _explanation(problem, plan, priced, split, judge),
    }


def _mean(values: Any) -> float:
    return float(np.mean(values))


def _interval(request: RlRequest, plan: Plan, priced: Sequence[PricedPool]) -> tuple[float | None, float | None]:
    """The same plan with every predicted cost at its lower and at its upper bound."""
    if not any(one.predicted for one in priced):
        return None, None
    found = []
    for figure in ("lower_s", "upper_s"):
        problem = request.problem(priced, figure)
        pool = problem.terms.pools[plan.sizes.generation]
        judge = Dispatcher(pool.generates(), plan.drawn)
        migration = None
        if plan.applied and plan.migration is not None:
            migration = migrated(
                judge,
                plan.sizes.split,
                plan.migration.threshold,
                plan.migration.remaining,
                problem.link,
                inference_of(problem.terms, plan.sizes),
            )
        found.append(_mean(evaluate(problem.terms, plan.sizes, judge, migration).step_s))
    return min(*found, plan.sizes.step_s), max(*found, plan.sizes.step_s)


def _baselines(problem: Problem, plan: Plan) -> dict[str, float]:
    """The objective of simpler plans with the same units."""
    sizes, terms = plan.sizes, problem.terms
    factor = 1.0 if problem.objective == "time" else terms.rate_of(sizes)
    found = {
        "random": _mean(plan.random.step_s) * factor,
        "lpt": _mean(plan.plain.step_s) * factor,
        "rule": _mean(plan.rule.step_s) * factor,
        "guesses": _mean(plan.guesses.step_s) * factor,
        "floor": plan.floor_s * factor,
    }
    if sizes.batches > 1:
        found["not_streamed"] = _mean(plan.serial.step_s) * factor
    if plan.applied:
        found["not_migrated"] = _mean(plan.without.step_s) * factor
    if plan.colocated is not None:
        found["colocated"] = plan.colocated[0 if problem.objective == "time" else 1]
    return found


def _generation(plan: Plan, name: str, judge: Dispatcher) -> dict[str, Any]:
    queues = plan.sizes.split.queues(judge.samples, plan.drawn.tail)
    preempted = [generate(judge.engine, row, queues).preemptions for row in plan.drawn.lengths]
    return {
        "pool": name,
        "inference_by": plan.sizes.inference_by,
        "instances": plan.sizes.generation_units,
        "time_s": _mean(plan.outcome.generation_s),
        "stage_s": _mean(plan.outcome.stage_s),
        "lower_bound_s": plan.stage_bound_s,
        "baselines_s": {
            "random": _mean(plan.random.generation_s),
            "lpt": _mean(plan.plain.generation_s),
            "rule": _mean(plan.rule.generation_s),
            "guesses": _mean(plan.guesses.generation_s),
            "floor": plan.floor_s,
        },
        "preemptions": _mean(preempted),
    }


def _training(problem: Problem, plan: Plan) -> dict[str, Any] | None:
    if plan.sizes.training is None:
        return None
    return {
        "shared": plan.sizes.shared,
        "pool": problem.terms.pools[plan.sizes.training].name,
        "units": plan.sizes.training_units,
        "time_s": _mean(plan.outcome.training_s),
        "idle_s": _mean(plan.outcome.idle_s),
    }


def _split(problem: Problem, plan: Plan, judge: Dispatcher) -> dict[str, Any]:
    used, units, samples = plan.sizes.split, plan.sizes.generation_units, judge.samples
    tail = plan.drawn.tail
    most = judge.engine.batch
    plain = judge.ends(Split(0, units))
    gain = 1 - _mean(judge.ends(used)) / _mean(plain)
    best_gain = 1 - _mean(judge.ends(plan.candidate)) / _mean(plain)
    other = None
    if used.tail and judge.rough is not None:
        other = 1 - _mean(judge.rough.ends(used)) / _mean(judge.rough.ends(Split(0, units)))
    if used.tail:
        reason = f"it gains {100 * gain:.1f} % on steps that it was not chosen on"
    elif units < 2:
        reason = "one instance cannot be split"
    else:
        reason = (
            f"no split has a gain that is real, doubt of the ranker counted in: the best one's gain is "
            f"{100 * best_gain:.1f} % if the ranker is as stated"
        )

    def group(count: int, instances: int) -> dict[str, int]:
        batch = 0 if instances == 0 else min(-(-count // instances), most)
        return {"samples": count, "instances": instances, "batch": batch}

    return {
        "used": used.tail > 0,
        "tail": group(tail if used.tail else 0, used.tail),
        "regular": group(samples - tail if used.tail else samples, used.regular),
        "gain": gain,
        "best_gain": best_gain,
        "if_misses_any": other,
        "reason": reason,
    }


def _rule(split: Split, tail: int) -> str:
    order = "in the ranker's order, longest first"
    take = "whichever instance has room takes the next, of several the one that decodes fewest"
    if split.tail == 0:
        return f"all samples wait in one queue {order}; {take}"
    return (
        f"the {tail} samples ranked longest wait in one queue, for the instances of the tail, the others in "
        f"another, for the regular instances, each {order}; {take}"
    )


def _streaming(problem: Problem, plan: Plan) -> dict[str, Any] | None:
    if plan.sizes.training is None or plan.sizes.shared:
        return None
    step = plan.outcome.step_s
    return {
        "mode": problem.terms.mode,
        "batches": plan.sizes.batches,
        "samples_per_batch": problem.samples / plan.sizes.batches,
        "training_bubble": _mean(plan.outcome.idle_s / step),
        "generation_bubble": _mean(1 - plan.outcome.stage_s / step),
        "serial_s": _mean(plan.serial.step_s),
    }


def _migration(problem: Problem, plan: Plan) -> dict[str, Any] | None:
    found = plan.migration
    if found is None:
        return None
    return {
        "applied": plan.applied,
        "threshold": found.threshold,
        "threshold_share": found.threshold / problem.samples,
        "remaining_instances": found.remaining,
        "at_s": found.at_s,
        "moved_samples": found.moved,
        "moved_bytes": found.moved_bytes,
        "generation_s": found.generation_s,
        "stage_s": found.stage_s,
        "without_s": _mean(plan.without.stage_s),
        "freed_unit_s": found.freed_s,
    }


def _elastic(problem: Problem, plan: Plan) -> list[dict[str, Any]]:
    sizes = plan.sizes
    used = sizes.units if sizes.training == sizes.generation else sizes.generation_units
    free = problem.terms.pools[sizes.generation].units - used
    return [vars(line) | {"free_units": free} for line in plan.table]


def _front(problem: Problem, one: Sizes) -> dict[str, Any]:
    pools = problem.terms.pools
    return {
        "generation_pool": pools[one.generation].name,
        "generation_units": one.generation_units,
        "training_pool": None if one.training is None else pools[one.training].name,
        "training_units": one.training_units,
        "shared": one.shared,
        "tail_instances": one.split.tail,
        "batches": one.batches,
        "step_s": one.step_s,
        "price": one.price,
    }


def _thinned(front: Sequence[Sizes]) -> list[Sizes]:
    """At most :data:`MOST_FRONT` of them, the ends among them."""
    if len(front) <= MOST_FRONT:
        return list(front)
    places = np.unique(np.linspace(0, len(front) - 1, MOST_FRONT).round().astype(int))
    return [front[place] for place in places]


def _lengths(problem: Problem, drawn: Drawn) -> dict[str, Any]:
    rows = drawn.lengths
    tail, regular = rows[:, : drawn.tail], rows[:, drawn.tail :]
    border = np.sort(rows, axis=1)[:, -drawn.tail]
    low, high = float(rows.min()), float(rows.max())
    edges = np.geomspace(low, max(high, low + 1), BINS + 1)
    edges[0], edges[-1] = low, max(high, low + 1)
    return {
        "mean": float(rows.mean()),
        "longest": float(rows.max(1).mean()),
        "limit": problem.lengths.longest,
        "tail_border": float(border.mean()),
        "recall": float((tail >= border[:, None]).mean()),
        "histogram": {
            "edges": edges.tolist(),
            "tail": np.histogram(tail, edges)[0].tolist(),
            "regular": np.histogram(regular, edges)[0].tolist(),
        },
    }


def _curve(one: PricedPool, batch: int) -> dict[str, Any]:
    assert one.curve is not None
    sizes, costs = one.curve
    if len(costs[0].parts) == 0 and len(sizes) == 2 and sizes[-1] > batch:
        # A line, given by its ends.
        middle = np.unique(np.array([1, batch]))
        shown = np.interp(middle, sizes, [cost.latency_s for cost in costs]).tolist()
        return {
            "pool": one.stages.pool.name,
            "batch": middle.tolist(),
            "seconds_per_token": shown,
            "lower_s": shown,
            "upper_s": shown,
        }
    return {
        "pool": one.stages.pool.name,
        "batch": sizes.astype(int).tolist(),
        "seconds_per_token": [cost.latency_s for cost in costs],
        "lower_s": [cost.lower_s for cost in costs],
        "upper_s": [cost.upper_s for cost in costs],
    }


def _explanation(
    problem: Problem, plan: Plan, priced: Sequence[PricedPool], split: dict[str, Any], judge: Dispatcher
) -> list[str]:
    sizes, terms, outcome = plan.sizes, problem.terms, plan.outcome
    pool = terms.pools[sizes.generation]
    stage, whole = _mean(outcome.stage_s), _mean(outcome.training_s)
    said = [
        f"all times are simulated: means over {len(plan.drawn)} steps drawn from the lengths, which are not "
        "those that the plan was chosen on"
    ]
    if sizes.training is not None:
        trainer = terms.pools[sizes.training].name
        longer = "generation" if stage >= whole else "training"
        if sizes.shared:
            said.append(
                f"all {sizes.generation_units} units of {pool.name!r} generate and then train: better than "
                "units of their own for each"
            )
        said.append(
            f"{longer} is the longer stage: {format_latency(stage)} on {sizes.generation_units} of "
            f"{pool.name!r} against {format_latency(whole)} of training on {sizes.training_units} of "
            f"{trainer!r}"
        )
    generation = _mean(outcome.generation_s)
    said.append(
        f"the longest sample alone takes {format_latency(plan.floor_s)}, "
        f"{100 * plan.floor_s / generation:.0f} % of the generation's {format_latency(generation)}"
        + (": more instances hardly help" if plan.floor_s > 0.95 * generation else "")
    )
    said.append(f"tail split {'used' if split['used'] else 'not used'}: {split['reason']}")
    if split["if_misses_any"] is not None and split["if_misses_any"] < -0.01:
        said.append(
            f"the split loses {-100 * split['if_misses_any']:.1f} % if the ranker misses any of the longest "
            'with equal chance: raise "doubt", or ask with "misses": "any", if yours may'
        )
    ahead = 1.0 - _mean(plan.guesses.step_s) / _mean(outcome.step_s)
    if ahead > 1e-3:
        said.append(
            f"guesses is {100 * ahead:.1f} % ahead here: it has a guess of every length, the ranker only "
            "names the longest"
        )
    said += _programs(priced[sizes.generation], split, judge)
    if sizes.training is not None and priced[sizes.training].sample is not None:
        cost = priced[sizes.training].sample
        assert cost is not None
        said.append(f"training of a sample: {cost.largest()}")
    if plan.migration is not None:
        found = plan.migration
        said.append(
            f"at {found.threshold} unfinished samples, after {format_latency(found.at_s)}, "
            f"{found.remaining} instances take over the rest: frees {found.freed_s:.3g} unit-seconds"
        )
    if not plan.complete:
        said.append(f"the search ended after {plan.tried} generation sizes, before it had tried all")
    return said


def _programs(priced: PricedPool, split: dict[str, Any], judge: Dispatcher) -> list[str]:
    """What a token's time is made of, at the batch that the long samples run in."""
    if priced.curve is None:
        return []
    sizes, costs = priced.curve
    said = []
    batch = split["tail"]["batch"] or split["regular"]["batch"]
    place = int(np.argmin(np.abs(sizes - batch)))
    if costs[place].parts:
        said.append(
            f"a token at batch {int(sizes[place])} takes {format_latency(costs[place].latency_s)}: "
            + costs[place].largest(3)
        )
        if max(split["tail"]["batch"], split["regular"]["batch"]) > sizes[-1]:
            said.append(f"beyond batch {int(sizes[-1])} the decode curve grows in proportion")
    return said
