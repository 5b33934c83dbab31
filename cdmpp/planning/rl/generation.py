"""Generation of one step, sample by sample: instances with continuous batching under a KV memory.

StreamRL's model of decoding (arXiv:2504.15930, section 4): each token of a sample takes ``PTL(batch)``
seconds, where ``batch`` is how many samples the instance decodes at that moment. Nothing is averaged: the
batch shrinks as samples end and grows as waiting ones enter, and time advances from event to event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np

from cdmpp.compose.jit import jit
from cdmpp.errors import InfeasibleError

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

#: Stands for a memory without limit: more tokens than any request holds.
UNLIMITED = 2**62


@dataclass(frozen=True)
class Engine:
    """One generation instance.

    Attributes
    ----------
    seconds_per_token : float64 array, (largest batch + 1,)
        ``PTL(batch)`` at its index; index 0 is not used. Its length is the limit of the batch.
    memory_tokens : int
        Tokens whose keys and values fit; :data:`UNLIMITED` where only the batch is limited.
    prompt_tokens : int
        Tokens of a prompt, which stay in memory while its sample is decoded.
    prefill_s : float
        Seconds that one prompt stalls its instance when the sample enters.
    reserve_tokens : int
        A waiting sample enters while so many tokens are free beside its prompt (what it may be expected to
        need). Where memory still runs out, the sample that entered last leaves, and its tokens are
        computed again when it comes back, as serving engines do.
    """

    seconds_per_token: Floats
    memory_tokens: int = UNLIMITED
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    reserve_tokens: int = 0

    @property
    def batch(self) -> int:
        """Most samples at a time."""
        return len(self.seconds_per_token) - 1

    def limited(self, batch: int) -> Engine:
        """The same with at most ``batch`` samples at a time."""
        return replace(self, seconds_per_token=self.seconds_per_token[: min(batch, self.batch) + 1])

    def slower(self, factor: float) -> Engine:
        """The same with every cost times ``factor``."""
        return replace(self, seconds_per_token=self.seconds_per_token * factor, prefill_s=self.prefill_s * factor)

    def check(self, longest: int) -> None:
        """Raise :class:`InfeasibleError` where the memory does not hold one sample of ``longest`` tokens."""
        if self.memory_tokens < longest + self.prompt_tokens:
            raise InfeasibleError(
                f"a memory of {self.memory_tokens} tokens does not hold the longest sample, "
                f"{self.prompt_tokens} of the prompt and {longest} generated; the smallest that would holds "
                f"{longest + self.prompt_tokens} tokens",
                hint="give that much, or a smaller max_tokens",
            )

    def tokens_per_s(self) -> float:
        """Most tokens that an instance makes in a second, at its best batch."""
        batches = np.arange(1, self.batch + 1)
        return float(np.max(batches / self.seconds_per_token[1:]))

    def refill_s(self) -> float:
        """Seconds to compute one token's keys and values again."""
        return self.prefill_s / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class Queues:
    """Which samples wait in which queue, in the order in which they are taken, and which instances take them.

    Attributes
    ----------
    members : int64 array, (samples,)
        Numbers of samples, queue by queue.
    starts : int64 array, (queues + 1,)
        Where each queue's part of ``members`` begins.
    takers : int64 array, (queues + 1,)
        Where each queue's instances begin, in the order of instances.
    """

    members: Ints
    starts: Ints
    takers: Ints

    @classmethod
    def shared(cls, samples: int, instances: int) -> Queues:
        """Samples 0, 1, ... in one queue, from which whichever instance has room takes the next.

        List scheduling; longest first, LPT (R. L. Graham, "Bounds on multiprocessing timing anomalies",
        1969).
        """
        return cls.of([np.arange(samples, dtype=np.int64)], [instances])

    @classmethod
    def dealt(cls, samples: int, instances: int) -> Queues:
        """Deal samples 0, 1, ... round the instances beforehand, a queue to each."""
        return cls.of([np.arange(first, samples, instances, dtype=np.int64) for first in range(instances)])

    @classmethod
    def of(cls, parts: Sequence[Ints], instances: Sequence[int] | None = None) -> Queues:
        """From one array of samples for each queue, and its number of instances (one)."""
        starts, takers = (np.zeros(len(parts) + 1, dtype=np.int64) for _ in range(2))
        np.cumsum([len(part) for part in parts], out=starts[1:])
        np.cumsum([1] * len(parts) if instances is None else instances, out=takers[1:])
        return cls(np.concatenate(parts).astype(np.int64), starts, takers)

    @property
    def instances(self) -> int:
        """How many there are."""
        return int(self.takers[-1])


@dataclass(frozen=True)
class Generated:
    """What a simulation found.

    Attributes
    ----------
    finish_s : float64 array, (samples,)
        When each sample ended; infinite where it had not by ``until_s``.
    left : int64 array, (samples,)
        Tokens that it still lacks.
    home : int64 array, (samples,)
        The instance that took it; -1 where none had by ``until_s``.
    preemptions : int
        How often a sample left for lack of memory.
    """

    finish_s: Floats
    left: Ints
    home: Ints
    preemptions: int

    @property
    def end_s(self) -> float:
        """When the last ended."""
        return float(self.finish_s.max()) if len(self.finish_s) else 0.0


def generate(
    engine: Engine,
    lengths: Ints,
    queues: Queues,
    *,
    done: Ints | None = None,
    resident: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
    start_s: Floats | None = None,
    until_s: float = np.inf,
) -> Generated:
    """Simulate the generation of a step.

    An instance asks its queue when it begins and whenever a sample of its own has ended, and takes while it
    has room. Of instances that ask at the same moment, the one with the fewest samples takes first, then
    the one with the lowest number, one sample at a time.

    Parameters
    ----------
    engine : Engine
        Of every instance.
    lengths : int64 array, (samples,)
        Tokens that each sample (still) has to get.
    queues : Queues
    done : int64 array, (samples,), optional
        Tokens that it has already. Default: none.
    resident : bool array, (samples,), optional
        Whose keys and values are there, so that entering costs nothing. Default: nobody's.
    start_s : float64 array, (instances,), optional
        When each instance begins. Default: 0.
    until_s : float
        Stop then, between two tokens.
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
        queues.takers,
        held,
        fill,
        engine.refill_s(),
        engine.seconds_per_token,
        engine.memory_tokens,
        engine.reserve_tokens,
        starts,
        until_s,
        finish,
        left,
        home,
    )
    return Generated(finish, left, home, int(preemptions))


@jit
def _run(
    members: Ints,
    bounds: Ints,
    takers: Ints,
    held: Ints,
    fill_s: Floats,
    refill_s: float,
    seconds_per_token: Floats,
    memory: int,
    reserve: int,
    start_s: Floats,
    until_s: float,
    finish_s: Floats,
    left: Ints,
    home: Ints,
) -> int:
    """All instances; writes all after ``until_s``, ``held`` and ``fill_s``; returns the preemptions."""
    most = len(seconds_per_token) - 1
    count, instances = len(left), len(start_s)
    entered = np.zeros(count, dtype=np.int64)
    # The step at which a sample ends; -1 while it does not run. Tells stale entries of the heap apart.
    due = np.full(count, -1, dtype=np.int64)
    preemptions = 0
    # Of each instance, from one of its turns to the next.
    steps_made = np.zeros(instances, dtype=np.int64)
    memory_used = np.zeros(instances, dtype=np.int64)
    blocks = np.zeros(instances, dtype=np.bool_)
    heaps = [[0] for _ in range(instances)]
    comings = [[0] for _ in range(instances)]
    backs = [[0] for _ in range(instances)]
    for instance in range(instances):
        heaps[instance].clear()
        comings[instance].clear()
        backs[instance].clear()
    for queue in range(len(bounds) - 1):
        following, last = bounds[queue], bounds[queue + 1]
        # By clock, then by samples, then by number: whose turn it is.
        turns = [(start_s[0], 0, 0)]
        turns.clear()
        for instance in range(takers[queue], takers[queue + 1]):
            heappush(turns, (start_s[instance], 0, instance))
        while len(turns) > 0:
            now, active, instance = heappop(turns)
            step, used, blocked = steps_made[instance], memory_used[instance], blocks[instance]
            heap, came, back = heaps[instance], comings[instance], backs[instance]
            while True:
                one = -1
                if active < most and not blocked and now < until_s:
                    if len(back) > 0:
                        one = back[-1]
                    elif following < last:
                        one = members[following]
                    if one >= 0 and active > 0 and used + held[one] + min(reserve, left[one]) > memory:
                        one = -1
                if one >= 0:
                    if len(back) > 0:
                        back.pop()
                    else:
                        following += 1
                        home[one] = instance
                    now += fill_s[one]
                    entered[one] = step
                    due[one] = step + left[one]
                    heappush(heap, due[one] * count + one)
                    came.append(one)
                    used += held[one]
                    active += 1
                else:
                    if active == 0:
                        break
                    while due[heap[0] % count] != heap[0] // count:
                        heappop(heap)
                    steps = heap[0] // count - step
                    each = seconds_per_token[active]
                    # A lone sample always fits (Engine.check).
                    short = active > 1 and (memory - used) // active < steps
                    if short:
                        steps = max((memory - used) // active, 0)
                    if now + steps * each > until_s:
                        # No token is cut in two: one that has begun is made elsewhere, from its beginning.
                        step += int(max(until_s - now, 0.0) / each)
                        break
                    now += steps * each
                    step += steps
                    used += steps * active
                    if short:
                        # The last that came and still runs.
                        while due[came[-1]] < 0:
                            came.pop()
                        one = came.pop()
                        made = step - entered[one]
                        used -= held[one] + made
                        held[one] += made
                        left[one] -= made
                        fill_s[one] += refill_s * made
                        due[one] = -1
                        # It comes back to its own instance, before others.
                        back.append(one)
                        active -= 1
                        preemptions += 1
                        # Nobody enters before somebody has ended: else the same sample would come and go.
                        blocked = True
                    else:
                        # All that end with this token, before others enter.
                        while len(heap) > 0 and heap[0] // count <= step:
                            ended = heappop(heap)
                            one = ended % count
                            if due[one] != ended // count:
                                continue
                            finish_s[one] = now
                            used -= held[one] + left[one]
                            left[one] = 0
                            due[one] = -1
                            active -= 1
                        blocked = False
                # What is taken from a queue is taken in the order of time.
                if len(turns) > 0 and turns[0] < (now, active, instance):
                    heappush(turns, (now, active, instance))
                    break
            steps_made[instance], memory_used[instance], blocks[instance] = step, used, blocked
    for one in range(count):
        if due[one] >= 0:
            left[one] -= steps_made[home[one]] - entered[one]
    return preemptions
