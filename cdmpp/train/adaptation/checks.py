"""Checks of the measurements of a device: errors and named warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.errors import DataError
from cdmpp.model.nn.inputs import FAMILIES

Array = np.ndarray[Any, np.dtype[Any]]
#: A named warning in a result: {"code", "message"}.
Warning_ = dict[str, str]

#: A latency below the roofline by this factor cannot be explained by caches, winograd or clock changes.
FASTER = 2.0
#: With fewer measurements, predictions of a family depend mostly on other families.
FEW = 3


def warning(code: str, message: str) -> Warning_:
    """A named warning."""
    return {"code": code, "message": message}


def check_physics(device: str, latency_s: Array, roofline_s: Array) -> None:
    """Raise when most records are faster than physically possible.

    Parameters
    ----------
    device : str
    latency_s, roofline_s : (k,)
        Measured; max(arithmetic at peak, traffic at full bandwidth).

    Raises
    ------
    DataError
        More than half are faster than :data:`FASTER` times the roofline.
    """
    faster = latency_s * FASTER < roofline_s
    if faster.mean() > 0.5:
        by = float(np.median(roofline_s[faster] / latency_s[faster]))
        raise DataError(
            f"{int(faster.sum())} of {len(faster)} records contradict the specification of {device}: they "
            f"are faster than its peak rates allow, by a factor of {by:.3g}",
            hint="check the unit of the latencies and the device's figures (flop/s, bytes/s)",
        )


def protocol_warnings(protocols: Sequence[str]) -> list[Warning_]:
    """Warning where records have several protocols; each protocol has an offset."""
    names = sorted(set(protocols))
    if len(names) < 2:
        return []
    counts = ", ".join(f"{name} {list(protocols).count(name)}" for name in names)
    return [
        warning(
            "mixed_protocols",
            f"the records were measured by several protocols ({counts}); each has an offset of its own, "
            "estimated from its own records",
        )
    ]


def family_warnings(measured: Array, asked: Array) -> list[Warning_]:
    """Families of operators with few measurements.

    Parameters
    ----------
    measured, asked : int
        Family codes of the measured queries, and of all queries to predict.
    """
    sparse = []
    for code in np.unique(asked).tolist():
        count = int((measured == code).sum())
        if count < FEW:
            sparse.append(f"{FAMILIES[code]} {count}")
    if not sparse:
        return []
    return [
        warning(
            "few_of_family",
            f"fewer than {FEW} programs were measured of: {', '.join(sparse)}; their answers lean on the others",
        )
    ]
