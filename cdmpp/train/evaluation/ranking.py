"""Ranking metrics: order of the schedules of one task, as a search needs it.

A group is one task on one device with all its measured programs (schedules). Groups with at least
:data:`MIN_PROGRAMS` distinct programs count, each with equal weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.train.evaluation.metrics import kendall_tau

Float = NDArray[np.float64]
Int = NDArray[np.int64]

#: Smallest number of schedules for which an order is meaningful.
MIN_PROGRAMS = 8
TOP = (1, 5)
RANKING = ("task_kendall_tau", *(f"top{k}_score" for k in TOP), "ranked_groups")


def rank(predicted: Float, measured: Float, group: Int, program: Int) -> dict[str, Any]:
    """Ranking metrics within groups, averaged over groups.

    Parameters
    ----------
    predicted, measured : float64 array, (rows,)
        Latencies, or a monotone function of them for ``predicted``; ``measured`` in one unit, > 0.
    group : int array, (rows,)
        Task and device of each row; rows with a negative value (no task) are ignored.
    program : int array, (rows,)
        Rows of one group and program are repeated measurements: their median is used.

    Returns
    -------
    dict
        ``ranked_groups``: how many groups have at least :data:`MIN_PROGRAMS` programs (and two different
        latencies). Means over these: ``task_kendall_tau``, Kendall's tau-b, 0 where all predictions of a
        group are equal; ``top1_score`` and ``top5_score``, the best measured latency of the group over
        the best among the k programs predicted fastest (1.0: the best program is found). Equal
        predictions are taken in a random order with a fixed seed. None where no group counts.
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
