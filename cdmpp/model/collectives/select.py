"""Choice of measurements of a new device: those that reduce the model's uncertainty most, without their latencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.model.collectives.context import Context
from cdmpp.model.collectives.correction import NOISE, prior_covariance
from cdmpp.model.collectives.model import CollectiveModel

Array = np.ndarray[Any, np.dtype[Any]]

#: Candidates that are drawn of all rows, for each row that is chosen and at least, and more of each context.
PER_CHOICE, CANDIDATES, PER_CONTEXT = 2, 400, 4


def informative_rows(
    model: CollectiveModel, contexts: Sequence[Context], context: Array, bytes_: Array, k: int, seed: int = 0
) -> Array:
    """Positions of k rows, ascending.

    One row after the other is chosen: the one whose measurement leaves the smallest sum of variances over the
    candidates, under the covariance with which :class:`cdmpp.model.collectives.correction.Correction` is fitted.

    Parameters
    ----------
    model : CollectiveModel
    contexts : sequence of Context
    context, bytes_ : (n,)
        Index into ``contexts`` and bytes of the rows to choose from; ``k`` is at most n.
    seed : int
        Of the draw of candidates.
    """
    rng = np.random.default_rng(seed)
    rows = np.arange(len(context))
    drawn = [rng.choice(rows, min(max(CANDIDATES, PER_CHOICE * k), len(rows)), replace=False)]
    for number in np.unique(context).tolist():
        members = rows[context == number]
        drawn.append(rng.choice(members, min(PER_CONTEXT, len(members)), replace=False))
    candidates = np.unique(np.concatenate(drawn))
    of_candidates = [contexts[i] for i in context[candidates].tolist()]
    size = np.log2(bytes_[candidates])
    left = prior_covariance(model, of_candidates, size, of_candidates, size)
    free = np.ones(len(candidates), dtype=np.bool_)
    for _ in range(k):
        total = np.diag(left) + NOISE**2
        best = int(np.where(free, (left**2).sum(axis=0) / total, -1.0).argmax())
        free[best] = False
        left = left - np.outer(left[:, best], left[best]) / total[best]
    return candidates[~free]
