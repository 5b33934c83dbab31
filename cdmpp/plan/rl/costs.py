"""Costs that the search works with: the decode curve, training, and pools of units with prices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cdmpp.plan.base.batch_curve import interpolate
from cdmpp.plan.rl.engine import Floats, GenerationEngine
from cdmpp.predict.curves.points import monotone_fit


def token_table(sizes: Floats, seconds: Floats, max_batch: int) -> Floats:
    """The decode curve at batch sizes 0 (unused), 1, ..., ``max_batch``.

    Parameters
    ----------
    sizes, seconds : float64 arrays
        Points of the curve, in order of growing size. Seconds that fall are replaced by a monotone fit, as in
        ``/curve``: a larger batch is not faster.
    max_batch : int

    Notes
    -----
    Linear between the points, constant below the first, proportional to the batch beyond the last.
    """
    logs = np.log(np.maximum(seconds, 1e-15))
    fitted = monotone_fit(logs, [0])
    smooth = np.where(fitted == logs, np.maximum(seconds, 1e-15), np.exp(fitted))
    table: Floats = np.asarray(interpolate(sizes, smooth, np.arange(max_batch + 1)), dtype=np.float64)
    return table


@dataclass(frozen=True)
class TrainingCost:
    """Seconds of training on the samples of a step.

    Attributes
    ----------
    per_sample_s, per_token_s : float
        Seconds on one unit, per sample and per token of prompt and response.
    fixed_s : float
        Seconds added once per step, for any number of units: optimizer, synchronisation.
    efficiency : float
        Share of the ideal speed-up that remains at each doubling of the units, in (0.5, 1].
    batch_overhead_s : float
        Seconds added per batch of a streamed step.
    inference_s : float
        Seconds of inference per sample on one unit, if the training units run it. It scales ideally.
    run_s : float
        Seconds of one run of a pipeline schedule, which trains on ``run_samples`` samples; 0: no pipelines.
    run_samples, run_units : int
        Samples of one run, and units of one pipeline. Pipelines train side by side on equal numbers of samples.
    memory_units : int
        Fewest units whose memory holds weights, gradients and optimizer states.
    """

    per_sample_s: float = 0.0
    per_token_s: float = 0.0
    fixed_s: float = 0.0
    efficiency: float = 1.0
    batch_overhead_s: float = 0.0
    inference_s: float = 0.0
    run_s: float = 0.0
    run_samples: int = 1
    run_units: int = 1
    memory_units: int = 1

    @property
    def least_units(self) -> int:
        """Fewest units that can train."""
        return -(-self.memory_units // self.run_units) * self.run_units

    def speedup(self, units: Floats | float) -> Floats:
        """Speed-up of ``units`` over one unit."""
        count = np.asarray(units, dtype=np.float64)
        speed: Floats = count * self.efficiency ** np.log2(count)
        return speed

    def work_s(self, samples: Floats | float, tokens: Floats | float, units: Floats | float) -> Floats:
        """Seconds of work on samples and tokens, without pipelines, ``fixed_s`` and ``batch_overhead_s``."""
        on_one_unit = self.per_sample_s * samples + self.per_token_s * np.asarray(tokens)
        count = np.asarray(units, dtype=np.float64)
        work: Floats = on_one_unit / self.speedup(count) + self.inference_s * samples / count
        return work

    def pipelines(self, units: Floats | float) -> Floats:
        """Number of pipelines on ``units`` units; at least 1."""
        count: Floats = np.maximum(np.asarray(units, dtype=np.float64) // self.run_units, 1.0)
        return count

    def runs(self, samples: Floats | float, units: Floats | float) -> Floats:
        """Runs of the pipeline schedule, one after the other, that train on ``samples`` samples."""
        count: Floats = np.ceil(np.asarray(samples) / (self.pipelines(units) * self.run_samples))
        return count

    def runs_s(self, samples: Floats | float, units: Floats | float) -> Floats:
        """Seconds of the pipelines for one batch of samples; 0 without pipelines."""
        slowdown = self.efficiency ** np.log2(self.pipelines(units))
        seconds: Floats = self.run_s * self.runs(samples, units) / slowdown
        return seconds

    def whole_s(self, samples: Floats | float, tokens: Floats | float, units: Floats | float) -> Floats:
        """Seconds of a step's training in one batch."""
        work = self.work_s(samples, tokens, units) + self.runs_s(samples, units)
        whole: Floats = work + self.batch_overhead_s + self.fixed_s
        return whole


@dataclass(frozen=True)
class Pool:
    """Equal units at one site.

    Attributes
    ----------
    name : str
    units : int
        Number of units; one unit is a generation instance or a data-parallel training unit.
    price_per_hour : float
        Price of one unit.
    site : str
        Transfers of weights between sites take ``cross_site_s``.
    engine : GenerationEngine or None
        None if the pool does not generate.
    training : TrainingCost or None
        None if the pool does not train.
    inference_s : float
        Seconds of one unit for the reward, reference and critic values of one sample.
    """

    name: str
    units: int
    price_per_hour: float = 0.0
    site: str = ""
    engine: GenerationEngine | None = None
    training: TrainingCost | None = None
    inference_s: float = 0.0

    def generation_engine(self) -> GenerationEngine:
        """The engine of a pool that generates."""
        assert self.engine is not None, f"pool {self.name!r} does not generate"
        return self.engine
