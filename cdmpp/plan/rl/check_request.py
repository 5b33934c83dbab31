"""Faults of an RL plan that need no simulation: units, modes and pipeline schedules against the request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from cdmpp.plan.fused.check import check as check_fused
from cdmpp.plan.fused.schema import FusedRequest
from cdmpp.plan.rl.plan_schema import RlPlan
from cdmpp.plan.rl.pool_schema import PoolForm
from cdmpp.plan.rl.schema import RlRequest

#: Largest difference between a claimed figure and the simulated one, as a share of the step.
TOLERANCE = 1e-9


def pipeline_faults(request: RlRequest, plan: RlPlan) -> Iterator[str]:
    """A schedule that is missing, wrong, or not that of the request."""
    trainer = None if plan.training is None else pool_of(request, plan.training.pool)
    form = None if trainer is None or trainer.training is None else trainer.training.pipeline
    claim = None if plan.training is None else plan.training.pipeline
    if (form is None) != (claim is None):
        yield f"training.pipeline: {'missing' if claim is None else 'the request has none'}"
        return
    if form is None or claim is None or plan.training is None:
        return
    if claim.samples != form.samples:
        yield f"training.pipeline.samples: {claim.samples}, the request has {form.samples}"
    if form.answer is not None and not is_equal(claim.run_s, form.answer.makespan_s):
        yield f"training.pipeline.run_s: {claim.run_s:.9g}, the request has {form.answer.makespan_s:.9g}"
    if form.request is not None:
        if claim.schedule is None:
            yield "training.pipeline.schedule: missing"
            return
        if not is_equal(claim.run_s, claim.schedule.makespan_s):
            yield f"training.pipeline.run_s: {claim.run_s:.9g}, its schedule takes {claim.schedule.makespan_s:.9g}"
        for fault in _fused_faults(form.request, claim.schedule.model_dump()):
            yield f"training.pipeline.schedule.{fault}"
    pipelines = plan.training.units // form.units
    runs = math.ceil(request.samples_per_step / (max(pipelines, 1) * form.samples))
    if (claim.pipelines, claim.runs) != (pipelines, runs):
        yield (
            f"training.pipeline: {claim.pipelines} pipelines and {claim.runs} runs, {plan.training.units} units are "
            f"{pipelines} and need {runs}"
        )


def _fused_faults(request: FusedRequest, schedule: Mapping[str, Any]) -> list[str]:
    """Faults of a schedule whose request is priced already: its costs are given in seconds."""
    models = [
        model.model_copy(
            update={"forward": None, "backward": None, "forward_s": f.latency_s, "backward_s": b.latency_s}
        )
        for model, (f, b) in zip(request.models, request.costs(), strict=True)
    ]
    return check_fused(request.model_copy(update={"models": models}), schedule)


def unit_faults(request: RlRequest, plan: RlPlan) -> Iterator[str]:
    """Pools, units, samples and modes that do not fit the request."""
    used: dict[str, int] = {}
    generation, training = plan.generation, plan.training
    parts = [(part.pool, part.instances) for part in generation.parts] or [(generation.pool, generation.instances)]
    for at, (name, units) in enumerate(parts):
        pool = pool_of(request, name)
        if pool is None or pool.decode is None:
            yield f"generation: no pool {name!r} generates"
            continue
        used[name] = used.get(name, 0) + units
        if units < 1:
            yield f"generation.parts.{at}.instances: {units}"
    if generation.parts:
        if not request.mix_pools:
            yield "generation.parts: the request has no mix_pools"
        if sum(part.instances for part in generation.parts) != generation.instances:
            yield f"generation.instances: {generation.instances}, not the sum of its parts"
        firsts = list(accumulate((part.samples for part in generation.parts), initial=0))
        if firsts[-1] != request.samples_per_step or firsts[:-1] != [part.first for part in generation.parts]:
            yield f"generation.parts: their ranges are not the {request.samples_per_step} samples of a step"
    groups = plan.tail_split
    if not generation.parts:
        if groups.tail.instances + groups.regular.instances != generation.instances:
            yield f"tail_split: its instances are not the {generation.instances} of generation"
        if groups.tail.samples + groups.regular.samples != request.samples_per_step:
            yield f"tail_split: its samples are not the {request.samples_per_step} of a step"
    if (training is None) != all(pool.training is None for pool in request.pools):
        yield f"training: {'missing' if training is None else 'the request has none'}"
    if training is not None:
        pool = pool_of(request, training.pool)
        if pool is None or pool.training is None:
            yield f"training: no pool {training.pool!r} trains"
        elif training.shared:
            if parts != [(training.pool, training.units)]:
                yield "training.shared: other units than those of generation"
        else:
            used[training.pool] = used.get(training.pool, 0) + training.units
    for name, units in used.items():
        pool = pool_of(request, name)
        if pool is not None and units > pool.units:
            yield f"pool {name!r}: {units} units are used, it has {pool.units}"
    if plan.mode != request.effective_mode:
        yield f"mode: {plan.mode}, the request is {request.effective_mode}"
    staleness = 0 if request.effective_mode == "sync" else request.staleness
    if plan.streaming is not None and plan.streaming.staleness != staleness:
        yield f"streaming.staleness: {plan.streaming.staleness}, the request has {staleness}"
    if (plan.streaming is None) != (training is None or training.shared):
        yield "streaming: given for shared units, or missing for separate ones"


def pool_of(request: RlRequest, name: str) -> PoolForm | None:
    """The pool of a name; None if there is none."""
    return next((pool for pool in request.pools if pool.name == name), None)


def is_equal(claimed: float, simulated: float) -> bool:
    return math.isclose(claimed, simulated, rel_tol=TOLERANCE, abs_tol=1e-12)
