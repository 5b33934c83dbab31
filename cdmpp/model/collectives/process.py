"""The Gaussian process of the residuals: covariance of measured points, with its derivatives.

The covariance is the sum over the components of ``variance * [equal keys] * Matern32(axis / length) *
exp(-(log2 ranks / 1.5)^2 / 2)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.model.collectives.baseline import Baseline
from cdmpp.model.collectives.components import COMPONENTS, RANKS_SCALE, Key
from cdmpp.model.collectives.context import Context

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Points:
    """Measured points: one row for each context and small range of sizes.

    Attributes
    ----------
    context : (n,) int
        Index of the context.
    codes : (components, n) int
        Number of each point's key in each component.
    axes : dict of (n,) float
        ``relative`` and ``bytes``.
    ranks : (n,) float
        log2 of the ranks.
    base : (n,) float
        log of the baseline's seconds.
    log_s : (n,) float
        log of the measured seconds, the median of ``count`` rows.
    count : (n,) int
    noisy : (n,) bool
        Timed otherwise than as the kernel.
    """

    context: Array
    codes: Array
    axes: dict[str, Array]
    ranks: Array
    base: Array
    log_s: Array
    count: Array
    noisy: Array

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

    def codes(self, contexts: Sequence[Context]) -> Array:
        """(components, contexts) numbers; new keys get new ones."""
        return np.array(
            [[self.of[j].setdefault(c.key(x), len(self.of[j])) for x in contexts] for j, c in enumerate(COMPONENTS)]
        ).reshape(len(COMPONENTS), len(contexts))


def make_points(
    contexts: Sequence[Context],
    baseline: Baseline,
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
class Settings:
    """Hyperparameters: variance and length scale of each component, noise variance of kernel times and of others."""

    variance: Array
    length: Array
    noise: Array

    @classmethod
    def of_logs(cls, theta: Array) -> Settings:
        """From the logarithms, in the order of the fields."""
        n = len(COMPONENTS)
        return cls(np.exp(theta[:n]), np.exp(theta[n : 2 * n]), np.exp(theta[2 * n :]))

    def noise_of(self, points: Points) -> Array:
        """Noise variance of each point; medians of several rows are steadier."""
        kernel = self.noise[0] / np.minimum(points.count, 6)
        return np.asarray(np.where(points.noisy, self.noise[1] / np.minimum(points.count, 4), kernel) + 1e-4)


def parts(one: Points, other: Points, settings: Settings) -> Iterator[tuple[int, Array, Array]]:
    """For each component its number, correlation and derivative by the log of the length, as (n, m) float32."""
    apart = {name: np.abs(one.axes[name][:, None] - other.axes[name][None]).astype(np.float32) for name in one.axes}
    of_ranks = np.exp(-0.5 * ((one.ranks[:, None] - other.ranks[None]) / RANKS_SCALE) ** 2).astype(np.float32)
    for j, component in enumerate(COMPONENTS):
        same = (one.codes[j][:, None] == other.codes[j][None]).astype(np.float32)
        if component.over_ranks:
            same *= of_ranks
        r = apart[component.axis] * np.float32(np.sqrt(3) / settings.length[j])
        fall = same * np.exp(-r)
        yield j, fall * (1 + r), fall * r * r


def covariance(one: Points, other: Points, settings: Settings, block: int = 1000) -> Array:
    """Covariance of the residuals of two sets of points, without noise, (n, m)."""
    out = np.zeros((len(one), len(other)))
    for start in range(0, len(one), block):
        rows = np.arange(start, min(start + block, len(one)))
        for j, correlation, _ in parts(one.take(rows), other, settings):
            out[rows] += settings.variance[j] * correlation
    return out


def loss(theta: Array, points: Points, centre: Array) -> tuple[float, Array]:
    """Negative log marginal likelihood with a weak prior around ``centre``, and its gradient."""
    settings, n = Settings.of_logs(theta), len(COMPONENTS)
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
