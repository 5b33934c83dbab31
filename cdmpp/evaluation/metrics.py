"""The figures that every accuracy table of this project shows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]

METRICS = ("n", "mape", "median_ape", "within_10", "within_20", "kendall_tau", "coverage")


def measure(predicted: Float, measured: Float, lower: Float | None = None, upper: Float | None = None) -> dict[str, Any]:
    """Error of predicted against measured latencies, all in one unit.

    Parameters
    ----------
    predicted, measured : float64 array, (rows,)
    lower, upper : float64 array, optional
        The 80 % interval; without it ``coverage`` is None.

    Returns
    -------
    dict
        ``n``; ``mape`` and ``median_ape`` (mean and median of |predicted / measured - 1|), ``within_10``
        and ``within_20`` (shares of rows), ``coverage`` (share of rows inside the interval): fractions, not
        per cent; ``kendall_tau`` (tau-b). None where there are too few rows to say.
    """
    n = len(measured)
    if not n:
        return {"n": 0, **dict.fromkeys(METRICS[1:])}
    error = np.abs(predicted / measured - 1)
    covered = None if lower is None or upper is None else float(((measured >= lower) & (measured <= upper)).mean())
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
    """Kendall's tau-b, O(n log n); None for fewer than two rows or when one side is constant."""
    if len(measured) < 2:
        return None
    from scipy.stats import kendalltau

    tau = float(kendalltau(predicted, measured).statistic)
    return tau if np.isfinite(tau) else None
