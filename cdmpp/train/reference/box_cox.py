"""Box-Cox label of the original: transform of latencies, fitted on training rows, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

#: Rows that the transform is fitted on, at most.
FIT_ROWS = 100_000


@dataclass(frozen=True)
class BoxCox:
    """Standardised Box-Cox transform of the latency in seconds.

    Attributes
    ----------
    exponent : float
        Lambda of the transform; 0 is the logarithm.
    mean, spread : float
        Mean and standard deviation of the transformed training latencies.
    lowest, highest : float
        Log of the shortest and longest training latency; :meth:`decode` clips to them with a margin of 1, because
        a transformed value may have no inverse.
    """

    exponent: float
    mean: float
    spread: float
    lowest: float
    highest: float

    @classmethod
    def fit(cls, log_latency: Array, rng: np.random.Generator, exponent: float | None = None) -> BoxCox:
        """Fit on a seeded sample of the log latencies of training rows; ``exponent`` by maximum likelihood."""
        sample = rng.choice(log_latency, min(len(log_latency), FIT_ROWS), replace=False)
        if exponent is None:
            from scipy.stats import boxcox_normmax

            exponent = float(boxcox_normmax(np.exp(sample), method="mle"))
        values = _transform(sample, exponent)
        spread = float(max(values.std(), 1e-9))
        return cls(exponent, float(values.mean()), spread, float(log_latency.min()), float(log_latency.max()))

    def encode(self, log_latency: Array) -> Array:
        """Labels of log latencies."""
        return np.asarray((_transform(log_latency, self.exponent) - self.mean) / self.spread)

    def decode(self, label: Array) -> Array:
        """Log latencies of labels."""
        values = label * self.spread + self.mean
        if self.exponent:
            with np.errstate(invalid="ignore", divide="ignore"):
                inside = values * self.exponent + 1
                values = np.log(np.maximum(inside, 1e-300)) / self.exponent
        return np.asarray(np.clip(values, self.lowest - 1, self.highest + 1))


def _transform(log_latency: Array, exponent: float) -> Array:
    return np.expm1(log_latency * exponent) / exponent if exponent else log_latency
