"""All-reduces of two processes over gloo, predicted by the model of collectives after some of the measured sizes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any

from cdmpp import LatencyPredictor
from cdmpp.devices import lookup
from cdmpp.model.collectives.few import collective_seconds, fit_collectives
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.simulate.replay import Link

Rows = Sequence[tuple[float, float]]
#: Number of sizes that the model is fitted to.
FITTED = 8
#: Processes of one machine share its memory. Of the device, the model needs the kind alone.
DEVICE = lookup("intel-xeon-amx-2t-avx2")


def program(size: float, ranks: int) -> dict[str, Any]:
    """An all-reduce of gloo."""
    return {
        "operator": "all_reduce",
        "bytes": int(size),
        "ranks": ranks,
        "dtype": "float32",
        "library": "gloo",
        "mode": "eager",
        "link": "shared-memory",
    }


def fitted_rows(table: Rows) -> list[tuple[float, float]]:
    """:data:`FITTED` rows of a table by size, spread from the first to the last."""
    last = len(table) - 1
    numbers = sorted({round(i * last / (FITTED - 1)) for i in range(FITTED)})
    return [table[number] for number in numbers]


def fit(table: Rows, ranks: int) -> CollectiveModel:
    """The shipped model, corrected by :func:`fitted_rows`."""
    rows = [(program(size, ranks), seconds) for size, seconds in fitted_rows(table)]
    return fit_collectives(shipped(), rows, DEVICE)


@cache
def shipped() -> CollectiveModel:
    """The shipped model of collectives."""
    return LatencyPredictor.load().collectives


def predicted_link(table: Rows, ranks: int) -> Link:
    """A link with the predicted time of every size of the table; use it with the algorithm "measured"."""
    model = fit(table, ranks)
    return Link(table=tuple((size, collective_seconds(model, program(size, ranks), DEVICE)) for size, _ in table))


def fit_errors(table: Rows, ranks: int) -> dict[str, Any]:
    """Sizes that the model is fitted to, and its mean errors on the other sizes before and after the fit."""
    used = {size for size, _ in fitted_rows(table)}
    held = [(size, seconds) for size, seconds in table if size not in used]

    def error(model: CollectiveModel) -> float:
        away = [abs(collective_seconds(model, program(size, ranks), DEVICE) / seconds - 1) for size, seconds in held]
        return round(statistics.fmean(away), 4)

    return {
        "fitted_bytes": [int(size) for size in sorted(used)],
        "held_out_error_before": error(shipped()),
        "held_out_error": error(fit(table, ranks)),
    }
