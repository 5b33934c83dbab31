"""Generation instances and the queues that they take samples from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.errors import InfeasibleError

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

#: Memory without a limit: more tokens than any request holds.
UNLIMITED = 2**62


@dataclass(frozen=True)
class GenerationEngine:
    """One generation instance.

    Attributes
    ----------
    seconds_per_token : float64 array, (max_batch + 1,)
        The decode curve: seconds of one decoding step, by batch size. Index 0 is not used.
    memory_tokens : int
        Tokens whose keys and values fit into memory; :data:`UNLIMITED` if only the batch is limited.
    prompt_tokens : int
        Tokens of a prompt. They stay in memory while the sample is decoded.
    prefill_s : float
        Seconds that one prompt stalls its instance when the sample enters.
    reserve_tokens : int
        A waiting sample enters only if this many tokens are free beside its prompt. If memory still runs out,
        the sample that entered last is preempted, and its tokens are recomputed when it returns, as in serving
        engines.
    """

    seconds_per_token: Floats
    memory_tokens: int = UNLIMITED
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    reserve_tokens: int = 0

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
        """Highest throughput of one instance, over all batch sizes."""
        batches = np.arange(1, self.max_batch + 1)
        return float(np.max(batches / self.seconds_per_token[1:]))

    def refill_s(self) -> float:
        """Seconds to recompute the keys and values of one token."""
        return self.prefill_s / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class SampleQueues:
    """Queues of waiting samples, and the instances that serve each queue.

    Attributes
    ----------
    members : int64 array, (samples,)
        Indices of samples, queue by queue, in the order in which they are taken.
    starts : int64 array, (queues + 1,)
        Offset in ``members`` at which each queue begins.
    first_instances : int64 array, (queues + 1,)
        First instance of each queue; the instances of a queue are consecutive.
    """

    members: Ints
    starts: Ints
    first_instances: Ints

    @classmethod
    def shared(cls, samples: int, instances: int) -> SampleQueues:
        """One queue with samples 0, 1, ... that all instances take from.

        This is list scheduling; in order of falling length it is LPT (R. L. Graham, "Bounds on multiprocessing
        timing anomalies", 1969).
        """
        return cls.of([np.arange(samples, dtype=np.int64)], [instances])

    @classmethod
    def dealt(cls, samples: int, instances: int) -> SampleQueues:
        """One queue per instance; samples 0, 1, ... are dealt to them in turn."""
        return cls.of([np.arange(first, samples, instances, dtype=np.int64) for first in range(instances)])

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
