"""Fitting the model of collectives to measured rows: baseline, Gaussian process of the residuals, spreads.

The covariance is the sum over the components of ``variance * [equal keys] * Matern32(axis / length) *
exp(-(log2 ranks / 1.5)^2 / 2)``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.devices.links import KINDS
from cdmpp.model.collectives.context import CollectiveContext
from cdmpp.model.collectives.model import GRIDS, RANK_GRID, CollectiveModel, Devices, KnownContext
from cdmpp.model.collectives.residual import COMPONENTS, RANKS_SCALE, Key, LinkBaseline, hops
from cdmpp.programs.collectives import traffic_factor

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Points:
    """Measured points: one row for each context and small range of sizes."""

    context: Array  # (n,) int: index of the context
    codes: Array  # (components, n) int: number of each point's key in each component
    axes: dict[str, Array]  # (n,) float each: ``relative`` and ``bytes``
    ranks: Array  # (n,) float: log2 of the ranks
    base: Array  # (n,) float: log of the baseline's seconds
    log_s: Array  # (n,) float: log of the measured seconds, the median of ``count`` rows
    count: Array  # (n,) int
    noisy: Array  # (n,) bool: timed otherwise than as the kernel

    def __len__(self) -> int:
        return len(self.context)

    def take(self, rows: Array) -> Points:
        """The points at these positions."""
        return Points(
            self.context[rows],
            self.codes[:, rows],
            {name: axis[rows] for name, axis in self.axes.items()},
            *(x[rows] for x in (self.ranks, self.base, self.log_s, self.count, self.noisy)),
        )


class Numbers:
    """Numbers of the components' keys, in the order of their first use."""

    def __init__(self) -> None:
        self.of: list[dict[Key, int]] = [{} for _ in COMPONENTS]

    def codes(self, contexts: Sequence[CollectiveContext]) -> Array:
        """(components, contexts) numbers; new keys get new ones."""
        return np.array(
            [[self.of[j].setdefault(c.key(x), len(self.of[j])) for x in contexts] for j, c in enumerate(COMPONENTS)]
        ).reshape(len(COMPONENTS), len(contexts))


def make_points(
    contexts: Sequence[CollectiveContext],
    baseline: LinkBaseline,
    numbers: Numbers,
    context: Array,
    size: Array,
    log_s: Array,
    count: Array,
) -> Points:
    """Points from contexts by index, log2 of the bytes, log seconds and number of rows."""
    base, relative = np.empty(len(context)), np.empty(len(context))
    for number in np.unique(context).tolist():
        rows = context == number
        base[rows] = baseline.log_seconds(contexts[number], size[rows])
        relative[rows] = baseline.relative_size(contexts[number], size[rows])
    ranks = np.log2([c.ranks for c in contexts])
    noisy = np.array([c.mode != "kernel" for c in contexts])
    codes = numbers.codes(contexts)
    axes = {"relative": relative, "bytes": np.asarray(size, dtype=np.float64)}
    return Points(context, codes[:, context], axes, ranks[context], base, log_s, count, noisy[context])


@dataclass(frozen=True)
class ProcessSettings:
    """Hyperparameters: variance and length scale of each component, noise variance of kernel times and of others."""

    variance: Array
    length: Array
    noise: Array

    @classmethod
    def of_logs(cls, theta: Array) -> ProcessSettings:
        """From the logarithms, in the order of the fields."""
        n = len(COMPONENTS)
        return cls(np.exp(theta[:n]), np.exp(theta[n : 2 * n]), np.exp(theta[2 * n :]))

    def noise_of(self, points: Points) -> Array:
        """Noise variance of each point; medians of several rows are steadier."""
        kernel = self.noise[0] / np.minimum(points.count, 6)
        return np.asarray(np.where(points.noisy, self.noise[1] / np.minimum(points.count, 4), kernel) + 1e-4)


def parts(left: Points, right: Points, settings: ProcessSettings) -> Iterator[tuple[int, Array, Array]]:
    """For each component its number, correlation and derivative by the log of the length, as (n, m) float32."""
    distance = {
        name: np.abs(left.axes[name][:, None] - right.axes[name][None]).astype(np.float32) for name in left.axes
    }
    of_ranks = np.exp(-0.5 * ((left.ranks[:, None] - right.ranks[None]) / RANKS_SCALE) ** 2).astype(np.float32)
    for j, component in enumerate(COMPONENTS):
        same = (left.codes[j][:, None] == right.codes[j][None]).astype(np.float32)
        if component.over_ranks:
            same *= of_ranks
        r = distance[component.axis] * np.float32(np.sqrt(3) / settings.length[j])
        fall = same * np.exp(-r)
        yield j, fall * (1 + r), fall * r * r


def covariance(left: Points, right: Points, settings: ProcessSettings, block: int = 1000) -> Array:
    """Covariance of the residuals of two sets of points, without noise, (n, m)."""
    out = np.zeros((len(left), len(right)))
    for start in range(0, len(left), block):
        rows = np.arange(start, min(start + block, len(left)))
        for j, correlation, _ in parts(left.take(rows), right, settings):
            out[rows] += settings.variance[j] * correlation
    return out


def loss(theta: Array, points: Points, centre: Array) -> tuple[float, Array]:
    """Negative log marginal likelihood with a weak prior around ``centre``, and its gradient."""
    settings, n = ProcessSettings.of_logs(theta), len(COMPONENTS)
    total, kept = np.zeros((len(points), len(points))), []
    for j, correlation, by_length in parts(points, points, settings):
        total += settings.variance[j] * correlation
        kept.append((correlation, by_length))
    total[np.diag_indices(len(points))] += settings.noise_of(points)
    lower = np.linalg.cholesky(total)
    inverse = np.linalg.inv(total)
    residual = points.log_s - points.base
    weights = inverse @ residual
    value = 0.5 * residual @ weights + np.log(np.diag(lower)).sum()
    outer = (inverse - np.outer(weights, weights)).astype(np.float32)
    slope = np.empty(len(theta))
    for j, (correlation, by_length) in enumerate(kept):
        slope[j] = 0.5 * settings.variance[j] * np.vdot(outer, correlation)
        slope[n + j] = 0.5 * settings.variance[j] * np.vdot(outer, by_length)
    diagonal = np.diag(outer)
    slope[2 * n] = 0.5 * diagonal @ np.where(points.noisy, 0, settings.noise[0] / np.minimum(points.count, 6))
    slope[2 * n + 1] = 0.5 * diagonal @ np.where(points.noisy, settings.noise[1] / np.minimum(points.count, 4), 0)
    away = (theta - centre) / 1.5
    return float(value + 0.5 * away @ away), slope + away / 1.5


logger = logging.getLogger(__name__)

#: Rows of a context within 1/4 of a power of two are one point.
PER_OCTAVE = 4
#: Points and iterations of the fit of the hyperparameters.
HYPER_POINTS, HYPER_STEPS, HYPER_PER_CONTEXT = 1600, 30, 24
#: Length scales at the start of the fit, in the order of the components.
_LENGTHS = (6.0, 5.0, 5.0, 5.0, 4.0, 5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0)
_START = np.log([*([0.03] * len(COMPONENTS)), *_LENGTHS, 0.003, 0.01])
#: Parameters of the baseline at the start: base and hop in seconds, efficiency; seconds of a call from the host, power.
_FIRST = (np.log([5e-6, 2e-6, 0.7]), np.log([2e-5, 1.0]))
#: Minimum spread of a context's residuals: repeats of one measurement differ by 1.5 % in the median.
MIN_SPREAD = 0.01


@dataclass(frozen=True)
class MeasuredCollectives:
    """Measured rows: contexts, and per row the context's index, bytes and log of the seconds."""

    contexts: list[CollectiveContext]
    context: Array
    bytes: Array
    log_s: Array

    def take(self, rows: Array) -> MeasuredCollectives:
        """Some rows, by index or mask."""
        return replace(self, context=self.context[rows], bytes=self.bytes[rows], log_s=self.log_s[rows])

    def __len__(self) -> int:
        return len(self.context)


def bin_rows(measured: MeasuredCollectives) -> tuple[Array, Array, Array, Array]:
    """Median of the rows of a context within a quarter of a power of two: context, log2 bytes, log seconds, count."""
    size = np.log2(measured.bytes)
    keys = measured.context * 1000 + np.round(size * PER_OCTAVE).astype(np.int64)
    order = np.lexsort((measured.log_s, keys))
    distinct, first, count = np.unique(keys[order], return_index=True, return_counts=True)
    log_s, sizes = measured.log_s[order], size[order]
    middle = 0.5 * (log_s[first + (count - 1) // 2] + log_s[first + count // 2])
    return distinct // 1000, np.add.reduceat(sizes, first) / count, middle, count


def fit_baseline(contexts: Sequence[CollectiveContext], context: Array, size: Array, log_s: Array) -> LinkBaseline:
    """Fit base, hop and efficiency per kind of link, and the two shared parameters, robustly and near usual values."""
    from scipy.optimize import least_squares

    used = [contexts[i] for i in context.tolist()]
    kind = np.array([KINDS.index(c.kind) for c in used])
    transfer = np.log([traffic_factor(c.operator, c.ranks) / c.bandwidth for c in used]) + np.log(2.0) * size
    steps = np.array([hops(c.operator, c.ranks) for c in used])
    called = np.array([c.called for c in used])
    first = np.concatenate([np.tile(_FIRST[0], len(KINDS)), _FIRST[1]])

    def errors(x: Array) -> Array:
        columns = x[:-2].reshape(len(KINDS), 3)[kind]
        latency = np.exp(columns[:, 0]) + np.exp(columns[:, 1]) * steps + called * np.exp(x[-2])
        power = np.exp(x[-1])
        both = np.logaddexp(power * np.log(latency), power * (transfer - columns[:, 2])) / power
        return np.concatenate([both - log_s, 0.1 * (x - first)])

    fitted = least_squares(errors, first, loss="soft_l1", f_scale=0.2).x
    return LinkBaseline(fitted[:-2].reshape(len(KINDS), 3), fitted[-2:])


def fit_settings(points: Points, seed: int = 0) -> ProcessSettings:
    """Hyperparameters by marginal likelihood on whole contexts, drawn with a seed."""
    from scipy.optimize import minimize

    rng = np.random.default_rng(seed)
    chosen: list[Array] = []
    for context in rng.permutation(np.unique(points.context)).tolist():
        rows = np.flatnonzero(points.context == context)
        chosen.append(rows if len(rows) <= HYPER_PER_CONTEXT else rng.choice(rows, HYPER_PER_CONTEXT, replace=False))
        if sum(map(len, chosen)) >= HYPER_POINTS:
            break
    part = points.take(np.concatenate(chosen))
    options = {"maxiter": HYPER_STEPS}
    result = minimize(loss, _START, args=(part, _START), jac=True, method="L-BFGS-B", options=options)
    logger.info("hyperparameters on %d points: loss %.1f after %d steps", len(part), result.fun, result.nit)
    return ProcessSettings.of_logs(result.x)


class ResidualFit:
    """The fitted process of some measured rows, and models of all of its devices or of all but some.

    ``measured``: training rows; other contexts of the list have no rows. ``settings``: hyperparameters; default:
    fitted.
    """

    def __init__(self, measured: MeasuredCollectives, settings: ProcessSettings | None = None, seed: int = 0) -> None:
        from scipy.linalg import lapack

        self.measured, self.numbers = measured, Numbers()
        context, size, log_s, count = bin_rows(measured)
        self.baseline = fit_baseline(measured.contexts, context, size, log_s)
        points = make_points(measured.contexts, self.baseline, self.numbers, context, size, log_s, count)
        self.settings = settings or fit_settings(points, seed)
        total = covariance(points, points, self.settings)
        total[np.diag_indices(len(points))] += self.settings.noise_of(points)
        lower, failed = lapack.dpotrf(total, lower=1, overwrite_a=1)
        inverse, failed_too = lapack.dpotri(lower, lower=1, overwrite_c=1)
        if failed or failed_too:
            raise FloatingPointError("the covariance of the residuals is not positive definite")
        self.inverse = np.tril(inverse) + np.tril(inverse, -1).T
        self.points = points

    def model(self, devices: Devices, without: Collection[str] = ()) -> CollectiveModel:
        """The model of all measured rows but those of the devices ``without``.

        The baseline's eleven parameters and the hyperparameters are those of all rows. ``devices``: names of the
        devices by data sheet (:func:`cdmpp.model.collectives.store.device_sheets`).
        """
        contexts, points = self.measured.contexts, self.points
        out = np.array([c.device in without for c in contexts])
        left, kept = np.flatnonzero(out[points.context]), np.flatnonzero(~out[points.context])
        residual = points.log_s - points.base
        # The inverse of a part of a matrix, from the inverse of the whole.
        weights = self.inverse[np.ix_(kept, kept)] @ residual[kept] if len(left) else self.inverse @ residual
        if len(left):
            across = self.inverse[np.ix_(left, kept)]
            within = self.inverse[np.ix_(left, left)]
            weights = weights - across.T @ np.linalg.solve(within, across @ residual[kept])
        functions = _tabulate(points.take(kept), self.numbers, self.settings, weights)
        ones = {name: 1.0 for name in ("in", "near", "out")}
        settings = self.settings
        model = CollectiveModel(self.baseline, functions, settings.variance, settings.length, {}, devices, ones)
        used_rows = self.measured.take(~out[self.measured.context])
        ranged = replace(model, known=_ranges(used_rows))
        # Queries of a device left out have a spread of their own, from the components that they go without.
        return ranged if without else _with_spreads(ranged, used_rows)


def _tabulate(points: Points, numbers: Numbers, settings: ProcessSettings, weights: Array) -> list[dict[Any, Array]]:
    """Posterior mean of every function on its grid, (ranks or 1, grid), rounded to float16 as it is stored."""
    out: list[dict[Any, Array]] = []
    for j, component in enumerate(COMPONENTS):
        grid, functions = GRIDS[component.axis], {}
        for key, number in numbers.of[j].items():
            rows = np.flatnonzero(points.codes[j] == number)
            if not len(rows):
                continue
            r = np.abs(grid[:, None] - points.axes[component.axis][rows][None]) * np.sqrt(3) / settings.length[j]
            shape = settings.variance[j] * (1 + r) * np.exp(-r)
            ranks = RANK_GRID if component.over_ranks else points.ranks[rows][:1]
            near = np.exp(-0.5 * ((ranks[:, None] - points.ranks[rows][None]) / 1.5) ** 2)
            functions[key] = ((near * weights[rows]) @ shape.T).astype(np.float16).astype(np.float64)
        out.append(functions)
    return out


def _ranges(measured: MeasuredCollectives) -> dict[CollectiveContext, KnownContext]:
    """Each measured context with the range of its sizes."""
    size = np.log2(measured.bytes)
    order = np.argsort(measured.context, kind="stable")
    numbers, first = np.unique(measured.context[order], return_index=True)
    low, high = np.minimum.reduceat(size[order], first), np.maximum.reduceat(size[order], first)
    return {
        measured.contexts[number]: KnownContext(MIN_SPREAD, float(low[i]), float(high[i]))
        for i, number in enumerate(numbers.tolist())
    }


def _with_spreads(model: CollectiveModel, measured: MeasuredCollectives) -> CollectiveModel:
    """The model with the spread of each context's residuals."""
    known = dict(model.known)
    output = model.predict(measured.contexts, measured.context, measured.bytes)
    for number in np.unique(measured.context).tolist():
        context = measured.contexts[number]
        rows = measured.context == number
        away = np.abs(measured.log_s[rows] - output.point[rows])
        # 80 % of a normal distribution is within 1.28 standard deviations; a few rows are shrunk towards 3 %.
        spread = float(np.quantile(away, 0.8)) / 1.28
        n = int(rows.sum())
        known[context] = replace(known[context], spread=max((n * spread + 10 * 0.03) / (n + 10), MIN_SPREAD))
    return replace(model, known=known)
