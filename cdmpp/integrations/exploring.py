"""Optimistic latencies of a search's candidates: what is unlike all measured programs is worth a trial.

A cost model only gives scores, and MetaSchedule measures the best of them, which are often near-duplicates.
:class:`EnsembleSpread` is the standard deviation of the residuals' smooth part (:mod:`cdmpp.integrations.online`),
given the programs that are measured or picked. :func:`optimistic` picks candidates one by one, each as if the earlier
picks were measured already (GP-BUCB: Desautels, Krause and Burdick, 2014).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cdmpp.integrations.online import Scales, matern

Array = np.ndarray[Any, np.dtype[Any]]

#: Candidates of one call that are picked: as many as the trials of a round.
PICKS = 16


class EnsembleSpread:
    """Covariance of the residuals of candidates, given observed programs.

    Parameters
    ----------
    candidates : (n, columns)
        Summaries of the candidates.
    observed : (m, columns)
        Summaries of programs that are measured, or picked for measuring.
    scales : Scales
    """

    def __init__(self, candidates: Array, observed: Array, scales: Scales) -> None:
        self._candidates, self._scales = candidates, scales
        self.variance = np.full(len(candidates), scales.amplitude**2)
        self._reductions: list[Array] = []
        if len(observed):
            covariance = self._prior(observed, observed)
            covariance[np.diag_indices(len(observed))] += scales.noise**2
            self._reductions = list(np.linalg.solve(np.linalg.cholesky(covariance), self._prior(observed, candidates)))
            self.variance -= np.square(self._reductions).sum(axis=0)

    @property
    def deviation(self) -> Array:
        """Standard deviation of the residual of each candidate, (n,)."""
        return np.asarray(np.sqrt(np.maximum(self.variance, 0.0)))

    def observe(self, index: int) -> None:
        """Condition on one more program, a candidate."""
        column = self._prior(self._candidates[index : index + 1], self._candidates)[0]
        if self._reductions:
            reductions = np.array(self._reductions)
            column = column - reductions[:, index] @ reductions
        column /= np.sqrt(max(self.variance[index], 0.0) + self._scales.noise**2)
        self._reductions.append(column)
        self.variance = self.variance - column**2

    def _prior(self, one: Array, other: Array) -> Array:
        return self._scales.amplitude**2 * matern(one, other, self._scales.length)


def optimistic(log_s: Array, spread: EnsembleSpread, explore: float, picks: int = PICKS) -> tuple[Array, list[int]]:
    """Predicted latencies less a multiple of their spread.

    Parameters
    ----------
    log_s : (n,)
        Log of the expected seconds.
    spread : EnsembleSpread
        Of the n candidates; it is conditioned on the picks.
    explore : float
        Standard deviations that are subtracted.
    picks : int
        Number of candidates that are picked, at most.

    Returns
    -------
    log_s : (n,)
        Optimistic log seconds; those of candidates like a better one have less subtracted.
    picked : list of int
        Positions of the picks, in order.
    """
    values, picked = np.array(log_s, dtype=float), list[int]()
    open_ = np.ones(len(values), dtype=bool)
    for _ in range(min(picks, len(values))):
        values[open_] = log_s[open_] - explore * spread.deviation[open_]
        best = int(np.where(open_, values, np.inf).argmin())
        open_[best] = False
        picked.append(best)
        spread.observe(best)
    values[open_] = log_s[open_] - explore * spread.deviation[open_]
    return values, picked
