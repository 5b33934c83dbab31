"""Errors overall and per operator family, as the results file has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.report.results import rounded
from cdmpp.model.domain.calibration import read_quantiles
from cdmpp.train.evaluation.metrics import measure
from cdmpp.train.evaluation.tables import INTERVAL

Array = np.ndarray[Any, np.dtype[Any]]


def figures(
    log_measured: Array, point: Array, family: Array, levels: Array | None = None, factor: Array | None = None
) -> dict[str, Any]:
    """Figures of predictions of one device and source.

    ``log_measured``, ``point``, (n,): log of seconds. ``levels``, (n, len(LEVELS)), and ``factor``, (n,): as
    :class:`cdmpp.model.raw_predictions.RawPredictions` has them; without them ``coverage`` is None. Returns ``overall``
    and, by family, ``families`` (:func:`cdmpp.train.evaluation.metrics.measure`), and ``macro``, the mean over families
    of the mean relative error.
    """
    measured, predicted = np.exp(log_measured), np.exp(point)
    bounds: list[Array] = []
    if levels is not None and factor is not None:
        low, high = np.exp(read_quantiles(levels, factor, INTERVAL)).T
        bounds = [np.minimum(low, predicted), np.maximum(high, predicted)]

    def of(rows: Any) -> dict[str, Any]:
        errors: dict[str, Any] = rounded(measure(predicted[rows], measured[rows], *(bound[rows] for bound in bounds)))
        return errors

    families = {str(name): of(family == name) for name in np.unique(family)}
    macro = float(np.mean([f["mape"] for f in families.values()]))
    return {"overall": of(slice(None)), "families": families, "macro": round(macro, 4)}
