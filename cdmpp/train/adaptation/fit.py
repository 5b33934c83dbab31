"""Fit of the residual process to measured queries, with cross-validation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.model.adapter.adapter import centre_and_spread
from cdmpp.model.adapter.residuals import AdapterFeatures, ResidualProcess, ResidualSettings
from cdmpp.model.domain.calibration import fit_factor

Array = np.ndarray[Any, np.dtype[Any]]

#: Smallest number of measurements for cross-validation: one is predicted from the others.
CHECKED_FROM = 2
#: Shares of the correction that are tried, in this order; the first that beats the base is used, else none.
WEIGHTS = (1.0, 0.5, 0.25)
#: The interval's factor is shrunk towards 1 with the weight of this number of measurements.
_WIDTH_PRIOR = 10.0
_WIDTH_BOUNDS = (0.5, 3.0)


@dataclass(frozen=True)
class Measured:
    """Distinct measured queries, k rows: log seconds, the base's predictions, features."""

    log_s: Array
    point: Array
    levels: Array
    features: AdapterFeatures

    def __len__(self) -> int:
        return len(self.log_s)

    def take(self, rows: Array) -> Measured:
        """The rows with these positions."""
        return Measured(self.log_s[rows], self.point[rows], self.levels[rows], self.features.take(rows))


@dataclass(frozen=True)
class Checked:
    """A residual process, and the share of its correction that cross-validation supports.

    Attributes
    ----------
    process : ResidualProcess
    weight : float
        One of :data:`WEIGHTS`, or 0 where none of them has a smaller error than the base.
    before, after : float
        Mean relative error of the base on the k measurements, and of the model with ``weight`` when each is left
        out; equal where ``weight`` is 0.
    whole : float
        Error of the whole correction when each measurement is left out; ``before`` where none can be left out.
    width : float
        Factor on the intervals.
    """

    process: ResidualProcess
    weight: float
    before: float
    after: float
    whole: float
    width: float


def fit_process(measured: Measured, settings: ResidualSettings | None = None) -> Checked:
    """Fit the residuals, leave each measurement out once (in closed form), and choose the weight."""
    process = ResidualProcess.fit(measured.features, measured.log_s - measured.point, settings)
    before = mean_error(measured.point, measured.log_s)
    kept = Checked(process, 0.0, before, before, before, 1.0)
    if len(measured) < CHECKED_FROM:
        return kept
    mean, variance = process.leave_one_out()
    # The variance of an unmeasured query excludes noise; leave_one_out includes it.
    hidden = np.maximum(variance - process.settings.noise**2, 0.0)
    for weight in WEIGHTS:
        point, levels = centre_and_spread(process, measured.point, measured.levels, mean, hidden, weight)
        after = mean_error(point, measured.log_s)
        if weight == 1.0:
            kept = replace(kept, whole=after)
        if after < before:
            return replace(kept, weight=weight, after=after, width=_width(measured.log_s, levels))
    return kept


def mean_error(point: Array, log_s: Array) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.abs(np.expm1(point - log_s)).mean())


def _width(log_s: Array, levels: Array) -> float:
    """Factor with which the 80 % interval covers 80 % of left-out measurements, shrunk towards 1 for few of them."""
    k = len(log_s)
    # Split conformal: of k errors, the rank that also holds for the next one.
    share = min(1.0, 0.8 * (k + 1) / k)
    found = fit_factor(log_s, levels, share)
    weight = k / (k + _WIDTH_PRIOR)
    return float(np.clip(np.exp(weight * np.log(max(found, 1e-3))), *_WIDTH_BOUNDS))
