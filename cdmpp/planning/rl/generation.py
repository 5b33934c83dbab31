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
        return replace(
            self, seconds_per_token=self.seconds_per_token * factor, prefill_s=self.prefill_s * factor
        )

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
    """Which samples wait at which instance, in the order in which they enter.

    Attributes
    ----------
    members : int64 array, (samples,)
        Numbers of samples, instance by instance.
    starts : int64 array, (instances + 1,)
        Where each instance's part of ``members`` begins.
    """

    members: Ints
    starts: Ints

    @classmethod
    def dealt(cls, samples: int, instances: int) -> Queues:
        """Deal samples 0, 1, ... round the instances; longest first makes this LPT within each."""
        parts = [np.arange(first, samples, instances, dtype=np.int64) for first in range(instances)]
        return cls.of(parts)

    @classmethod
    def of(cls, parts: Sequence[Ints]) -> Queues:
        """From one array of samples for each instance."""
        starts = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=starts[1:])
        return cls(np.concatenate(parts).astype(np.int64), starts)

    @property
    def instances(self) -> int:
        """How many there are."""
        return len(self.starts) - 1


@dataclass(frozen=True)
class Generated:
    """What a simulation found.

    Attributes
    ----------
    finish_s : float64 array, (samples,)
        When each sample ended; infinite where it had not by ``until_s``.
    left : int64 array, (samples,)
        Tokens that it still lacks.
    preemptions : int
        How often a sample left for lack of memory.
    """

    finish_s: Floats
    left: Ints
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
    preemptions = _run(
        queues.members, queues.starts, held, fill, engine.refill_s(), engine.seconds_per_token,
        engine.memory_tokens, engine.reserve_tokens, starts, until_s, finish, left,
    )  # fmt: skip
    return Generated(finish, left, int(preemptions))


@jit
def _run(
    members: Ints,
    bounds: Ints,
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
) -> int:
    """All instances; writes ``finish_s``, ``left``, ``held`` and ``fill_s``, returns the preemptions."""
    most = len(seconds_per_token) - 1
    count = len(left)
    entered = np.zeros(count, dtype=np.int64)
    # The step at which a sample ends; -1 while it does not run. Tells stale entries of the heap apart.
    due = np.full(count, -1, dtype=np.int64)
    preemptions = 0
    for instance in range(len(bounds) - 1):
        following, last = bounds[instance], bounds[instance + 1]
        now = start_s[instance]
        step, active, used = 0, 0, 0
        blocked = False
        heap = [0]
        heap.clear()
        came = [0]
        came.clear()
        back = [0]
        back.clear()
        while True:
            while active < most and not blocked and now < until_s:
                if len(back) > 0:
                    one = back[-1]
                elif following < last:
                    one = members[following]
                else:
                    break
                if active > 0 and used + held[one] + min(reserve, left[one]) > memory:
                    break
                if len(back) > 0:
                    back.pop()
                else:
                    following += 1
                now += fill_s[one]
                entered[one] = step
                due[one] = step + left[one]
                heappush(heap, due[one] * count + one)
                came.append(one)
                used += held[one]
                active += 1
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
        for place in range(bounds[instance], last):
            one = members[place]
            if due[one] >= 0:
                left[one] -= step - entered[one]
                due[one] = -1
    return preemptions
