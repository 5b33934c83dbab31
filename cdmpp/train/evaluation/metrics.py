"""Accuracy metrics: errors, and the order of the schedules of one task, as a search needs it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]

METRICS = ("n", "mape", "median_ape", "within_10", "within_20", "kendall_tau", "coverage")


def measure(
    predicted: Float, measured: Float, lower: Float | None = None, upper: Float | None = None
) -> dict[str, Any]:
    """Error of predicted against measured latencies, (rows,), all in one unit; ``lower`` and ``upper`` are the 80 %
    interval.

    ``n``; ``mape`` and ``median_ape`` (mean and median of |predicted / measured - 1|), ``within_10`` and ``within_20``
    (shares of rows), ``coverage`` (share of rows inside the interval): fractions, not per cent; ``kendall_tau``
    (tau-b). None where there are too few rows to say, or no interval.
    """
    n = len(measured)
    if not n:
        return {"n": 0, **dict.fromkeys(METRICS[1:])}
    error = np.abs(predicted / measured - 1)
    covered = None
    if lower is not None and upper is not None:
        covered = float(((measured >= lower) & (measured <= upper)).mean())
    return {
        "n": n,
        "mape": float(error.mean()),
        "median_ape": float(np.median(error)),
        "within_10": float((error <= 0.1).mean()),
        "within_20": float((error <= 0.2).mean()),
        "kendall_tau": kendall_tau(predicted, measured),
        "coverage": covered,
    }


def kendall_tau(predicted: Float, measured: Float) -> float | None:
    """Kendall's tau-b, O(n log n); None for fewer than two rows or when one side is constant.

    Equal to ``scipy.stats.kendalltau``, without its p-value and without scipy.
    """
    rows = len(measured)
    if rows < 2:
        return None
    x, y = _ranks(predicted), _ranks(measured)
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    both = x * (int(y.max()) + 1) + y
    ties_x, ties_y, ties_both = (_tied_pairs(values) for values in (x, y, both))
    pairs = rows * (rows - 1) // 2
    if ties_x == pairs or ties_y == pairs:
        return None
    # Rows are sorted by x, then y: each inversion of y is a discordant pair.
    agreement = pairs - ties_x - ties_y + ties_both - 2 * _inversions(y)
    tau = agreement / math.sqrt(pairs - ties_x) / math.sqrt(pairs - ties_y)
    return min(1.0, max(-1.0, tau))


def _ranks(values: Float) -> NDArray[np.int64]:
    """Dense ranks: 0 for the smallest, equal values share one."""
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _tied_pairs(ranks: NDArray[np.int64]) -> int:
    """Pairs of equal elements."""
    counts = np.unique(ranks, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def _inversions(ranks: NDArray[np.int64]) -> int:
    """Pairs in the wrong order, bit by bit: the highest bit in which two ranks differ decides.

    Elements that agree in all higher bits form a group, in their original order. Within a group, each element with
    the bit set is discordant with every later one without it.
    """
    inversions, place = 0, np.arange(len(ranks))
    for bit in reversed(range(int(ranks.max()).bit_length())):
        high = (ranks >> bit) & 1
        starts = np.flatnonzero(np.diff(ranks >> (bit + 1), prepend=-1))
        sizes = np.diff(starts, append=len(ranks))
        start, zeros = (np.repeat(v, sizes) for v in (starts, sizes - np.add.reduceat(high, starts)))
        ones_before = np.cumsum(high) - high
        ones_before -= ones_before[start]
        inversions += int(ones_before[high == 0].sum())
        # Within each group, elements without the bit come first; the order is otherwise kept.
        split = np.empty_like(ranks)
        split[np.where(high, start + zeros + ones_before, place - ones_before)] = ranks
        ranks = split
    return inversions


Int = NDArray[np.int64]

#: Smallest number of schedules for which an order is meaningful.
MIN_PROGRAMS = 8
TOP = (1, 5)
RANKING = ("task_kendall_tau", *(f"top{k}_score" for k in TOP), "ranked_groups")


def rank(predicted: Float, measured: Float, group: Int, program: Int) -> dict[str, Any]:
    """Ranking metrics within groups, averaged over groups.

    A group is one task on one device with all its measured programs (schedules); rows with a negative ``group`` (no
    task) are ignored. Groups with at least :data:`MIN_PROGRAMS` distinct programs count, each with equal weight.
    ``predicted`` may be a monotone function of latencies. Rows of one group and program are repeated measurements:
    their median is used.

    ``ranked_groups``: how many groups have at least :data:`MIN_PROGRAMS` programs (and two different latencies). Means
    over these: ``task_kendall_tau``, Kendall's tau-b, 0 where all predictions of a group are equal; ``top1_score`` and
    ``top5_score``, the best measured latency of the group over the best among the k programs predicted fastest (1.0:
    the best program is found). Equal predictions are taken in a random order with a fixed seed. None where no group
    counts.
    """
    rng = np.random.default_rng(0)
    taus: list[float] = []
    scores: list[list[float]] = []
    rows = np.flatnonzero(group >= 0)
    rows = rows[np.argsort(group[rows], kind="stable")]
    for members in np.split(rows, np.flatnonzero(np.diff(group[rows])) + 1):
        names, inverse = np.unique(program[members], return_inverse=True)
        if len(names) < MIN_PROGRAMS:
            continue
        guess, truth = predicted[members], measured[members]
        if len(names) < len(members):
            each = [inverse.reshape(-1) == i for i in range(len(names))]
            guess, truth = (np.array([np.median(v[mask]) for mask in each]) for v in (guess, truth))
        if truth.min() == truth.max():
            continue
        taus.append(kendall_tau(guess, truth) or 0.0)
        order = np.lexsort((rng.random(len(guess)), guess))
        scores.append([float(truth.min() / truth[order[:k]].min()) for k in TOP])
    if not taus:
        return {**dict.fromkeys(RANKING), "ranked_groups": 0}
    top = np.mean(scores, axis=0)
    return {
        "task_kendall_tau": float(np.mean(taus)),
        **{f"top{k}_score": float(score) for k, score in zip(TOP, top, strict=True)},
        "ranked_groups": len(taus),
    }
