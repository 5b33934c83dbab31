"""Last change of a device: which of its measurements still describe it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

#: Thresholds of a change of the mean log ratio measured / predicted: standard errors, and size.
CHANGE_ERRORS, CHANGE_SIZE = 5.0, math.log(1.05)
#: Smallest number of measurements before and after a change.
SEGMENT = 10
# Smallest standard error: constant ratios would make any difference infinitely many standard errors.
_MIN_ERROR = 1e-4


def last_change(log_ratio: Array) -> int:
    """Position of the first measurement after the last change; 0 where nothing has changed.

    Splits the sequence where the squared deviation from two means is smallest, as long as the means differ by
    :data:`CHANGE_ERRORS` standard errors (Welch) and by :data:`CHANGE_SIZE`, and continues with the newer part.

    Parameters
    ----------
    log_ratio : (n,)
        log(measured / predicted) in the order of measurement, oldest first.
    """
    values, start = np.asarray(log_ratio, float), 0
    while len(values) - start >= 2 * SEGMENT:
        split = _split(values[start:])
        if split is None:
            break
        start += split
    return start


def _split(values: Array) -> int | None:
    """The best split of a sequence in two; None where the parts do not differ enough."""
    count = np.arange(1, len(values))
    total, squares = np.cumsum(values)[:-1], np.cumsum(values**2)[:-1]
    rest, rest_total = len(values) - count, values.sum() - total
    inside = squares - total**2 / count + (values**2).sum() - squares - rest_total**2 / rest
    allowed = slice(SEGMENT - 1, len(values) - SEGMENT)
    split = int(np.argmin(inside[allowed])) + SEGMENT
    old, new = values[:split], values[split:]
    change = abs(new.mean() - old.mean())
    error = math.sqrt(old.var(ddof=1) / len(old) + new.var(ddof=1) / len(new))
    return split if change >= CHANGE_SIZE and change >= CHANGE_ERRORS * max(error, _MIN_ERROR) else None
