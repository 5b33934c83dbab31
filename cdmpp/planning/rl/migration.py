"""When few samples are left: gather them on some instances, and give the others other work.

RLHFuse (arXiv:2409.13221, section 4, inter-stage fusion): once at most R_t samples are unfinished, m
instances keep decoding, enough that the batch does not slow decoding down and that the keys and values fit;
those that hold most stay, the samples of the others migrate to them, and the freed instances run the
inference of rewards, references and critics on what is finished. R_t is found by simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.planning.rl.dispatch import Dispatcher, Split
from cdmpp.planning.rl.generation import Engine, Floats, Generated, Ints, Queues, generate

#: Thresholds as shares of a step's samples.
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7)
#: By how much a token may take longer on the instances that stay.
SLOWER = (0.0, 0.05, 0.15)
#: Shares of the instances that are tried besides, where the memory suffices: to be slower may be worth it.
REMAINING = (0.125, 0.25, 0.5, 0.75)
#: Without inference to run, generation may take so much longer for the units that it frees.
TOLERANCE = 0.005
#: Steps that differ by less are equal.
EQUAL = 0.001


@dataclass(frozen=True)
class Migration:
    """A threshold, and what it does on average.

    Attributes
    ----------
    threshold : int
        Unfinished samples at which the tail is gathered (R_t).
    remaining : int
        Instances that keep decoding (m).
    at_s : float
        When that is.
    moved, moved_bytes : float
        Samples that migrate, and their keys and values.
    generation_s : float
        Until the last sample is generated.
    stage_s : float
        Until inference is done as well.
    freed_s : float
        Unit-seconds that the freed instances have for other work before generation ends.
    ready_s : float64 array, (draws, samples)
        When each sample is ready for training, in the order of the drawn steps.
    ends_s : float64 array, (draws,)
        When each generation ended.
    """

    threshold: int
    remaining: int
    at_s: float
    moved: float
    moved_bytes: float
    generation_s: float
    stage_s: float
    freed_s: float
    ready_s: Floats
    ends_s: Floats


@dataclass(frozen=True)
class Link:
    """What moving a sample takes.

    Attributes
    ----------
    bytes_per_token : float
        Keys and values of one token.
    bytes_per_s : float
        Into one instance.
    """

    bytes_per_token: float
    bytes_per_s: float


def inference_after(finish_s: Floats, each_s: float, instances: int) -> Floats:
    """When each sample is ready if inference begins after generation, on all instances.

    Parameters
    ----------
    finish_s : float64 array, (draws, samples)
        Ends of generation; those that ended first go first.
    each_s : float
        Seconds of one instance for one sample.
    """
    if each_s == 0:
        return finish_s
    count = finish_s.shape[1]
    ends = finish_s.max(1)[:, None] + each_s / instances * np.arange(1, count + 1)
    ready = np.empty_like(finish_s)
    np.put_along_axis(ready, np.argsort(finish_s, axis=1, kind="stable"), ends, axis=1)
    return ready


def enough(engine: Engine, threshold: int, instances: int, slower: float, tokens: float) -> int:
    """Fewest instances that hold so many unfinished samples at nearly the speed that they have.

    Parameters
    ----------
    tokens : float
        That the unfinished samples have in memory together.
    """
    before = min(max(-(-threshold // instances), 1), engine.batch)
    limit = engine.seconds_per_token[before] * (1 + slower)
    widest = int(np.searchsorted(engine.seconds_per_token[1:], limit, side="right"))
    by_batch = -(-threshold // max(widest, before))
    return int(min(max(by_batch, np.ceil(tokens / engine.memory_tokens), 1), instances))


def best_migration(
    dispatcher: Dispatcher,
    split: Split,
    link: Link,
    inference_s: float,
    watch: SearchControl,
    step_of: Callable[[Floats], float],
) -> Migration | None:
    """The threshold that makes the step shortest; None where none makes it shorter.

    Of thresholds that differ by less than :data:`EQUAL`, the one that frees most. Without inference to run:
    the one that frees most unit-seconds while generation takes at most :data:`TOLERANCE` longer.

    Parameters
    ----------
    dispatcher : Dispatcher
    split : Split
        How samples were dispatched.
    link : Link
    inference_s : float
        Seconds of one unit for one sample.
    watch : SearchControl
        Ends the search; what was found by then stands.
    step_of : callable
        Mean seconds of a step from when its samples are ready, (draws, samples).
    """
    samples, instances = dispatcher.samples, split.instances
    if instances < 2 or samples < 2 or watch.expired:
        return None
    finish = dispatcher.finish(split)
    limit = float(finish.max(1).mean()) * (1 + TOLERANCE)
    if inference_s > 0:
        limit = step_of(inference_after(finish, inference_s, instances))
    tried: list[tuple[float, Migration]] = []
    for threshold in sorted({min(max(round(share * samples), 1), samples - 1) for share in SHARES}):
        if watch.expired:
            break
        stops = _stops(dispatcher, split, threshold)
        held = float(np.mean([stop.held.sum() for stop in stops]))
        for remaining in _sizes(dispatcher.engine, threshold, instances, held):
            one = _migrate(dispatcher, split, stops, threshold, remaining, link, inference_s)
            seconds = step_of(one.ready_s) if inference_s > 0 else one.generation_s
            if seconds <= limit and one.freed_s > 0:
                tried.append((seconds, one))
    if not tried:
        return None
    least = min(seconds for seconds, _ in tried)
    near = [one for seconds, one in tried if seconds <= (1 + EQUAL) * least or inference_s == 0]
    return max(near, key=lambda one: one.freed_s)


def migrated(
    dispatcher: Dispatcher, split: Split, threshold: int, remaining: int, link: Link, inference_s: float
) -> Migration:
    """One threshold and number of remaining instances, simulated."""
    stops = _stops(dispatcher, split, threshold)
    return _migrate(dispatcher, split, stops, threshold, remaining, link, inference_s)


def _sizes(engine: Engine, threshold: int, instances: int, tokens: float) -> Iterable[int]:
    sizes = {enough(engine, threshold, instances, slower, tokens) for slower in SLOWER}
    least = enough(engine, threshold, instances, np.inf, tokens)
    sizes |= {max(round(share * instances), least) for share in REMAINING}
    return sorted(size for size in sizes if size < instances)


@dataclass(frozen=True)
class _Stop:
    """A step at the moment when few samples are left."""

    at_s: float
    state: Generated
    held: Ints


def _stops(dispatcher: Dispatcher, split: Split, threshold: int) -> list[_Stop]:
    engine, prompt = dispatcher.engine, dispatcher.engine.prompt_tokens
    queues = split.queues(dispatcher.samples, dispatcher.drawn.tail)
    stops = []
    for row in dispatcher.drawn.lengths:
        whole = generate(engine, row, queues)
        at = float(np.sort(whole.finish_s)[max(len(row) - threshold - 1, 0)])
        # A nanosecond more: the sample whose end is the moment has ended.
        state = generate(engine, row, queues, until_s=at * (1 + 1e-12))
        done = row - state.left
        held = np.where((state.left > 0) & (done > 0), done + prompt, 0)
        stops.append(_Stop(at, state, held))
    return stops


def _migrate(
    dispatcher: Dispatcher,
    split: Split,
    stops: list[_Stop],
    threshold: int,
    remaining: int,
    link: Link,
    inference_s: float,
) -> Migration:
    instances, samples = split.instances, dispatcher.samples
    ready, ends, freed, moved_count, moved_bytes = [], [], [], [], []
    for row, stop in zip(dispatcher.drawn.lengths, stops, strict=True):
        finish, moved, tokens = _gather(dispatcher.engine, row, stop, instances, remaining, link)
        end = float(finish.max())
        ends.append(end)
        freed.append((instances - remaining) * (end - stop.at_s))
        moved_count.append(moved)
        moved_bytes.append(tokens * link.bytes_per_token)
        ready.append(_inference(finish, stop.at_s, end, inference_s, instances, remaining))
    count = float(len(ready))
    return Migration(
        threshold=threshold,
        remaining=remaining,
        at_s=sum(stop.at_s for stop in stops) / count,
        moved=sum(moved_count) / count,
        moved_bytes=sum(moved_bytes) / count,
        generation_s=sum(ends) / count,
        stage_s=float(np.mean([row.max() for row in ready])),
        freed_s=sum(freed) / count,
        ready_s=np.array(ready).reshape(-1, samples),
        ends_s=np.array(ends),
    )


def _gather(
    engine: Engine, row: Ints, stop: _Stop, instances: int, remaining: int, link: Link
) -> tuple[Floats, int, int]:
    """Ends of all samples, how many with tokens moved, and these tokens."""
    left, home = stop.state.left, stop.state.home
    unfinished = np.flatnonzero(left > 0)
    # Those that wait in a queue are nobody's, and go where the fewest are.
    taken = unfinished[home[unfinished] >= 0]
    tokens = np.bincount(home[taken], weights=stop.held[taken], minlength=instances)
    # Those that hold most keep it; of equals the first.
    stay = np.argsort(-tokens, kind="stable")[:remaining]
    place = np.full(instances, -1)
    place[stay] = np.arange(remaining)
    seat = np.where(home[unfinished] >= 0, place[home[unfinished]], -1)
    queues = [unfinished[seat == number].tolist() for number in range(remaining)]
    loads = [(len(queue), number) for number, queue in enumerate(queues)]
    heapq.heapify(loads)
    received = np.zeros(remaining)
    moving = unfinished[seat < 0]
    for one, tokens_held in zip(moving.tolist(), stop.held[moving].tolist(), strict=True):
        load, number = heapq.heappop(loads)
        queues[number].append(one)
        received[number] += tokens_held
        heapq.heappush(loads, (load + 1, number))
    parts = [np.array(queue, dtype=np.int64) for queue in queues]
    # Running samples first: what waits goes on waiting.
    parts = [part[np.argsort(stop.held[part] == 0, kind="stable")] for part in parts]
    start = stop.at_s + received * link.bytes_per_token / link.bytes_per_s
    after = generate(engine, left, Queues.of(parts), done=row - left, resident=stop.held > 0, start_s=start)
    finish = np.where(np.isfinite(stop.state.finish_s), stop.state.finish_s, after.finish_s)
    return finish, int((stop.held[moving] > 0).sum()), int(received.sum())


def _inference(finish: Floats, at_s: float, end_s: float, each_s: float, instances: int, remaining: int) -> Floats:
    """When each sample is ready: inference on the freed instances, after generation on all."""
    if each_s == 0:
        return finish
    order = np.argsort(finish, kind="stable")
    slow, fast = each_s / (instances - remaining), each_s / instances
    arrive = np.maximum(finish[order], at_s)
    count = np.arange(len(order))
    # end_i = max(arrive_i, end_{i-1}) + slow, written out.
    ends = slow * (count + 1) + np.maximum.accumulate(arrive - slow * count)
    late = int(np.searchsorted(ends, end_s, side="right"))
    ends[late:] = end_s + fast * np.arange(1, len(order) - late + 1)
    ready = np.empty_like(ends)
    ready[order] = ends
    return ready
