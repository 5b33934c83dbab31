"""Calibration of the intervals from the network's quantiles.

Split conformal prediction by scaling: on held-out data, find the factor on each quantile's distance from the median
with which the interval has its nominal coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from cdmpp.model.nn.config import LEVELS

Array = np.ndarray[Any, np.dtype[Any]]

#: Levels of the interval of a prediction unless others are requested.
DEFAULT_INTERVAL = (0.1, 0.9)
#: Least distance of a bound from the point, as a share of it: measurements repeat no better, and a point beyond a
#: quantile is inside its interval. A constant share keeps the order of predictions that agree across protocols.
MIN_MARGIN = 0.01
_MEDIAN = LEVELS.index(0.5)
#: An interval below and above the median; both are scaled by one factor.
_LOW, _HIGH = LEVELS.index(0.1), LEVELS.index(0.9)


def fit_factor(log_measured: Array, log_quantiles: Array, coverage: float = 0.8) -> float:
    """Factor on the width so that the 10-90 % interval covers ``coverage`` of these rows."""
    median = log_quantiles[:, _MEDIAN]
    error = log_measured - median
    half = np.where(error < 0, median - log_quantiles[:, _LOW], log_quantiles[:, _HIGH] - median)
    ratio = np.abs(error) / np.maximum(half, 1e-6)
    return float(np.quantile(ratio, coverage))


def scale_quantiles(log_quantiles: Array, factor: Array) -> Array:
    """Log quantiles with their distance from the median scaled, unchanged to the last digit where the factor is 1."""
    median = log_quantiles[:, _MEDIAN : _MEDIAN + 1]
    return np.where(factor[:, None] == 1.0, log_quantiles, median + (log_quantiles - median) * factor[:, None])


def read_quantiles(log_quantiles: Array, factor: Array, levels: Sequence[float]) -> Array:
    """Log quantiles, (n, len(levels)), at any levels between the first and last of LEVELS.

    They are interpolated on the normal scale. ``log_quantiles``: (n, len(LEVELS)). ``factor``: (n,), scaling of the
    distance from the median.
    """
    scaled = scale_quantiles(log_quantiles, factor)
    normal = NormalDist().inv_cdf
    known, wanted = (np.array([normal(p) for p in ps]) for ps in (LEVELS, levels))
    right = np.clip(np.searchsorted(known, wanted), 1, len(known) - 1)
    share = (wanted - known[right - 1]) / (known[right] - known[right - 1])
    return np.asarray(scaled[:, right - 1] * (1 - share) + scaled[:, right] * share)


def interval_levels(levels: Sequence[float]) -> Sequence[float]:
    """Levels whose outermost values bound the interval of a prediction.

    These are the requested levels, or 0.1 and 0.9 where the requested ones are not on both sides of the median.
    """
    return levels if min(levels) < 0.5 < max(levels) else DEFAULT_INTERVAL


def read_interval(
    log_quantiles: Array, factor: Array, levels: Sequence[float], point_s: Array
) -> tuple[Array, Array, Array]:
    """Bounds of the interval, (n,) each, and the quantiles, (n, len(levels)), in seconds.

    ``point_s``: (n,), predicted seconds. The point minimises the relative error and is slightly below the median. Other
    arguments are those of :func:`read_quantiles`.
    """
    quantiles_s = np.exp(read_quantiles(log_quantiles, factor, levels))
    outer = interval_levels(levels)
    bounds_s = quantiles_s if outer is levels else np.exp(read_quantiles(log_quantiles, factor, outer))
    lower_s = np.minimum((1 - MIN_MARGIN) * point_s, bounds_s.min(axis=1))
    upper_s = np.maximum((1 + MIN_MARGIN) * point_s, bounds_s.max(axis=1))
    return lower_s, upper_s, quantiles_s
