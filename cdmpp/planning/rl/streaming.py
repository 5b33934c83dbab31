"""From ends of samples to the end of a step: batches streamed into training, and one-step overlap.

StreamRL (section 4): synchronous training starts on the samples that are there (dynamic-batch pipelining);
asynchronous training takes the samples of the step before, and hides the weights' transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cdmpp.planning.rl.costs import TrainingCost
from cdmpp.planning.rl.generation import Floats, Ints

Mode = Literal["sync", "async"]
#: Into how many batches a step may be cut.
MOST_BATCHES = 32


@dataclass(frozen=True)
class Ready:
    """When parts of a step are ready for training.

    Attributes
    ----------
    at_s : float64 array, (draws, parts)
        When so many samples are ready.
    samples, tokens : float64 arrays, (parts,) and (draws, parts)
        How many these are, and their tokens with the prompts.
    """

    at_s: Floats
    samples: Floats
    tokens: Floats

    @classmethod
    def of(cls, ready_s: Floats, lengths: Ints, prompt_tokens: int) -> Ready:
        """From when each sample is ready and its length, both (draws, samples)."""
        order = np.argsort(ready_s, axis=1, kind="stable")
        tokens = np.cumsum(np.take_along_axis(lengths, order, axis=1) + prompt_tokens, axis=1)
        count = ready_s.shape[1]
        parts = 1
        while parts * 2 <= min(MOST_BATCHES, count):
            parts *= 2
        last = np.ceil(count * np.arange(1, parts + 1) / parts).astype(np.int64) - 1
        at = np.take_along_axis(ready_s, order, axis=1)[:, last]
        return cls(at, (last + 1).astype(np.float64), tokens[:, last].astype(np.float64))

    @property
    def end_s(self) -> Floats:
        """When the last sample is ready, (draws,)."""
        end: Floats = self.at_s[:, -1]
        return end

    def choices(self) -> list[int]:
        """Numbers of batches that it can be cut into: 1, 2, 4, ..."""
        return [2**k for k in range(len(self.samples).bit_length())]

    def trained(self, cost: TrainingCost, units: Ints, batches: int) -> tuple[Floats, Floats]:
        """End of training and its idle seconds, (draws, len(units)) each, for a step of ``batches``.

        Training works on a batch once its samples are ready and the batch before is done; it is idle
        between its first batch and its last where it waits for samples.
        """
        places = np.arange(1, batches + 1) * (len(self.samples) // batches) - 1
        # (draws, batches, units): each batch's share of the work.
        many = units.astype(np.float64)
        work = cost.work_s(self.samples[places, None], self.tokens[:, places, None], many)
        each = np.diff(work, prepend=0.0, axis=1)
        end = np.zeros((len(self.at_s), len(units)))
        idle = np.zeros_like(end)
        for batch, place in enumerate(places):
            ready = self.at_s[:, place, None]
            if batch:
                idle += np.maximum(ready - end, 0.0)
            end = np.maximum(end, ready) + each[:, batch] + cost.batch_overhead_s
        return end + cost.fixed_s, idle


@dataclass(frozen=True)
class Steps:
    """Step times by units of training.

    Attributes
    ----------
    seconds : float64 array, (draws, len(units))
    idle_s : float64 array, as ``seconds``
        Training's waiting within the step.
    batches : int64 array, (len(units),)
        Into how many batches the step is cut.
    """

    seconds: Floats
    idle_s: Floats
    batches: Ints


def step_times(ready: Ready, cost: TrainingCost, units: Ints, mode: Mode, weights_s: float) -> Steps:
    """Steps with so many units of training, each cut into the best number of batches.

    Parameters
    ----------
    ready : Ready
    cost : TrainingCost
    units : int64 array
        Sizes of the training pool, each apart.
    mode : {"sync", "async"}
    weights_s : float
        Transfer of the new weights to generation: after training when synchronous; beside both stages, and
        shorter than them, when not.
    """
    if mode == "async":
        whole = cost.whole_s(ready.samples[-1], ready.tokens[:, -1, None], units.astype(np.float64))
        seconds = np.maximum(np.maximum(ready.end_s[:, None], whole), weights_s)
        return Steps(seconds, seconds - whole, np.ones(len(units), dtype=np.int64))
    tried = [ready.trained(cost, units, batches) for batches in ready.choices()]
    means = np.array([end.mean(0) for end, _ in tried])
    best = means.argmin(0)
    columns = np.arange(len(units))
    ends, idles = np.array([end for end, _ in tried]), np.array([idle for _, idle in tried])
    return Steps(
        ends[best, :, columns].T + weights_s, idles[best, :, columns].T, np.array(ready.choices(), dtype=np.int64)[best]
    )
