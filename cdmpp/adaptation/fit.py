"""Fit of the residual process to measured queries, with cross-validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.adapter.adapter import centre_and_spread
from cdmpp.adapter.residuals import AdapterFeatures, ResidualProcess, ResidualSettings
from cdmpp.domain.calibration import fit_factor
from cdmpp.nn.weights import Tuned

Array = np.ndarray[Any, np.dtype[Any]]

#: Measured programs from which tuning is tried (:mod:`cdmpp.adaptation.tune`).
TUNED_FROM = 80
#: Smallest number of measurements for cross-validation.
CHECKED_FROM = 5
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
    """A residual process and its cross-validated error.

    Attributes
    ----------
    process : ResidualProcess
    before, after : float
        Mean relative error of the base on the k measurements, and of the process when each is left out.
    width : float
        Factor on the intervals.
    """

    process: ResidualProcess
    before: float
    after: float
    width: float


@dataclass(frozen=True)
class TunedFit:
    """Result of tuning.

    Attributes
    ----------
    kept : bool
    weights : dict of arrays
    checked : Checked
        The process on the residuals of the folds.
    report : dict
        ``kept``, ``steps``, ``cross_validated``: ``process`` alone and ``both``.
    """

    kept: bool
    weights: Tuned
    checked: Checked
    report: dict[str, Any]


def fit_process(measured: Measured, settings: ResidualSettings | None = None) -> Checked:
    """Fit the residuals and leave each measurement out once (in closed form)."""
    process = ResidualProcess.fit(measured.features, measured.log_s - measured.point, settings)
    mean, variance = process.leave_one_out()
    # The variance of an unmeasured query excludes noise; leave_one_out includes it.
    hidden = np.maximum(variance - process.settings.noise**2, 0.0)
    point, levels = centre_and_spread(process, measured.point, measured.levels, mean, hidden)
    return Checked(
        process,
        before=mean_error(measured.point, measured.log_s),
        after=mean_error(point, measured.log_s),
        width=_width(measured.log_s, levels),
    )


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
