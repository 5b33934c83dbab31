"""Sentences that explain an RL plan, down to the programs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cdmpp.plan.rl.plan_schema import SplitPart
from cdmpp.plan.rl.pool_schema import PoolForm
from cdmpp.plan.rl.problem import RlProblem
from cdmpp.plan.rl.schema import RlRequest
from cdmpp.plan.rl.search_result import SearchResult
from cdmpp.plan.rl.sizes import MIXED
from cdmpp.utils.units import format_latency


def explain(request: RlRequest, problem: RlProblem, result: SearchResult, split: SplitPart) -> list[str]:
    """The explanation of a plan.

    Parameters
    ----------
    request : RlRequest
        With resolved costs.
    problem : RlProblem
    result : SearchResult
    split : SplitPart
        The tail split as the plan reports it.
    """
    return [
        f"all times are simulated: means over {len(result.steps)} held-out steps, drawn from the lengths and not used "
        "by the search",
        "assumed: a decode step takes the seconds of the decode curve at any length of the response, as if all samples "
        "had the past that the curve was made for",
        *_stages(problem, result),
        *_split(result, split),
        *_programs(request, result, split),
        *_search(result),
    ]


def _stages(problem: RlProblem, result: SearchResult) -> Iterator[str]:
    sizes, pools = result.sizes, problem.sizing.pools
    generation_s = float(result.outcome.generation_s.mean())
    if sizes.training is not None:
        stage_s, training_s = float(result.outcome.stage_s.mean()), float(result.outcome.training_s.mean())
        pool = problem.sizing.stage_name(sizes)
        if sizes.shared:
            yield (
                f"all {sizes.generation_units} units of {pool!r} generate, then train, which is better than separate "
                "units"
            )
        yield (
            f"{'generation' if stage_s >= training_s else 'training'} is the longer stage: generation takes "
            f"{format_latency(stage_s)} on {sizes.generation_units} units of {pool!r}, training "
            f"{format_latency(training_s)} on {sizes.training_units} units of {pools[sizes.training].name!r}"
        )
    share = result.longest_alone_s / generation_s
    yield (
        f"the longest sample alone takes {format_latency(result.longest_alone_s)}, {100 * share:.0f} % of the "
        f"generation's {format_latency(generation_s)}" + (": more instances hardly help" if share > 0.95 else "")
    )


def _split(result: SearchResult, split: SplitPart) -> Iterator[str]:
    yield f"tail split {'used' if split.used else 'not used'}: {split.reason}"
    if split.if_misses_any is not None and split.if_misses_any < -0.01:
        yield (
            "the plan assumes that the ranker misses only samples near the border of the longest; if it misses all "
            f"long samples equally often, generation takes {-100 * split.if_misses_any:.1f} % longer than without a "
            'split: set ranker.misses to "any" for such a ranker, or raise ranker.doubt if you are not sure'
        )
    guessed = result.dispatches.get("guesses")
    lead = 0.0 if guessed is None else 1.0 - float(guessed.step_s.mean()) / float(result.outcome.step_s.mean())
    if lead > 1e-3:
        yield (
            f"the baseline guesses is {100 * lead:.1f} % faster: it uses a guess of each length, the ranker only flags "
            "the longest"
        )


def _programs(request: RlRequest, result: SearchResult, split: SplitPart) -> Iterator[str]:
    if result.sizes.generation != MIXED:
        yield from _decoding(request.pools[result.sizes.generation], split)
    training = None if result.sizes.training is None else request.pools[result.sizes.training].training
    if training is not None and training.sample is not None:
        yield f"training of a sample: {training.sample.cost.largest()}"
    for name, cost in request.weights.predicted().items():
        yield f"weights, {name}: {format_latency(cost.latency_s)}: {cost.largest()}"


def _decoding(pool: PoolForm, split: SplitPart) -> Iterator[str]:
    """Programs of a decoding step at the batch of the tail."""
    if pool.decode is None:
        return
    sizes, costs = pool.decode.points()
    point = int(np.argmin(np.abs(sizes - (split.tail.batch or split.regular.batch))))
    if costs[point].parts:
        yield (
            f"a token at batch {int(sizes[point])} takes {format_latency(costs[point].latency_s)}: "
            f"{costs[point].largest(3)}"
        )
        if max(split.tail.batch, split.regular.batch) > sizes[-1]:
            yield f"beyond batch {int(sizes[-1])} the decode curve is proportional to the batch"


def _search(result: SearchResult) -> Iterator[str]:
    migration = result.migration
    if migration is not None:
        yield (
            f"at {migration.threshold} unfinished samples, after {format_latency(migration.at_s)}, "
            f"{migration.remaining} instances take over the rest, which frees {migration.freed_s:.3g} unit-seconds"
        )
    if not result.complete:
        yield f"the search ended after {result.sizes_tried} generation sizes, before all were simulated"
