"""Measurements that a service has collected, as records to adapt a model to."""

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
from cdmpp.train.adaptation.change import last_change
from cdmpp.train.adaptation.records import measurement

Row = TypeVar("Row", bound=Mapping[str, Any])


@dataclass(frozen=True)
class Observed:
    """Observations of a device since its last change.

    Attributes
    ----------
    records : list of Measurement
    since : float
        Unix time of the first observation that was considered.
    count : int
        Number of observations that were read.
    before_change : int
        Number of those from before the last change, which are not used.
    unusable : Counter of str
        Code of the error to number of observations since then whose program is not known or cannot be read.
    """

    records: list[Measurement]
    since: float
    count: int
    before_change: int
    unusable: Counter[str]


def observed_records(rows: Sequence[Row]) -> Observed:
    """Records of the observations of one device, newest first, as ``GET /observations`` lists them.

    Raises
    ------
    DataError
        There are no observations, or none since the last change has a known program.
    """
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
    return Observed(records, since[0]["received_at"], len(rows), len(rows) - len(since), unusable)


def current(rows: Sequence[Row]) -> list[Row]:
    """Observations since the last change, oldest first, of observations of one device, newest first."""
    oldest_first = list(reversed(rows))
    ratios = np.array([math.log(row["latency_s"] / row["predicted_s"]) for row in oldest_first])
    return oldest_first[last_change(ratios) :]
