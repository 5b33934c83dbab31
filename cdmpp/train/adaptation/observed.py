"""Measurements that a service has collected, as records to adapt a model to.

Only measurements after the last change of the device (:func:`last_change`) still describe it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from cdmpp.data.records import Measurement
from cdmpp.errors import CdmppError, DataError
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.train.adaptation.records import measurement

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
    ``log_ratio`` is log(measured / predicted) in the order of measurement, oldest first.
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


Row = TypeVar("Row", bound=Mapping[str, Any])


@dataclass(frozen=True)
class ObservedRecords:
    """Observations of a device since its last change."""

    records: list[Measurement]
    since: float  # Unix time of the first observation that was considered
    count: int  # number of observations that were read
    before_change: int  # number of those from before the last change, which are not used
    # Code of the error to number of observations since then whose program is not known or cannot be read.
    unusable: Counter[str]


def observed_records(rows: Sequence[Row]) -> ObservedRecords:
    """Records of the observations of one device, newest first, as ``GET /observations`` lists them. None, or none since
    the last change with a known program, is a DataError."""
    if not rows:
        raise DataError("the service has no observations of this device", hint="POST /observe reports measurements")
    since = current(rows)
    records: list[Measurement] = []
    unusable: Counter[str] = Counter()
    for row in since:
        if row["program"] is None:
            unusable["unknown_program"] += 1
            continue
        try:
            program = program_from_request(row["program"], row["backend"])
            records.append(measurement(program, row["latency_s"], row["protocol"], row["framework"]))
        except CdmppError as error:
            unusable[error.code] += 1
    if not records:
        reasons = ", ".join(f"{code} {count}" for code, count in unusable.items())
        raise DataError(
            f"none of the {len(since)} observations since the last change can be used: {reasons}",
            hint="register the programs (POST /programs), or observe with program and device instead of prediction_id",
        )
    return ObservedRecords(records, since[0]["received_at"], len(rows), len(rows) - len(since), unusable)


def current(rows: Sequence[Row]) -> list[Row]:
    """Observations since the last change, oldest first, of observations of one device, newest first."""
    oldest_first = list(reversed(rows))
    ratios = np.array([math.log(row["latency_s"] / row["predicted_s"]) for row in oldest_first])
    return oldest_first[last_change(ratios) :]
