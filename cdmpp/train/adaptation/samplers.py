"""Samplers of programs to measure on a device: KMeans, variance reduction, random. They use no latencies.

CDMPP selects the tasks to measure on a new device by KMeans over program features: the one nearest to each centre
(the paper's section on cross-device sampling). Here the operator family is a further feature with a weight of three
standard deviations, which reduces the variation over seeds (docs/accuracy.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from cdmpp.data.labels import hash_rows
from cdmpp.errors import DataError, MissingDependencyError, install_hint

Array = np.ndarray[Any, np.dtype[Any]]
#: Prior covariance of the unknown errors of two sets of rows, by row number: (a,), (b,) -> (a, b).
Kernel = Callable[[Array, Array], Array]
Sampler = Literal["kmeans", "random", "variance"]

SAMPLERS: tuple[str, ...] = get_args(Sampler)
#: Weight of the family's one-hot columns, relative to features of unit variance.
FAMILY_WEIGHT = 3.0
#: Maximum distinct rows for KMeans, and candidates and rows for variance reduction.
KMEANS_ROWS, VARIANCE_ROWS = 10_000, 2_500
#: Up to this number of centres KMeans has several starts, which reduces the variation over seeds.
_SEVERAL_STARTS_TO = 200
#: Maximum rows chosen by variance reduction: each needs a pass over the covariance of all candidates.
MAX_VARIANCE_ROWS = 1_000
#: Standard deviations of the default kernel (log latency): all rows, a family, its shapes, one measurement.
_COMMON, _FAMILY, _SHAPE, NOISE = 0.15, 0.2, 0.2, 0.1
_LENGTH = 3.0


def choose(
    sampler: str,
    features: Array,
    families: Array,
    k: int,
    seed: int,
    kernel: Kernel | None = None,
    *,
    standardise: bool = True,
) -> Array:
    """Choose ``k`` rows to measure from features that are known before measuring; distinct row numbers in order of
    choice, the most telling first (``kmeans``: of the largest cluster).

    Rows with equal features and family are one program; all distinct programs are chosen before any is repeated. The
    same seed chooses the same programs, in whatever order the rows come (``random``: the same row numbers).

    - ``kmeans``: the row nearest to each centre, with every family represented where possible.
    - ``variance``: greedily the row that most reduces the posterior variance summed over all rows; after
      :data:`MAX_VARIANCE_ROWS` rows at random.
    - ``random``: without replacement, with equal probability.

    ``features`` (rows, columns) are finite, ``families`` (rows,) the codes of operator families. ``kernel``: prior
    covariance for ``variance``; by default what docs/accuracy.md calls the constant, the family and the shapes within a
    family. ``standardise`` scales each feature to unit variance.
    """
    rows = len(features)
    if sampler not in SAMPLERS:
        raise DataError(f"no sampler is called {sampler!r}", hint="one of: " + ", ".join(SAMPLERS))
    if not 1 <= k <= rows:
        raise DataError(f"cannot choose k = {k} of {rows} programs", hint=f"k from 1 to {rows}, or bring more programs")
    rng = np.random.default_rng([seed, SAMPLERS.index(sampler)])
    if sampler == "random":
        return rng.permutation(rows)[:k].astype(np.int64)
    features = np.ascontiguousarray(features, dtype=np.float64) + 0.0  # makes -0.0 and 0.0 equal
    families = np.asarray(families, dtype=np.int64)
    if not np.isfinite(features).all():
        raise ValueError("features must be finite")
    first, counts = _distinct(features, families)
    if k >= len(first):
        rest = np.setdiff1d(np.arange(rows), first)
        return np.concatenate([first, rng.permutation(rest)[: k - len(first)]]).astype(np.int64)
    points = _standardised(features[first], counts) if standardise else features[first]
    if sampler == "kmeans":
        return first[_kmeans(points, families[first], counts, k, rng)].astype(np.int64)
    by_variance = _variance(points, families[first], counts, first, min(k, MAX_VARIANCE_ROWS), rng, kernel)
    rest = rng.permutation(np.setdiff1d(np.arange(len(first)), by_variance))
    chosen: Array = first[np.concatenate([by_variance, rest])[:k]].astype(np.int64)
    return chosen


def _distinct(features: Array, families: Array) -> tuple[Array, Array]:
    """First row of each distinct (features, family), ordered by content, and how often each occurs."""
    keys = hash_rows(0, [families, *(column.copy().view(np.int64) for column in features.T)])
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return first, counts.astype(np.float64)


def _standardised(features: Array, weights: Array) -> Array:
    mean = np.average(features, axis=0, weights=weights)
    deviation = np.sqrt(np.average((features - mean) ** 2, axis=0, weights=weights))
    constant = deviation <= 1e-9 * (1.0 + np.abs(mean))
    scaled: Array = np.where(constant, 0.0, (features - mean) / np.where(constant, 1.0, deviation))
    return scaled


def _kmeans(points: Array, families: Array, counts: Array, k: int, rng: np.random.Generator) -> Array:
    """Distinct rows nearest to the centres, the heaviest cluster first."""
    try:
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning
    except ImportError:
        raise MissingDependencyError(
            "choosing by KMeans needs scikit-learn",
            hint=f"{install_hint('train')}, or another sampler: random, variance",
        ) from None

    codes = np.unique(families)
    space = np.concatenate([points, FAMILY_WEIGHT * (families[:, None] == codes)], axis=1)
    seen = np.sort(rng.choice(len(space), min(len(space), max(KMEANS_ROWS, 2 * k)), replace=False))
    starts = 4 if k <= _SEVERAL_STARTS_TO else 1
    means = KMeans(k, n_init=starts, max_iter=50, random_state=int(rng.integers(2**31)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer clusters than k: rows are found below
        means.fit(space[seen], sample_weight=counts[seen])
    weight = np.bincount(means.labels_, weights=counts[seen], minlength=k)
    order = np.argsort(-weight, kind="stable")
    chosen = _nearest(space, means.cluster_centers_[order])
    return _every_family(space, families, codes, chosen)


def _nearest(space: Array, centres: Array) -> Array:
    """For each centre in turn, the nearest row that is not taken yet."""
    norms, free = (space**2).sum(axis=1), np.ones(len(space), dtype=np.bool_)
    chosen = np.empty(len(centres), dtype=np.int64)
    for start in range(0, len(centres), 16):
        gaps = norms[:, None] - 2.0 * (space @ centres[start : start + 16].T)
        for i, column in enumerate(gaps.T, start):
            chosen[i] = column.argmin()
            if not free[chosen[i]]:
                chosen[i] = np.where(free, column, np.inf).argmin()
            free[chosen[i]] = False
    return chosen


def _every_family(space: Array, families: Array, codes: Array, chosen: Array) -> Array:
    """Replace the last rows of families with several rows by rows of families without any."""
    chosen = chosen.copy()
    for code in codes:
        chosen_families = families[chosen]
        if (chosen_families == code).any():
            continue
        several = np.isin(chosen_families, [c for c in codes if (chosen_families == c).sum() > 1])
        if not several.any():
            break  # k is below the number of families
        members = np.flatnonzero(families == code)
        middle = space[members].mean(axis=0)
        chosen[np.flatnonzero(several)[-1]] = members[((space[members] - middle) ** 2).sum(axis=1).argmin()]
    return chosen


def default_kernel(points: Array, families: Array) -> Kernel:
    """Covariance of log errors: a part for all rows, one per family, one for similarity within a family. ``points``
    (rows, columns) are standardised features."""

    def covariance(a: Array, b: Array) -> Array:
        left, right = points[a], points[b]
        gaps = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2.0 * (left @ right.T)
        like = np.exp(-np.sqrt(np.maximum(gaps, 0.0)) / _LENGTH)
        same = families[a][:, None] == families[b][None]
        return np.asarray(_COMMON**2 + same * (_FAMILY**2 + _SHAPE**2 * like))

    return covariance


def _variance(
    points: Array, families: Array, counts: Array, rows: Array, k: int, rng: np.random.Generator, kernel: Kernel | None
) -> Array:
    """Greedy choice: the candidate whose measurement most reduces the summed posterior variance."""
    limit = max(VARIANCE_ROWS, k)
    seen = np.sort(rng.choice(len(points), min(len(points), limit), replace=False))
    prior = kernel(rows[seen], rows[seen]) if kernel is not None else default_kernel(points, families)(seen, seen)
    posterior, weight = np.array(prior, dtype=np.float32), counts[seen].astype(np.float32)
    free = np.ones(len(seen), dtype=np.bool_)
    chosen = np.empty(k, dtype=np.int64)
    for i in range(k):
        spread = np.maximum(posterior.diagonal(), 0.0) + NOISE**2
        gain = np.where(free, np.einsum("i,ij,ij->j", weight, posterior, posterior) / spread, -np.inf)
        best = int(gain.argmax())
        chosen[i], free[best] = seen[best], False
        column = posterior[:, best] / np.sqrt(spread[best])
        posterior -= np.outer(column, column)
    return chosen
