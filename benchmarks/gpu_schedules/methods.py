"""Predictions for a GPU that is left out: trees on raw parameters, and trees on our columns with known GPUs' profiles.

Every method is fitted on the rows of other GPUs and predicts the log latency of rows of the left-out one. With
measurements of that GPU, a Gaussian process on the log residuals (:mod:`cdmpp.model.adapter.residuals`) corrects a
prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.gpu_schedules.analytic import FittedTimes
from benchmarks.gpu_schedules.pool import Pool, Rows
from cdmpp.model.adapter.residuals import AdapterFeatures, ResidualProcess, ResidualSettings
from cdmpp.train.adaptation.samplers import choose

Array = np.ndarray[Any, np.dtype[Any]]

TREES = 250
OPTIONS = {
    "max_depth": 8,
    "eta": 0.08,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
    "tree_method": "hist",
    "nthread": 1,
    "seed": 0,
}
#: The process on residuals: schedules of one kernel differ by an order of magnitude, operators do not.
SETTINGS = ResidualSettings(constant=0.5, family=0.5, sizes=0.6, length=3.0, view=1.0, peers=0.3, noise=0.05, clip=3.0)


def fit_trees(columns: Array, target: Array, rows: Rows, weight: Array | None = None) -> Any:
    """Boosted trees with a squared error; every kernel and GPU has the same weight."""
    import xgboost

    own = np.empty(len(rows))
    groups = rows.groups()
    for _, members in groups:
        own[members] = len(rows) / len(groups) / len(members)
    data = xgboost.DMatrix(columns, target, weight=own if weight is None else own * weight)
    return xgboost.train(OPTIONS, data, num_boost_round=TREES)


def predict_trees(model: Any, columns: Array) -> Array:
    """Output of :func:`fit_trees`' model, float64."""
    import xgboost

    return np.asarray(model.predict(xgboost.DMatrix(columns)), dtype=np.float64)


class RawTrees:
    """XGBoost on raw parameters and the GPU's figures.

    Parameters
    ----------
    label : {"latency", "ratio"}
        Logarithm of the latency, or of the latency over the roofline.
    """

    def __init__(self, pool: Pool, known: Rows, label: Literal["latency", "ratio"] = "latency") -> None:
        self.pool, self.label, self.known = pool, label, known
        self.model = fit_trees(pool.parameters(known), known.log_latency - self._base(known), known)

    def _base(self, rows: Rows) -> Array:
        return self.pool.roofline(rows) if self.label == "ratio" else np.zeros(len(rows))

    def predict(self, rows: Rows) -> Array:
        """Log latency."""
        return predict_trees(self.model, self.pool.parameters(rows)) + self._base(rows)

    def retrained(self, measured: Rows, weight: float) -> RawTrees:
        """The same with measured rows of the left-out GPU, ``weight`` times the weight of another GPU's rows."""
        joined = Rows(
            *(np.concatenate([getattr(r, n) for r in (self.known, measured)]) for n in Rows.__dataclass_fields__)
        )
        own = np.where(np.arange(len(joined)) < len(self.known), 1.0, weight)
        out = object.__new__(RawTrees)
        out.pool, out.label, out.known = self.pool, self.label, joined
        out.model = fit_trees(out.pool.parameters(joined), joined.log_latency - out._base(joined), joined, own)
        return out


@dataclass(frozen=True)
class Blend:
    """How the order within a kernel is predicted: weights of three parts, and of GPUs of another vendor.

    Attributes
    ----------
    trees, profile, analytic : float
        Weights of the trees on our columns, of the mean profile of known GPUs, of the analytic time.
    other_vendor : float
        Weight of a known GPU of another vendor in the mean, relative to one of the same vendor.
    """

    trees: float
    profile: float
    analytic: float = 0.0
    other_vendor: float = 0.3


#: Blends among which a GPU of the known ones chooses.
BLENDS = tuple(
    Blend(trees, profile, analytic, vendor)
    for trees, profile, analytic in (
        (1.0, 0.0, 0.0),
        (0.0, 1.0, 0.0),
        (0.0, 0.0, 1.0),
        (0.5, 0.5, 0.0),
        (0.0, 0.7, 0.3),
        (0.0, 0.5, 0.5),
        (0.4, 0.4, 0.2),
        (0.2, 0.6, 0.2),
        (0.3, 0.3, 0.4),
    )
    for vendor in (1.0, 0.3, 0.1)
    if profile or vendor == 0.3
)


@dataclass(frozen=True)
class Parts:
    """Parts of a prediction, per row.

    Attributes
    ----------
    trees, analytic : (rows,)
        Log latency, centred and scaled within a kernel.
    profile : (rows, GPUs)
        The same of each known GPU as measured; NaN where the configuration is not known there.
    level, spread : (rows,)
        Log latency and its standard deviation within the kernel on this GPU, as known GPUs let expect.
    """

    trees: Array
    profile: Array
    analytic: Array
    level: Array
    spread: Array


class Transfer:
    """Order from trees on our columns, known GPUs' profiles and fitted times; level from known GPUs' efficiencies.

    Log latencies are centred and scaled within a kernel and GPU: kernels differ in how much a schedule matters.
    """

    def __init__(self, pool: Pool, known: Rows) -> None:
        self.pool, self.known = pool, known
        self.times = FittedTimes(pool, known)
        reference = self.times.log_time(known)
        groups = known.groups()
        self.profiles = pool.profiles(known)
        for profile in self.profiles:
            with np.errstate(invalid="ignore"):
                profile /= _deviation(profile)
        self._spread = {g: float(known.log_latency[m].std()) for g, m in groups}
        self._level = {g: float(np.median(known.log_latency[m] - reference[m])) for g, m in groups}
        target = known.centred(known.log_latency)
        for group, members in groups:
            target[members] /= self._spread[group]
        self.model = fit_trees(self._columns(known), target, known)

    def _columns(self, rows: Rows) -> Array:
        profile = self._profile(rows)
        means = [self.mean_profile(rows, profile, vendor) for vendor in (1.0, 0.1)]
        return np.column_stack([self.pool.own(rows), self.times.log_time(rows), *means])

    def _profile(self, rows: Rows) -> Array:
        out = np.full((len(rows), len(self.pool.devices)), np.nan)
        for (k, d), members in rows.groups():
            out[members] = self.profiles[k][rows.configuration[members]]
            out[members, d] = np.nan
        return out

    def mean_profile(self, rows: Rows, profile: Array, other_vendor: float) -> Array:
        """Mean over known GPUs, NaN where none knows a configuration."""
        weights = np.ones(profile.shape)
        vendors = np.array([spec.vendor for spec in self.pool.specs])
        weights[vendors[rows.device][:, None] != vendors] = other_vendor
        weights = np.where(np.isnan(profile), 0.0, weights)
        total = weights.sum(axis=1)
        with np.errstate(invalid="ignore"):
            return np.asarray((np.nan_to_num(profile) * weights).sum(axis=1) / np.where(total > 0, total, np.nan))

    def parts(self, rows: Rows) -> Parts:
        """What a blend is made of."""
        time = self.times.log_time(rows)
        trees = rows.centred(predict_trees(self.model, self._columns(rows)))
        analytic = rows.centred(time)
        level, spread = np.empty(len(rows)), np.empty(len(rows))
        for (k, d), members in rows.groups():
            sources = [s for kernel, s in self._level if kernel == k and s != d]
            weights = [1.0 if self.pool.specs[s].vendor == self.pool.specs[d].vendor else 0.3 for s in sources]
            spread[members] = np.average([self._spread[k, s] for s in sources], weights=weights)
            level[members] = np.average([self._level[k, s] for s in sources], weights=weights) + np.median(
                time[members]
            )
            analytic[members] /= max(float(analytic[members].std()), 1e-6)
        return Parts(trees, self._profile(rows), analytic, level, spread)

    def order(self, rows: Rows, parts: Parts, blend: Blend) -> Array:
        """Predicted log latency, centred and scaled within a kernel."""
        mean = self.mean_profile(rows, parts.profile, blend.other_vendor)
        # No known GPU has this configuration: the trees stand in.
        mean = np.where(np.isnan(mean), parts.trees, mean)
        return np.asarray(blend.trees * parts.trees + blend.profile * mean + blend.analytic * parts.analytic)


def _deviation(profile: Array) -> Array:
    """Standard deviation of each column's known values; 1 for a column without any."""
    known = np.isfinite(profile)
    count = np.maximum(known.sum(axis=0), 1)
    values = np.where(known, profile, 0.0)
    mean = values.sum(axis=0) / count
    variance = np.where(known, (values - mean) ** 2, 0.0).sum(axis=0) / count
    return np.where(variance > 0, np.sqrt(variance), 1.0)


def choose_measured(pool: Pool, rows: Rows, k: int, seed: int = 0) -> Array:
    """Positions of the rows to measure: KMeans over our columns, every kernel represented."""
    return choose("kmeans", pool.own(rows), rows.kernel, min(k, len(rows)), seed)


def search(
    rows: Rows, measured: Array, correct: Callable[[Array], Array], count: int, rounds: int = 2
) -> tuple[Array, Array]:
    """Measure more schedules, in rounds those that are predicted best, evenly over kernels.

    Parameters
    ----------
    rows : Rows
        Of one GPU.
    measured : int, (k,)
        Positions of the rows that are measured first.
    correct : callable
        Prediction of all rows after the measurement of those at some positions.
    count : int
        Measurements in all.

    Returns
    -------
    prediction : (rows,)
        After all measurements.
    measured : int, (count,)
    """
    count = min(count, len(rows))
    for left in range(rounds, 0, -1):
        if more := (count - len(measured)) // left:
            place = np.full(len(rows), np.inf)
            prediction = correct(measured)
            for _, members in rows.groups():
                rest = np.setdiff1d(members, measured)
                place[rest[np.argsort(prediction[rest], kind="stable")]] = np.arange(len(rest))
            measured = np.concatenate([measured, np.argsort(place, kind="stable")[:more]])
    return correct(measured), measured


def corrected(
    rows: Rows, prediction: Array, columns: Array, measured: Array, linear: Array, settings: ResidualSettings = SETTINGS
) -> Array:
    """Log latency after some rows are measured: the prediction plus a Gaussian process on its residuals.

    Parameters
    ----------
    rows : Rows
        Of one GPU.
    prediction : (rows,)
    columns : (rows, .)
        Standardised here; distances between configurations.
    measured : int, (k,)
        Positions of the measured rows; their prediction becomes their measurement.
    linear : (rows, .)
        Columns whose slopes the process learns: known GPUs' profiles, the prediction itself.
    """
    deviation = columns.std(axis=0)
    used = deviation > 1e-9
    numeric = (columns[:, used] - columns[:, used].mean(axis=0)) / deviation[used]
    numeric = numeric / np.sqrt(numeric.shape[1] / 4)
    none = np.zeros(len(rows), dtype=np.int64)
    features = AdapterFeatures(
        numeric,
        rows.kernel,
        rows.kernel,
        none,
        # The process takes differences from the mean of a row, which is zero so.
        np.concatenate([linear, -linear], axis=1),
        linear,
    )
    process = ResidualProcess.fit(features.take(measured), rows.log_latency[measured] - prediction[measured], settings)
    out = prediction + process.mean_and_variance(features)[0]
    out[measured] = rows.log_latency[measured]
    return np.asarray(out)
