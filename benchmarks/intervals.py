"""Coverage of prediction intervals: the share of measurements inside, by nominal share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from cdmpp.model.domain.calibration import read_quantiles

Array = np.ndarray[Any, np.dtype[Any]]

#: Shares that the intervals promise; the network's quantiles reach from 2 % to 98 %.
NOMINAL = (0.5, 0.6, 0.7, 0.8, 0.9, 0.96)


def coverage_curve(
    log_measured: Array, point: Array, levels: Array, factor: Array, nominal: Sequence[float] = NOMINAL
) -> list[float]:
    """Share of rows inside the central interval of each nominal share.

    ``log_measured``, ``point``, (n,): log of seconds. ``levels``, (n, len(LEVELS)), and ``factor``, (n,): as
    :class:`cdmpp.model.raw_predictions.RawPredictions` has them. An interval always holds its point, as in a
    Prediction.
    """
    shares = []
    for share in nominal:
        low, high = read_quantiles(levels, factor, ((1 - share) / 2, (1 + share) / 2)).T
        inside = (log_measured >= np.minimum(low, point)) & (log_measured <= np.maximum(high, point))
        shares.append(round(float(inside.mean()), 4))
    return shares


def auc(score: Array, bad: Array) -> float | None:
    """Area under the ROC curve: how often a bad row scores higher than a good one, ties counting half.

    None where all rows are good or all are bad.
    """
    if bad.all() or not bad.any():
        return None
    return float(roc_auc_score(bad, score))
