"""Calibration of the RL planner by measured steps: one factor for each stage, from priors and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from cdmpp.plan.rl.generation import Floats
from cdmpp.predict.requests.request import Closed, Count, PositiveSeconds, Seconds

#: Degrees of training that a user may fix.
DEGREES = ("tp", "pp", "virtual_pp", "cp", "ep", "micro_batch")
STAGES = ("generation", "inference", "training", "transfer")
#: Factors before a measurement, fitted to published steps of NeMo-RL on H100 (docs/rl.md): kernels and host times of
#: engines alone explain two thirds of a step.
USUAL = np.array([1.4, 1.7, 1.4, 2.5])
#: Standard deviation of the logarithm of each factor before a measurement, and of a measured time.
PRIOR, NOISE = np.array([0.2, 0.3, 0.3, 0.5]), 0.03
#: Steps of the fit (Gauss-Newton), and standard deviations from the median to the 90 % quantile.
FIT_STEPS, TO_BOUND = 20, 1.2816


class StageSeconds(Closed):
    """Predicted seconds of the stages of one step, before factors."""

    generation_s: Seconds
    inference_s: Seconds
    training_s: Seconds
    transfer_s: Seconds

    def array(self) -> Floats:
        """By stage, in the order of :data:`STAGES`."""
        return np.array([getattr(self, f"{name}_s") for name in STAGES])


class MeasuredStep(Closed):
    """A measured step: seconds of its stages, or of the whole step, and the sizes on which it ran."""

    generation_s: PositiveSeconds | None = None
    inference_s: PositiveSeconds | None = None
    training_s: PositiveSeconds | None = None
    transfer_s: PositiveSeconds | None = Field(
        None, description="Weights, and moving the training state of colocated stages."
    )
    step_s: PositiveSeconds | None = None
    generation_units: Count
    training_units: Count | None = Field(None, description="null: the generation units train, after generation.")
    predicted: StageSeconds | None = Field(
        None, description="Predicted seconds, if the layout is not that of the request. Default: simulated."
    )

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.known():
            raise ValueError("give generation_s, inference_s, training_s, transfer_s or step_s")
        return self

    def known(self) -> dict[int, float]:
        """Measured seconds by index of the stage; that of the whole step is behind them."""
        values = enumerate(getattr(self, f"{name}_s") for name in (*STAGES, "step"))
        return {index: seconds for index, seconds in values if seconds is not None}


def step_s(stages: Floats, shared: bool, staleness: int | None) -> float:
    """Seconds of a step without streaming, from the seconds of its stages (4,).

    ``shared``: the same units run all stages. Then, or with ``staleness`` 0, one stage runs after the other; None is 2.
    """
    generation, training, transfer = stages[0], stages[1] + stages[2], stages[3]
    total = float(stages.sum())
    if shared or staleness == 0:
        return total
    return float(max(generation, training, transfer, total / (3 if staleness is None else staleness + 1)))


@dataclass(frozen=True)
class StageFactors:
    """Factors on the seconds of the stages."""

    logs: Floats  # (4,): logarithms of the factors
    covariance: Floats  # (4, 4): of the logarithms

    @classmethod
    def prior(cls) -> StageFactors:
        """Without a measurement."""
        return cls(np.log(USUAL), np.diag(PRIOR**2))

    @classmethod
    def fit(
        cls,
        steps: Sequence[MeasuredStep],
        predicted: Sequence[Floats],
        staleness: int | None,
        usual: Sequence[float] | Floats = USUAL,
        prior: Floats = PRIOR,
        noise: float = NOISE,
    ) -> StageFactors:
        """The most probable factors under normal priors and errors of the logarithms.

        ``predicted``: seconds by stage of each step. ``usual``, ``prior``: factors before the measurement, and standard
        deviation of their logarithms. ``noise``: standard deviation of the logarithm of a measured time.
        """

        start = np.log(usual)

        def residuals(logs: Floats) -> Floats:
            values = list((logs - start) / prior)
            for step, stages in zip(steps, predicted, strict=True):
                scaled = np.exp(logs) * stages
                whole = step_s(scaled, step.training_units is None, staleness)
                for index, seconds in step.known().items():
                    value = whole if index == len(STAGES) else scaled[index]
                    if value > 0:
                        values.append((np.log(value) - np.log(seconds)) / noise)
            return np.array(values)

        logs = start
        for _ in range(FIT_STEPS):
            now, slopes = residuals(logs), _slopes(residuals, logs)
            move = np.linalg.lstsq(slopes, -now, rcond=None)[0]
            while np.square(residuals(logs + move)).sum() > np.square(now).sum() and np.abs(move).max() > 1e-9:
                move /= 2
            logs = logs + move
        slopes = _slopes(residuals, logs)
        return cls(logs, np.asarray(np.linalg.inv(slopes.T @ slopes), np.float64))

    @property
    def values(self) -> tuple[float, float, float, float]:
        """Factors by stage."""
        generation, inference, training, transfer = np.exp(self.logs).tolist()
        return generation, inference, training, transfer

    def spread(self, stages: Floats, shared: bool, staleness: int | None) -> float:
        """Factor from a step to the upper end of its 80 % interval, for the uncertainty of the factors alone.

        ``stages``: seconds by stage of the step, with the factors.
        """

        def log_step(logs: Floats) -> Floats:
            return np.array([np.log(step_s(np.exp(logs) * stages, shared, staleness))])

        slope = _slopes(log_step, np.zeros(len(STAGES)))[0]
        return float(np.exp(TO_BOUND * np.sqrt(slope @ self.covariance @ slope)))


def _slopes(function: Any, at: Floats) -> Floats:
    """Jacobian by central differences."""
    moves = 1e-4 * np.eye(len(at))
    return np.array([(function(at + move) - function(at - move)) / 2e-4 for move in moves]).T
