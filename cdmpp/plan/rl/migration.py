"""Migration of the long tail: unfinished samples are gathered on few instances, the others run inference.

RLHFuse (arXiv:2409.13221, section 4, inter-stage fusion): when at most R_t samples are unfinished, m instances
continue to decode. m is large enough that the batch does not slow decoding down and that the keys and values fit. The
instances that hold most tokens stay; samples of the others migrate to them. The freed instances run the reward,
reference and critic models on finished samples. R_t is found by simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from cdmpp.plan.rl.dispatch import Dispatcher, TailSplit
from cdmpp.plan.rl.generation import Floats, GenerationEngine, GenerationResult, Ints, SampleQueues, generate
from cdmpp.predict.requests.budget import SearchControl

#: Thresholds to try, as shares of a step's samples.
THRESHOLD_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7)
#: Relative slow-downs of a token on the remaining instances.
SLOWDOWNS = (0.0, 0.05, 0.15)
#: Shares of the instances to keep that are tried besides, if the memory suffices.
REMAINING_SHARES = (0.125, 0.25, 0.5, 0.75)
#: Without inference, generation may take longer by this share to free instances.
TOLERANCE = 0.005
#: Steps whose relative difference is smaller count as equal.
EQUAL = 0.001


@dataclass(frozen=True)
class MigrationLink:
    """Cost of moving a sample."""

    bytes_per_token: float  # keys and values of one token
    bytes_per_s: float  # bandwidth into one instance


@dataclass(frozen=True)
class Migration:
    """A migration threshold and its mean effect."""

    threshold: int  # unfinished samples at which the tail is gathered (R_t)
    remaining: int  # instances that continue to decode (m)
    at_s: float  # time of the migration
    # Number of samples that migrate, and their keys and values.
    moved: float
    moved_bytes: float
    generation_s: float  # until the last sample is generated
    stage_s: float  # until the inference of the last sample is done
    freed_s: float  # unit-seconds of the freed instances before generation ends
    ready_s: Floats  # (draws, samples): time at which each sample is ready for training
    ends_s: Floats  # (draws,): end of each generation


def inference_after(finish_s: Floats, inference_s: float, instances: int) -> Floats:
    """Time at which each sample is ready if inference runs after generation, on all instances.

    ``finish_s`` (draws, samples): ends of generation, and order of inference. ``inference_s``: seconds of one instance
    for one sample.
    """
    if inference_s == 0:
        return finish_s
    count = finish_s.shape[1]
    ends = finish_s.max(1)[:, None] + inference_s / instances * np.arange(1, count + 1)
    ready = np.empty_like(finish_s)
    np.put_along_axis(ready, np.argsort(finish_s, axis=1, kind="stable"), ends, axis=1)
    return ready


def fewest_instances(
    engine: GenerationEngine, threshold: int, instances: int, slowdown: float, held_tokens: float
) -> int:
    """Fewest instances that hold the unfinished samples and decode at nearly the same speed.

    ``slowdown``: relative slow-down of a token that is accepted. ``held_tokens``: of the unfinished samples, in memory.
    """
    batch = min(max(-(-threshold // instances), 1), engine.max_batch)
    limit_s = engine.seconds_per_token[batch] * (1 + slowdown)
    largest_batch = int(np.searchsorted(engine.seconds_per_token[1:], limit_s, side="right"))
    by_batch = -(-threshold // max(largest_batch, batch))
    return int(min(max(by_batch, np.ceil(held_tokens / engine.memory_tokens), 1), instances))


def best_migration(
    dispatcher: Dispatcher,
    split: TailSplit,
    link: MigrationLink,
    inference_s: float,
    control: SearchControl,
    step_of: Callable[[Floats], float],
) -> Migration | None:
    """The threshold with the shortest step; None if none shortens it.

    Of thresholds within :data:`EQUAL`, the one that frees most unit-seconds. Without inference: the one that frees most
    unit-seconds while generation takes at most :data:`TOLERANCE` longer. If ``control`` expires, the best so far.

    ``inference_s``: seconds of one unit for one sample. ``step_of``: maps the ready time of each sample, (draws,
    samples), to the mean seconds of a step.
    """
    samples, instances = dispatcher.samples, split.instances
    if instances < 2 or samples < 2 or control.expired:
        return None
    finish = dispatcher.finish_times(split)
    limit = float(finish.max(1).mean()) * (1 + TOLERANCE)
    if inference_s > 0:
        limit = step_of(inference_after(finish, inference_s, instances))
    candidates: list[tuple[float, Migration]] = []
    for threshold in sorted({min(max(round(share * samples), 1), samples - 1) for share in THRESHOLD_SHARES}):
        if control.expired:
            break
        pauses = _pauses(dispatcher, split, threshold)
        held = float(np.mean([pause.held.sum() for pause in pauses]))
        for remaining in _remaining_counts(dispatcher.engine, threshold, instances, held):
            if control.expired:
                break
            migration = simulate_migration(dispatcher, split, threshold, remaining, link, inference_s, pauses)
            seconds = step_of(migration.ready_s) if inference_s > 0 else migration.generation_s
            if seconds <= limit and migration.freed_s > 0:
                candidates.append((seconds, migration))
    if not candidates:
        return None
    least = min(seconds for seconds, _ in candidates)
    equal = [migration for seconds, migration in candidates if seconds <= (1 + EQUAL) * least or inference_s == 0]
    return max(equal, key=lambda migration: migration.freed_s)


def _remaining_counts(engine: GenerationEngine, threshold: int, instances: int, held_tokens: float) -> Iterable[int]:
    counts = {fewest_instances(engine, threshold, instances, slowdown, held_tokens) for slowdown in SLOWDOWNS}
    least = fewest_instances(engine, threshold, instances, np.inf, held_tokens)
    counts |= {max(round(share * instances), least) for share in REMAINING_SHARES}
    return sorted(count for count in counts if count < instances)


@dataclass(frozen=True)
class _Pause:
    """State of a step at the migration."""

    at_s: float
    result: GenerationResult
    held: Ints  # (samples,): tokens of each sample in memory


def _pauses(dispatcher: Dispatcher, split: TailSplit, threshold: int) -> list[_Pause]:
    engine = dispatcher.engine
    queues = split.queues(dispatcher.samples, dispatcher.steps.tail_samples)
    pauses = []
    for row in dispatcher.steps.lengths:
        whole = generate(engine, row, queues)
        at = float(np.sort(whole.finish_s)[max(len(row) - threshold - 1, 0)])
        # Slightly later, so that the sample that ends at this time counts as finished.
        result = generate(engine, row, queues, until_s=at * (1 + 1e-12))
        done = row - result.left
        held = np.where((result.left > 0) & (done > 0), done + engine.prompt_tokens, 0)
        pauses.append(_Pause(at, result, held))
    return pauses


def simulate_migration(
    dispatcher: Dispatcher,
    split: TailSplit,
    threshold: int,
    remaining: int,
    link: MigrationLink,
    inference_s: float,
    pauses: list[_Pause] | None = None,
) -> Migration:
    """Simulate one threshold and number of remaining instances; ``pauses``: those of the threshold, if known."""
    pauses = _pauses(dispatcher, split, threshold) if pauses is None else pauses
    instances, samples = split.instances, dispatcher.samples
    ready, ends, freed, moved_counts, moved_bytes = [], [], [], [], []
    for row, pause in zip(dispatcher.steps.lengths, pauses, strict=True):
        finish, moved, moved_tokens = _gather(dispatcher.engine, row, pause, instances, remaining, link)
        end = float(finish.max())
        ends.append(end)
        freed.append((instances - remaining) * (end - pause.at_s))
        moved_counts.append(moved)
        moved_bytes.append(moved_tokens * link.bytes_per_token)
        ready.append(_inference_beside(finish, pause.at_s, end, inference_s, instances, remaining))
    count = float(len(ready))
    return Migration(
        threshold=threshold,
        remaining=remaining,
        at_s=sum(pause.at_s for pause in pauses) / count,
        moved=sum(moved_counts) / count,
        moved_bytes=sum(moved_bytes) / count,
        generation_s=sum(ends) / count,
        stage_s=float(np.mean([row.max() for row in ready])),
        freed_s=sum(freed) / count,
        ready_s=np.array(ready).reshape(-1, samples),
        ends_s=np.array(ends),
    )


def _gather(
    engine: GenerationEngine, row: Ints, pause: _Pause, instances: int, remaining: int, link: MigrationLink
) -> tuple[Floats, int, int]:
    """Finish times of all samples, number of samples moved with tokens in memory, and these tokens."""
    left, home = pause.result.left, pause.result.home
    unfinished = np.flatnonzero(left > 0)
    running = unfinished[home[unfinished] >= 0]
    tokens = np.bincount(home[running], weights=pause.held[running], minlength=instances)
    # The instances with most tokens stay; ties go to the lowest index.
    staying = np.argsort(-tokens, kind="stable")[:remaining]
    queue_of = np.full(instances, -1)
    queue_of[staying] = np.arange(remaining)
    # -1: samples that move, and samples that wait in a queue and have no instance yet.
    queue = np.where(home[unfinished] >= 0, queue_of[home[unfinished]], -1)
    queues = [unfinished[queue == index].tolist() for index in range(remaining)]
    loads = [(len(samples), index) for index, samples in enumerate(queues)]
    heapq.heapify(loads)
    received = np.zeros(remaining)
    moving = unfinished[queue < 0]
    for sample, held in zip(moving.tolist(), pause.held[moving].tolist(), strict=True):
        load, index = heapq.heappop(loads)
        queues[index].append(sample)
        received[index] += held
        heapq.heappush(loads, (load + 1, index))
    ordered = [np.array(samples, dtype=np.int64) for samples in queues]
    # Running samples before waiting ones.
    ordered = [samples[np.argsort(pause.held[samples] == 0, kind="stable")] for samples in ordered]
    start = pause.at_s + received * link.bytes_per_token / link.bytes_per_s
    rest = generate(engine, left, SampleQueues.of(ordered), done=row - left, resident=pause.held > 0, start_s=start)
    finish = np.where(np.isfinite(pause.result.finish_s), pause.result.finish_s, rest.finish_s)
    return finish, int((pause.held[moving] > 0).sum()), int(received.sum())


def _inference_beside(
    finish: Floats, at_s: float, end_s: float, inference_s: float, instances: int, remaining: int
) -> Floats:
    """Time at which each sample is ready: inference on the freed instances, after generation on all."""
    if inference_s == 0:
        return finish
    order = np.argsort(finish, kind="stable")
    slow, fast = inference_s / (instances - remaining), inference_s / instances
    arrivals = np.maximum(finish[order], at_s)
    index = np.arange(len(order))
    # Closed form of end_i = max(arrival_i, end_{i-1}) + slow.
    ends = slow * (index + 1) + np.maximum.accumulate(arrivals - slow * index)
    late = int(np.searchsorted(ends, end_s, side="right"))
    ends[late:] = end_s + fast * np.arange(1, len(order) - late + 1)
    ready = np.empty_like(ends)
    ready[order] = ends
    return ready
