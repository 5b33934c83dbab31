"""Event-driven simulation of one step's generation: continuous batching with a limited KV cache.

The latency model is StreamRL's (arXiv:2504.15930, section 4): one decoding step takes ``seconds_per_token[batch]``,
where ``batch`` is the number of samples that the instance decodes at that moment, and ``seconds_per_cached[batch]`` for
each of their cached tokens. The batch shrinks when samples end and grows when waiting samples enter; time advances
from event to event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from cdmpp.errors import InfeasibleError
from cdmpp.utils.jit import jit

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

#: Memory without a limit: more tokens than any request holds.
UNLIMITED = 2**62


@dataclass(frozen=True)
class GenerationEngine:
    """One generation instance."""

    # (max_batch + 1,): the decode curve: seconds of one decoding step, by batch size. Index 0 is not used.
    seconds_per_token: Floats
    # Tokens whose keys and values fit into memory; :data:`UNLIMITED` if only the batch is limited.
    memory_tokens: int = UNLIMITED
    prompt_tokens: int = 0  # tokens of a prompt; they stay in memory while the sample is decoded
    prefill_s: float = 0.0  # seconds that one prompt stalls its instance when the sample enters
    # A waiting sample enters only if this many tokens are free beside its prompt. If memory still runs out, the sample
    # that entered last is preempted, and its tokens are recomputed when it returns, as in serving engines.
    reserve_tokens: int = 0
    # (max_batch + 1,): seconds that each cached token of the batch adds to a step, by batch size. Default: 0.
    seconds_per_cached: Floats = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not len(self.seconds_per_cached):
            object.__setattr__(self, "seconds_per_cached", np.zeros(len(self.seconds_per_token)))

    @property
    def max_batch(self) -> int:
        """Largest batch."""
        return len(self.seconds_per_token) - 1

    def check(self, longest: int) -> None:
        """Raise :class:`InfeasibleError` if one sample of ``longest`` tokens does not fit into memory."""
        if self.memory_tokens < longest + self.prompt_tokens:
            raise InfeasibleError(
                f"a memory of {self.memory_tokens} tokens does not hold the longest sample "
                f"({self.prompt_tokens} prompt tokens and {longest} generated tokens); the smallest that does holds "
                f"{longest + self.prompt_tokens} tokens",
                hint="give that much memory, or a smaller max_tokens",
            )

    def tokens_per_s(self) -> float:
        """Highest throughput of one instance with an empty cache, over all batch sizes."""
        batches = np.arange(1, self.max_batch + 1)
        return float(np.max(batches / self.seconds_per_token[1:]))

    def cached_s(self, lengths: Ints) -> Floats:
        """Least seconds for the cached tokens of samples, at any batch size; as ``lengths``."""
        steps = lengths.astype(np.float64)
        read = steps * self.prompt_tokens + steps * (steps - 1) / 2
        return np.asarray(self.seconds_per_cached[1:].min() * read)

    def usual_s(self, batch: Ints, length: float) -> Floats:
        """Seconds of a step of ``batch`` samples that have half of ``length``."""
        cached = batch * (self.prompt_tokens + length / 2)
        return self.seconds_per_token[batch] + self.seconds_per_cached[batch] * cached

    def refill_s(self) -> float:
        """Seconds to recompute the keys and values of one token."""
        return self.prefill_s / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class SampleQueues:
    """Queues of waiting samples, and the instances that serve each queue."""

    members: Ints  # (samples,): indices of samples, queue by queue, in the order in which they are taken
    starts: Ints  # (queues + 1,): offset in ``members`` at which each queue begins
    first_instances: Ints  # (queues + 1,): first instance of each queue; the instances of a queue are consecutive

    @classmethod
    def shared(cls, samples: int, instances: int) -> SampleQueues:
        """One queue with samples 0, 1, ... that all instances take from.

        This is list scheduling; in order of falling length it is LPT (R. L. Graham, "Bounds on multiprocessing
        timing anomalies", 1969).
        """
        return cls.of([np.arange(samples, dtype=np.int64)], [instances])

    @classmethod
    def of(cls, queues: Sequence[Ints], instances: Sequence[int] | None = None) -> SampleQueues:
        """Queues from one array of sample indices each, and their numbers of instances (default: 1 each)."""
        starts, first_instances = (np.zeros(len(queues) + 1, dtype=np.int64) for _ in range(2))
        np.cumsum([len(queue) for queue in queues], out=starts[1:])
        np.cumsum([1] * len(queues) if instances is None else instances, out=first_instances[1:])
        return cls(np.concatenate(queues).astype(np.int64), starts, first_instances)

    @property
    def instances(self) -> int:
        """Number of instances of all queues."""
        return int(self.first_instances[-1])


@dataclass(frozen=True)
class GenerationResult:
    """Result of a simulation."""

    finish_s: Floats  # (samples,): time at which each sample ended; infinite if it had not ended by ``until_s``
    left: Ints  # (samples,): tokens still to be generated
    home: Ints  # (samples,): instance that took the sample; -1 if it was still waiting at ``until_s``
    preemptions: int  # number of preemptions for lack of memory

    @property
    def end_s(self) -> float:
        """Time at which the last sample ended."""
        return float(self.finish_s.max()) if len(self.finish_s) else 0.0


def generate(
    engine: GenerationEngine,
    lengths: Ints,
    queues: SampleQueues,
    *,
    done: Ints | None = None,
    resident: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
    start_s: Floats | None = None,
    until_s: float = np.inf,
) -> GenerationResult:
    """Simulate the generation of a step.

    An instance takes samples from its queue at its start and whenever one of its samples has ended, while it has
    room. If several instances can take one at the same moment, the one with the fewest samples is first, then the
    one with the lowest index; each takes one sample at a time.

    ``lengths`` (samples,): tokens that each sample still has to generate. ``done`` (samples,): tokens already
    generated. ``resident`` (samples,): whether keys and values are in memory already: such samples enter without a
    prefill. ``start_s`` (instances,): start of each instance. ``until_s``: time at which the simulation stops, between
    two tokens.
    """
    held = np.full(len(lengths), engine.prompt_tokens, dtype=np.int64)
    fill = np.full(len(lengths), engine.prefill_s)
    if done is not None:
        held += done
        fill += engine.refill_s() * done
    if resident is not None:
        fill[resident] = 0.0
    starts = np.zeros(queues.instances) if start_s is None else start_s
    finish, left = np.full(len(lengths), np.inf), lengths.astype(np.int64)
    home = np.full(len(lengths), -1, dtype=np.int64)
    preemptions = _run(
        queues.members,
        queues.starts,
        queues.first_instances,
        held,
        fill,
        engine.refill_s(),
        engine.seconds_per_token,
        engine.seconds_per_cached,
        engine.memory_tokens,
        engine.reserve_tokens,
        starts,
        until_s,
        finish,
        left,
        home,
    )
    return GenerationResult(finish, left, home, int(preemptions))


def compile_loops() -> None:
    """Compile the simulation, or load it from the cache, before the budget of a search begins."""
    sample = np.ones(1, dtype=np.int64)
    generate(GenerationEngine(np.ones(2)), sample, SampleQueues.shared(1, 1))


@jit
def _run(
    members: Ints,
    queue_starts: Ints,
    first_instances: Ints,
    held: Ints,
    fill_s: Floats,
    refill_s: float,
    seconds_per_token: Floats,
    seconds_per_cached: Floats,
    memory: int,
    reserve: int,
    start_s: Floats,
    until_s: float,
    finish_s: Floats,
    left: Ints,
    home: Ints,
) -> int:
    """Simulate all instances; writes ``held``, ``fill_s``, ``finish_s``, ``left`` and ``home``; returns preemptions."""
    max_batch = len(seconds_per_token) - 1
    count, instances = len(left), len(start_s)
    entered = np.zeros(count, dtype=np.int64)
    # Decoding step at which a running sample ends, else -1. Entries of `ends` that differ from it are stale.
    due = np.full(count, -1, dtype=np.int64)
    preemptions = 0
    # State of each instance between two of its turns.
    steps_made = np.zeros(instances, dtype=np.int64)
    memory_used = np.zeros(instances, dtype=np.int64)
    is_blocked = np.zeros(instances, dtype=np.bool_)
    all_ends = [[0] for _ in range(instances)]
    all_entries = [[0] for _ in range(instances)]
    all_preempted = [[0] for _ in range(instances)]
    for instance in range(instances):
        all_ends[instance].clear()
        all_entries[instance].clear()
        all_preempted[instance].clear()
    for queue in range(len(queue_starts) - 1):
        waiting, queue_end = queue_starts[queue], queue_starts[queue + 1]
        # Heap of (time, running samples, instance): the smallest has the next turn.
        turns = [(start_s[0], 0, 0)]
        turns.clear()
        for instance in range(first_instances[queue], first_instances[queue + 1]):
            heappush(turns, (start_s[instance], 0, instance))
        while len(turns) > 0:
            now, active, instance = heappop(turns)
            step, used, blocked = steps_made[instance], memory_used[instance], is_blocked[instance]
            ends, entries, preempted = all_ends[instance], all_entries[instance], all_preempted[instance]
            while True:
                sample = -1
                if active < max_batch and not blocked and now < until_s:
                    if len(preempted) > 0:
                        sample = preempted[-1]
                    elif waiting < queue_end:
                        sample = members[waiting]
                    if sample >= 0 and active > 0 and used + held[sample] + min(reserve, left[sample]) > memory:
                        sample = -1
                if sample >= 0:
                    if len(preempted) > 0:
                        preempted.pop()
                    else:
                        waiting += 1
                        home[sample] = instance
                    now += fill_s[sample]
                    entered[sample] = step
                    due[sample] = step + left[sample]
                    heappush(ends, due[sample] * count + sample)
                    entries.append(sample)
                    used += held[sample]
                    active += 1
                else:
                    if active == 0:
                        break
                    while due[ends[0] % count] != ends[0] // count:
                        heappop(ends)
                    steps = ends[0] // count - step
                    step_s = seconds_per_token[active]
                    # A single sample always fits (GenerationEngine.check).
                    out_of_memory = active > 1 and (memory - used) // active < steps
                    if out_of_memory:
                        steps = max((memory - used) // active, 0)
                    # Each step reads all cached tokens, and adds one of each sample.
                    step_s += seconds_per_cached[active] * (used - active / 2)
                    growth_s = seconds_per_cached[active] * active / 2
                    if now + steps * (step_s + growth_s * steps) > until_s:
                        # Tokens are not divided: a token in progress is generated again after the stop.
                        left_s = max(until_s - now, 0.0)
                        if growth_s > 0.0:
                            root = (step_s * step_s + 4.0 * growth_s * left_s) ** 0.5
                            left_s = 2.0 * step_s * left_s / (step_s + root)
                        step += int(left_s / step_s)
                        break
                    now += steps * (step_s + growth_s * steps)
                    step += steps
                    used += steps * active
                    if out_of_memory:
                        # Preempt the running sample that entered last.
                        while due[entries[-1]] < 0:
                            entries.pop()
                        sample = entries.pop()
                        made = step - entered[sample]
                        used -= held[sample] + made
                        held[sample] += made
                        left[sample] -= made
                        fill_s[sample] += refill_s * made
                        due[sample] = -1
                        # It returns to the same instance, before samples of the queue.
                        preempted.append(sample)
                        active -= 1
                        preemptions += 1
                        # No sample enters before another has ended, or this one would alternate.
                        blocked = True
                    else:
                        # End all samples of this token before others enter.
                        while len(ends) > 0 and ends[0] // count <= step:
                            entry = heappop(ends)
                            sample = entry % count
                            if due[sample] != entry // count:
                                continue
                            finish_s[sample] = now
                            used -= held[sample] + left[sample]
                            left[sample] = 0
                            due[sample] = -1
                            active -= 1
                        blocked = False
                # Samples leave the queue in the order of time.
                if len(turns) > 0 and turns[0] < (now, active, instance):
                    heappush(turns, (now, active, instance))
                    break
            steps_made[instance], memory_used[instance], is_blocked[instance] = step, used, blocked
    for sample in range(count):
        if due[sample] >= 0:
            left[sample] -= steps_made[home[sample]] - entered[sample]
    return preemptions
