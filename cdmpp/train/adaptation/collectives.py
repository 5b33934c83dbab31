"""Adaptation of the model of collectives to a device or link by k measurements."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from cdmpp.errors import ArtifactError, DataError
from cdmpp.model.artifact.load import collectives_of, corrected
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.collectives.context import CollectiveRows, collective_rows
from cdmpp.model.collectives.few import informative_rows
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.model.collectives.residual import Correction
from cdmpp.model.inference.collectives import predict_rows
from cdmpp.train.adaptation.records import DeviceRecords, Warning_, check_physics, warning
from cdmpp.train.evaluation.tables import overall

Array = np.ndarray[Any, np.dtype[Any]]

#: Shares of the correction that are tried, in this order; the first that beats the base is used, else none.
WEIGHTS = (1.0, 0.5, 0.25)
#: Most measurements that a correction holds; the most informative are chosen of more.
MAX_MEASUREMENTS = 400


def adapt_collectives(
    artifact: Artifact, records: DeviceRecords, rows: Array, *, k: int | None, seed: int, warnings: list[Warning_]
) -> tuple[Artifact, dict[str, Any]]:
    """Correct the model of collectives by ``rows`` (n,) of one device, all of them collectives; returns what
    :class:`cdmpp.train.adaptation.adapt.Adaptation` has.

    ``k``: number of rows to choose, without reading latencies (:mod:`cdmpp.model.collectives.few`). Rows that
    contradict the device's specification are an error.
    """
    started = time.monotonic()
    model = collectives_of(artifact)
    if model is None:
        raise ArtifactError(
            f"{artifact.model_id} has no model of collectives", hint="python -m cdmpp.train.collectives"
        )
    if k is not None and k > len(rows):
        raise DataError(f"k = {k}, but only {len(rows)} records of {records.device.name} can be used", hint="lower k")
    name = model.known_as(records.device) or records.device.name
    measured = collective_rows(records.table, rows, lambda _device: name, records.specs)
    count = min(k if k is not None else len(rows), MAX_MEASUREMENTS)
    everything = np.arange(len(rows))
    chosen = everything
    if count < len(rows):
        chosen = informative_rows(model, measured.contexts, measured.context, measured.bytes, count, seed)
        if k is None:
            text = f"{count} of the {len(rows)} records are used, the most informative ones"
            warnings.append(warning("thinned", text))
    latency = records.table.latency_s[rows]
    output = predict(model, measured, chosen)
    check_physics(records.device.name, latency[chosen], output.roofline_s)
    contexts = [measured.contexts[i] for i in measured.context[chosen].tolist()]
    before, after, weight = _checked(model, contexts, measured.bytes[chosen], latency[chosen])
    if not weight:
        warnings.append(warning("no_gain", "no part of the correction reduces the error on measurements left out"))
    report: dict[str, Any] = {
        "device": records.device.name,
        "base_model_id": artifact.model_id,
        "k": len(chosen),
        "sampler": "informative" if k is not None else None,
        "seed": seed,
        "programs": len(chosen),
        "families": {"collective": len(chosen)},
        "protocols": _counts([c.mode for c in contexts]),
        "cross_validated": {"before": before, "after": after},
        "weight": weight,
        "width": 1.0,
        "unsupported": dict(records.unsupported),
        "warnings": warnings,
    }
    seconds = latency[chosen].tolist()
    made = corrected(artifact, records.device, contexts, measured.bytes[chosen].tolist(), seconds, weight, report)
    result = {"model_id": made.model_id, **report, "selected": None, "before": None, "after": None}
    if k is not None:
        result["selected"] = sorted(records.origin[rows[chosen]].tolist())
        rest = rows[np.setdiff1d(everything, chosen)]
        if len(rest):
            for label, used in (("before", model), ("after", made.collectives)):
                assert used is not None
                figures = predict_rows(used, records.table, rest, records.specs)
                result[label] = {"overall": overall(records.table, rest, figures.point, figures.levels, figures.factor)}
    result["seconds"] = {"all": time.monotonic() - started}
    return made, result


def predict(model: CollectiveModel, measured: CollectiveRows, rows: Array) -> Any:
    """Predictions of some of the rows."""
    return model.predict(measured.contexts, measured.context[rows], measured.bytes[rows])


def _checked(model: CollectiveModel, contexts: Any, bytes_: Array, seconds: Array) -> tuple[float, float, float]:
    """Mean error of the base, and with each measurement left out once of the share of the correction that is used."""
    correction = Correction.fit(model, contexts, bytes_, seconds)
    point = model.predict(contexts, np.arange(len(contexts)), bytes_).point
    log_s = np.log(seconds)
    before = float(np.abs(np.expm1(point - log_s)).mean())
    if len(seconds) < 2:
        return before, before, 0.0
    left_out = log_s - correction.weights / np.diag(correction.inverse)
    for weight in WEIGHTS:
        after = float(np.abs(np.expm1(point + weight * (left_out - point) - log_s)).mean())
        if after < before:
            return before, after, weight
    return before, before, 0.0


def _counts(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}
