"""Cost of training, and step times from the times at which samples are ready: streamed and off-policy training.

StreamRL (section 4): synchronous training starts on the samples that are ready (dynamic-batch pipelining).
Asynchronous training uses samples of earlier steps and overlaps the transfer of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cdmpp.plan.rl.generation import Floats, Ints

Mode = Literal["sync", "async"]
#: Largest number of batches of a streamed step.
MOST_BATCHES = 32


@dataclass(frozen=True)
class SizedCosts:
    """Costs of training by the number of units, each with a layout of its own."""

    units: Ints  # numbers of units that can train, growing
    # (len(units),): seconds of a token, of an update besides its tokens, of the forward passes of a token, and of
    # moving the training state out of the devices and back if the same units generate.
    token_s: Floats
    update_s: Floats
    inference_s: Floats
    swap_s: Floats

    def at(self, units: Floats | float) -> Ints:
        """Index of each number of units; that of the next larger one for others."""
        return np.minimum(np.searchsorted(self.units, np.asarray(units)), len(self.units) - 1)

    def scaled(self, training: float, inference: float, transfer: float) -> SizedCosts:
        """The costs times factors."""
        update_s, swap_s = training * self.update_s, transfer * self.swap_s
        return SizedCosts(self.units, training * self.token_s, update_s, inference * self.inference_s, swap_s)


@dataclass(frozen=True)
class TrainingCost:
    """Seconds of training on the samples of a step."""

    # Seconds on one unit, per sample and per token of prompt and response.
    per_sample_s: float = 0.0
    per_token_s: float = 0.0
    fixed_s: float = 0.0  # seconds added once per step, for any number of units: optimizer, synchronisation
    efficiency: float = 1.0  # share of the ideal speed-up that remains at each doubling of the units, in (0.5, 1]
    batch_overhead_s: float = 0.0  # seconds added per batch of a streamed step
    # Seconds of inference per sample on one unit, if the training units run it. It scales ideally.
    inference_s: float = 0.0
    # Seconds of one run of a pipeline schedule, which trains on ``run_samples`` samples; 0: no pipelines. With
    # ``sized``, ``run_samples`` is the number of samples of an update.
    run_s: float = 0.0
    # Samples of one run, and units of one pipeline. Pipelines train side by side on equal numbers of samples.
    run_samples: int = 1
    run_units: int = 1
    memory_units: int = 1  # fewest units whose memory holds weights, gradients and optimizer states
    sized: SizedCosts | None = None  # in place of all other seconds but ``fixed_s`` and ``batch_overhead_s``

    def can_train(self, units: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each number of units can train."""
        if self.sized is not None:
            return np.isin(units, self.sized.units)
        # Whole pipelines hold the training state.
        return units >= -(-self.memory_units // self.run_units) * self.run_units

    def inference_work_s(self, samples: Floats | float, tokens: Floats | float, units: Floats | float) -> Floats:
        """Seconds of inference on the training units."""
        if self.sized is not None:
            return np.asarray(self.sized.inference_s[self.sized.at(units)] * tokens)
        return np.asarray(self.inference_s * samples / np.asarray(units, dtype=np.float64))

    def swap_s(self, units: int) -> float:
        """Seconds to move the training state out of the devices and back, if the same units generate."""
        return 0.0 if self.sized is None else float(self.sized.swap_s[self.sized.at(units)])

    def speedup(self, units: Floats | float) -> Floats:
        """Speed-up of ``units`` over one unit."""
        count = np.asarray(units, dtype=np.float64)
        return count * self.efficiency ** np.log2(count)

    def work_s(self, samples: Floats | float, tokens: Floats | float, units: Floats | float) -> Floats:
        """Seconds of work on samples and tokens, without pipelines, ``fixed_s`` and ``batch_overhead_s``."""
        inferred = self.inference_work_s(samples, tokens, units)
        if self.sized is not None:
            return np.asarray(self.sized.token_s[self.sized.at(units)] * tokens + inferred)
        on_one_unit = self.per_sample_s * samples + self.per_token_s * np.asarray(tokens)
        return on_one_unit / self.speedup(units) + inferred

    def pipelines(self, units: Floats | float) -> Floats:
        """Number of pipelines on ``units`` units; at least 1."""
        return np.maximum(np.asarray(units, dtype=np.float64) // self.run_units, 1.0)

    def runs(self, samples: Floats | float, units: Floats | float) -> Floats:
        """Runs of the pipeline schedule, one after the other, that train on ``samples`` samples."""
        return np.ceil(np.asarray(samples) / (self.pipelines(units) * self.run_samples))

    def runs_s(self, samples: Floats | float, units: Floats | float) -> Floats:
        """Seconds of the pipelines, or of updates besides their tokens, for one batch of samples."""
        if self.sized is not None:
            return np.asarray(self.sized.update_s[self.sized.at(units)] * np.ceil(samples / self.run_samples))
        slowdown = self.efficiency ** np.log2(self.pipelines(units))
        return self.run_s * self.runs(samples, units) / slowdown

    def whole_s(self, samples: Floats | float, tokens: Floats | float, units: Floats | float) -> Floats:
        """Seconds of a step's training in one batch."""
        work = self.work_s(samples, tokens, units) + self.runs_s(samples, units)
        return work + self.batch_overhead_s + self.fixed_s


@dataclass(frozen=True)
class ReadyTimes:
    """Times at which parts of a step are ready for training."""

    at_s: Floats  # (draws, parts): time at which the first ``samples`` samples are ready
    samples: Floats  # (parts,): cumulative number of samples
    tokens: Floats  # (draws, parts): cumulative tokens of prompts and responses

    @classmethod
    def of(cls, ready_s: Floats, lengths: Ints, prompt_tokens: int) -> ReadyTimes:
        """From the ready time and the length of each sample, both (draws, samples)."""
        order = np.argsort(ready_s, axis=1, kind="stable")
        tokens = np.cumsum(np.take_along_axis(lengths, order, axis=1) + prompt_tokens, axis=1)
        count = ready_s.shape[1]
        parts = 1
        while parts * 2 <= min(MOST_BATCHES, count):
            parts *= 2
        last = np.ceil(count * np.arange(1, parts + 1) / parts).astype(np.int64) - 1
        at = np.take_along_axis(ready_s, order, axis=1)[:, last]
        return cls(at, (last + 1).astype(np.float64), tokens[:, last].astype(np.float64))

    def batch_counts(self) -> list[int]:
        """Possible numbers of batches: 1, 2, 4, ..."""
        return [2**k for k in range(len(self.samples).bit_length())]

    def trained(self, cost: TrainingCost, units: Ints, batches: int) -> tuple[Floats, Floats]:
        """End of training and its idle seconds for a step of ``batches`` batches, both (draws, len(units)).

        Training starts on a batch when its samples are ready and the previous batch is done. It is idle while it
        waits for samples between its first and its last batch.
        """
        last_parts = np.arange(1, batches + 1) * (len(self.samples) // batches) - 1
        # Cumulative, then per batch: (draws, batches, units).
        work = cost.work_s(self.samples[last_parts, None], self.tokens[:, last_parts, None], units.astype(np.float64))
        batch_samples = np.diff(self.samples[last_parts], prepend=0.0)[:, None]
        batch_s = np.diff(work, prepend=0.0, axis=1) + cost.runs_s(batch_samples, units.astype(np.float64))
        end = np.zeros((len(self.at_s), len(units)))
        idle = np.zeros_like(end)
        for batch, part in enumerate(last_parts):
            ready = self.at_s[:, part, None]
            if batch:
                idle += np.maximum(ready - end, 0.0)
            end = np.maximum(end, ready) + batch_s[:, batch] + cost.batch_overhead_s
        return end + cost.fixed_s, idle


def asynchronous_step(
    generation_s: Floats, training_s: Floats, weights_s: Floats | float, staleness: int | None
) -> Floats:
    """Seconds from one step to the next if generation and training overlap, with ``weights_s`` to transfer new weights.

    With a ``staleness`` of k >= 1, generation of step i starts when the weights after the training of step i - 1 - k
    have arrived. None is 2: generation never waits for weights.

    Generation, training and transfer each work on one step at a time, so a step takes at least the longest of them.
    Generation, training and transfer of a step, one after the other, must end within k + 1 steps:
    ``max(g, t, w, (g + t + w) / (k + 1))``. This is the largest cycle mean of the dependencies, so the period of equal
    steps. With k >= 2 the last term is never the largest.
    """
    longest = np.maximum(np.maximum(generation_s, training_s), weights_s)
    if staleness is None:
        return longest
    return np.maximum(longest, (generation_s + training_s + weights_s) / (staleness + 1))


def step_times(
    ready: ReadyTimes, cost: TrainingCost, units: Ints, mode: Mode, weights_s: float, staleness: int | None = None
) -> tuple[Floats, Ints]:
    """Step times (draws, units) by number of training units, and the best number of batches of each, (units,).

    ``weights_s``: seconds to transfer the new weights to generation. "sync": added after training. "async": overlapped,
    as :func:`asynchronous_step` describes.
    """
    if mode == "async":
        whole = cost.whole_s(ready.samples[-1], ready.tokens[:, -1, None], units.astype(np.float64))
        seconds = asynchronous_step(ready.at_s[:, -1, None], whole, weights_s, staleness)
        return seconds, np.ones(len(units), dtype=np.int64)
    counts = np.array(ready.batch_counts(), dtype=np.int64)
    ends = [ready.trained(cost, units, batches)[0] for batches in counts.tolist()]
    best = np.array([end.mean(0) for end in ends]).argmin(0)
    return np.array(ends)[best, :, np.arange(len(units))].T + weights_s, counts[best]
