"""Running error and drift of one model on one device, updated with each batch of measurements.

The state has a fixed size: reading it costs the same after ten observations as after ten million.

Drift is a change against the model's own past, not an error. A model that is 30 % too low from the first
day has a bias and does not drift. The rule compares two windows (Gama et al., "A survey on concept drift
adaptation", ACM Computing Surveys 46(4), 2014, section on monitoring two distributions). One is the mean log
ratio measured / predicted of the last 200 observations. The other is that of the reference: the
observations that left the recent window first, at most 1,000. The difference is in units of its standard
error (Welch). The reference does not change, so a drift is reported until another model is loaded.
Measurements of a fleet are not independent, because programs repeat, so the standard error is
underestimated. ``drifting`` therefore requires five standard errors and a change of at least 5 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: A ratio measured / predicted beyond this factor, up or down, counts as this factor: one measurement that is wrong by
#: orders of magnitude, or invented, must not decide the mean of thousands.
RATIO_LIMIT = 10.0
#: Number of observations in the recent window, and maximum number in the reference.
RECENT, REFERENCE = 200, 1000
#: Minimum number of observations in the reference; with fewer, the drift is unknown.
MIN_REFERENCE = 30
#: Thresholds of ``drifting``: standard errors, and change of the mean log ratio.
DRIFT_ERRORS, DRIFT_CHANGE = 5.0, math.log(1.05)
# Smallest standard error: constant ratios would make any difference infinitely many standard errors.
_MIN_ERROR = 1e-4


@dataclass
class Sums:
    """Count, sum and sum of squares of log ratios."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Floats) -> None:
        """Add values."""
        self.count += len(values)
        self.total += float(values.sum())
        self.squares += float((values * values).sum())

    @property
    def mean(self) -> float:
        """Mean; needs at least one value."""
        return self.total / self.count

    @property
    def error_squared(self) -> float:
        """Squared standard error of the mean; needs at least two values."""
        spread = max(0.0, self.squares - self.total * self.mean)
        return spread / (self.count - 1) / self.count


@dataclass
class Running:
    """Running state of one model on one device."""

    #: Sums of all log ratios log(measured / predicted), clipped to :data:`RATIO_LIMIT`.
    ratios: Sums = field(default_factory=Sums)
    #: Sum of |predicted / measured - 1|, of clipped ratios.
    relative_error: float = 0.0
    #: Number of measurements inside their interval.
    covered: int = 0
    #: The last log ratios, newest last, at most :data:`RECENT`.
    recent: Floats = field(default_factory=lambda: np.empty(0))
    #: Sums of the log ratios that left ``recent`` first.
    reference: Sums = field(default_factory=Sums)

    def add(self, measured_s: Floats, predicted_s: Floats, lower_s: Floats, upper_s: Floats) -> None:
        """Add observations in order; arrays of equal length, in seconds."""
        clipped = np.clip(measured_s / predicted_s, 1.0 / RATIO_LIMIT, RATIO_LIMIT)
        ratios = np.log(clipped)
        self.ratios.add(ratios)
        self.relative_error += float(np.abs(1.0 / clipped - 1.0).sum())
        self.covered += int(((lower_s <= measured_s) & (measured_s <= upper_s)).sum())
        window = np.concatenate([self.recent, ratios])
        leaving, self.recent = window[: max(0, len(window) - RECENT)], window[-RECENT:]
        self.reference.add(leaving[: REFERENCE - self.reference.count])

    def figures(self) -> MeasuredErrors:
        """Return the error figures; needs at least one observation."""
        count, recent = self.ratios.count, Sums()
        recent.add(self.recent)
        drift = None
        change = 0.0
        if self.reference.count >= MIN_REFERENCE:
            change = recent.mean - self.reference.mean
            error = math.sqrt(recent.error_squared + self.reference.error_squared)
            drift = change / max(error, _MIN_ERROR)
        return MeasuredErrors(
            count=count,
            mape=self.relative_error / count,
            bias=math.expm1(self.ratios.mean),
            coverage=self.covered / count,
            recent_bias=math.expm1(recent.mean),
            drift=drift,
            drifting=drift is not None and abs(drift) >= DRIFT_ERRORS and abs(change) >= DRIFT_CHANGE,
        )


@dataclass(frozen=True)
class MeasuredErrors:
    """Error of a model on a device, as fractions."""

    #: Number of observations.
    count: int
    #: Mean of |predicted / measured - 1|, of ratios clipped to :data:`RATIO_LIMIT`.
    mape: float
    #: exp(mean log(measured / predicted)) - 1: 0.1 means that measured latencies are 10 % longer than predicted.
    bias: float
    #: Share of measurements inside their interval.
    coverage: float
    #: The same of the last 200 observations.
    recent_bias: float
    #: Change of the recent mean log ratio against the reference, in standard errors; None while there are too few
    #: observations.
    drift: float | None
    #: Whether the change is both significant and large.
    drifting: bool
