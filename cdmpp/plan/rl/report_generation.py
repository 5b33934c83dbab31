"""Parts of a plan about generation: instances, tail split, dispatch and migration."""

from __future__ import annotations

from typing import Any

import numpy as np

from cdmpp.plan.rl.dispatch import TailSplit
from cdmpp.plan.rl.mixture import MixDispatcher, PoolMix
from cdmpp.plan.rl.plan_schema import GenerationPart, GroupPart, MigrationPart, PoolPart, SplitPart
from cdmpp.plan.rl.problem import RlProblem
from cdmpp.plan.rl.search_result import SearchResult


def mean(values: Any) -> float:
    return float(np.mean(values))


def generation_part(problem: RlProblem, result: SearchResult) -> GenerationPart:
    sizes, judge, pools = result.sizes, result.judge, problem.sizing.pools
    parts: list[PoolPart] = []
    if isinstance(judge, MixDispatcher):
        assert isinstance(sizes.split, PoolMix)
        parts = [
            PoolPart(
                pool=pools[pool].name,
                instances=units,
                samples=stop - start,
                first=start,
                time_s=judge.range_s(pool, units, start, stop),
            )
            for pool, units, start, stop in sizes.split.ranges()
        ]
        preemptions = judge.preemptions(sizes.split)
    else:
        assert not isinstance(sizes.split, PoolMix)
        preemptions = judge.preemptions(sizes.split)
    return GenerationPart(
        pool=problem.sizing.stage_name(sizes),
        parts=parts,
        inference_by=sizes.inference_by,
        instances=sizes.generation_units,
        time_s=mean(result.outcome.generation_s),
        stage_s=mean(result.outcome.stage_s),
        lower_bound_s=result.generation_bound_s,
        baselines_s={name: mean(outcome.generation_s) for name, outcome in result.dispatches.items()}
        | {"floor": result.longest_alone_s},
        preemptions=preemptions,
    )


def split_part(result: SearchResult, samples: int) -> SplitPart:
    split, tail_samples, held_out = result.sizes.split, result.steps.tail_samples, result.judge
    if isinstance(held_out, MixDispatcher) or isinstance(split, PoolMix):
        everything = GroupPart(samples=samples, instances=split.instances, batch=0)
        return SplitPart(
            used=False,
            tail=GroupPart(samples=0, instances=0, batch=0),
            regular=everything,
            gain=0.0,
            best_gain=0.0,
            if_misses_any=None,
            reason="each pool has a range of the samples and no groups within it",
        )
    unsplit = TailSplit(0, split.instances)
    makespan = mean(held_out.makespans(unsplit))
    gain = 1 - mean(held_out.makespans(split)) / makespan
    best_gain = 1 - mean(held_out.makespans(result.best_split)) / makespan
    pessimistic, pessimistic_gain = held_out.pessimistic, None
    if split.tail and pessimistic is not None:
        pessimistic_gain = 1 - mean(pessimistic.makespans(split)) / mean(pessimistic.makespans(unsplit))
    if split.tail:
        reason = f"it gains {100 * gain:.1f} % on held-out steps"
    elif split.instances < 2:
        reason = "one instance cannot be split"
    elif not result.best_split.tail:
        reason = "the search ended before a split was tried"
    else:
        reason = (
            f"no split has a significant gain, with doubt of the ranker; the best one gains {100 * best_gain:.1f} % if "
            "the ranker is as stated"
        )

    def group(samples: int, instances: int) -> GroupPart:
        batch = 0 if instances == 0 else min(-(-samples // instances), held_out.engine.max_batch)
        return GroupPart(samples=samples, instances=instances, batch=batch)

    return SplitPart(
        used=split.tail > 0,
        tail=group(tail_samples if split.tail else 0, split.tail),
        regular=group(held_out.samples - tail_samples if split.tail else held_out.samples, split.regular),
        gain=gain,
        best_gain=best_gain,
        if_misses_any=pessimistic_gain,
        reason=reason,
    )


def dispatch_rule(problem: RlProblem, result: SearchResult) -> str:
    split, tail_samples, pools = result.sizes.split, result.steps.tail_samples, problem.sizing.pools
    order = "in the ranker's order, longest first"
    take = "an instance with room takes the next sample; if several have room, the one with the smallest batch does"
    if isinstance(split, PoolMix):
        ranges = ", ".join(f"{stop - start} for {pools[pool].name!r}" for pool, _, start, stop in split.ranges())
        return f"the samples {order}, are divided into ranges ({ranges}), each with one queue; {take}"
    if split.tail == 0:
        return f"all samples wait in one queue {order}; {take}"
    return (
        f"the {tail_samples} samples ranked longest wait in the queue of the tail instances, the others in that of "
        f"the regular instances, each {order}; {take}"
    )


def migration_part(problem: RlProblem, result: SearchResult) -> MigrationPart | None:
    migration = result.migration
    if migration is None:
        return None
    return MigrationPart(
        applied=result.migration_applied,
        threshold=migration.threshold,
        threshold_share=migration.threshold / problem.samples,
        remaining_instances=migration.remaining,
        at_s=migration.at_s,
        moved_samples=migration.moved,
        moved_bytes=migration.moved_bytes,
        generation_s=migration.generation_s,
        stage_s=migration.stage_s,
        without_s=mean(result.unmigrated.stage_s),
        freed_unit_s=migration.freed_s,
    )
