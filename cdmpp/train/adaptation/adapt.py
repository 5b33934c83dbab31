"""Adaptation of a model to a device by k measurements (``cdmpp adapt``, ``LatencyPredictor.adapt``).

The residual process is fitted to the measured queries and cross-validated (:func:`fit_process`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.errors import ArtifactError, DataError
from cdmpp.model.adapter import Adapter, AdapterFeatures, ResidualProcess, ResidualSettings, centre_and_spread
from cdmpp.model.artifact.load import adapted
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.domain.calibration import fit_factor
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.model.nn.config import LEVELS
from cdmpp.model.nn.inputs import FAMILIES
from cdmpp.train.adaptation.collectives import WEIGHTS, adapt_collectives
from cdmpp.train.adaptation.records import (
    DeviceRecords,
    Survey,
    Warning_,
    check_physics,
    family_warnings,
    protocol_warnings,
    survey,
    warning,
)
from cdmpp.train.adaptation.samplers import choose
from cdmpp.train.adaptation.select import choose_rows
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.query_batches import query_parts
from cdmpp.train.evaluation.tables import overall

Array = np.ndarray[Any, np.dtype[Any]]

#: Smallest number of measurements for cross-validation: one is predicted from the others.
CHECKED_FROM = 2
#: The interval's factor is shrunk towards 1 with the weight of this number of measurements.
_WIDTH_PRIOR = 10.0
_WIDTH_BOUNDS = (0.5, 3.0)


@dataclass(frozen=True)
class MeasuredQueries:
    """Distinct measured queries, k rows: log seconds, the base's predictions, features."""

    log_s: Array
    point: Array
    levels: Array
    features: AdapterFeatures

    def __len__(self) -> int:
        return len(self.log_s)

    def take(self, rows: Array) -> MeasuredQueries:
        """The rows with these positions."""
        return MeasuredQueries(self.log_s[rows], self.point[rows], self.levels[rows], self.features.take(rows))


@dataclass(frozen=True)
class Checked:
    """A residual process, and the share of its correction that cross-validation supports."""

    process: ResidualProcess
    weight: float  # one of :data:`WEIGHTS`, or 0 where none of them has a smaller error than the base
    before: float  # mean relative error of the base on the k measurements
    # error of the model with ``weight`` when each measurement is left out; ``before`` where ``weight`` is 0
    after: float
    whole: float  # error of the whole correction when each is left out; ``before`` where none can be left out
    width: float  # factor on the intervals


def fit_process(measured: MeasuredQueries, settings: ResidualSettings | None = None) -> Checked:
    """Fit the residuals, leave each measurement out once (in closed form), and choose the weight."""
    process = ResidualProcess.fit(measured.features, measured.log_s - measured.point, settings)
    before = mean_error(measured.point, measured.log_s)
    kept = Checked(process, 0.0, before, before, before, 1.0)
    if len(measured) < CHECKED_FROM:
        return kept
    mean, variance = process.leave_one_out()
    # The variance of an unmeasured query excludes noise; leave_one_out includes it.
    hidden = np.maximum(variance - process.settings.noise**2, 0.0)
    for weight in WEIGHTS:
        point, levels = centre_and_spread(process, measured.point, measured.levels, mean, hidden, weight)
        after = mean_error(point, measured.log_s)
        if weight == 1.0:
            kept = replace(kept, whole=after)
        if after < before:
            return replace(kept, weight=weight, after=after, width=_width(measured.log_s, levels))
    return kept


def mean_error(point: Array, log_s: Array) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.abs(np.expm1(point - log_s)).mean())


def _width(log_s: Array, levels: Array) -> float:
    """Factor with which the 80 % interval covers 80 % of left-out measurements, shrunk towards 1 for few of them."""
    k = len(log_s)
    # Split conformal: of k errors, the rank that also holds for the next one.
    share = min(1.0, 0.8 * (k + 1) / k)
    factor = fit_factor(log_s, levels, share)
    weight = k / (k + _WIDTH_PRIOR)
    return float(np.clip(np.exp(weight * np.log(max(factor, 1e-3))), *_WIDTH_BOUNDS))


#: Maximum number of measured queries in the residual process; KMeans selects from more, without latencies.
MAX_PROCESS_ROWS = 1000


@dataclass(frozen=True)
class Adaptation:
    """An adapted model and the report of its adaptation."""

    artifact: Artifact  # the base with the adapter
    # ``device``, ``base_model_id``, ``model_id``; ``k`` (records used); ``selected`` (rows of the file, where k were
    # chosen); ``cross_validated`` (``before`` and ``after``: mean relative error on the used measurements, each left
    # out once); ``before`` and ``after`` (``overall``: the figures of :func:`cdmpp.train.evaluation.tables.evaluate` on
    # the remaining rows, of base and adapted model; None where no row remains or all were used); ``weight``,
    # ``families``, ``unsupported``, ``warnings`` (``code`` and ``message`` each), ``seconds``
    report: dict[str, Any]


def adapt(
    artifact: Artifact,
    records: DeviceRecords,
    *,
    k: int | None = None,
    sampler: str = "variance",
    seed: int = 0,
    settings: ResidualSettings | None = None,
    cache: FeatureCache | None = None,
    progress: Callable[[int], None] | None = None,
    known: Survey | None = None,
) -> Adaptation:
    """Adapt a base model, not adapted yet, to the device of some records.

    ``k`` records are chosen by ``sampler`` ("kmeans", "random" or "variance"), without reading latencies, and the error
    on the remaining ones is reported; by default all are used. ``progress`` is called with the number of records
    surveyed since the last call. ``known``: :func:`cdmpp.train.adaptation.records.survey` of these records by this
    model, where it is at hand. Records that contradict the device's specification are an error.
    """
    started = time.monotonic()
    if "base" in artifact.manifest:
        raise ArtifactError(
            f"{artifact.model_id} is adapted already, to {artifact.manifest['adapted_device']}",
            hint=f"adapt its base, {artifact.manifest['base']['model_id']}, with all records",
        )
    if records.table.collective[records.usable].all():
        return Adaptation(*adapt_collectives(artifact, records, records.usable, k=k, seed=seed, warnings=[]))
    records, scheduled, left_out = _of_one_part(artifact, records)
    part = artifact.part(scheduled=scheduled)
    cache = cache or FeatureCache(schedule=artifact.reads_schedules)
    known = known or survey(InferencePipeline(part), records, cache, progress)
    chosen = np.arange(len(known.rows)) if k is None else _choose(known, k, sampler, seed, settings)
    warnings, used = _usable(records, known, chosen)
    warnings += left_out
    measured, queries = _measured(records, known, used)
    check_physics(records.device.name, np.exp(measured.log_s), known.roofline_s[queries])
    protocols = records.table.protocol.take(known.rows[used]).array().tolist()
    warnings += protocol_warnings(protocols)
    warnings += family_warnings(measured.features.family, known.features.family)

    fitting = time.monotonic()
    thin = _thinned(measured, seed)
    checked = fit_process(measured.take(thin), settings)
    fitted_s = time.monotonic() - fitting
    warnings += _evidence(checked, len(measured))
    report: dict[str, Any] = {
        "device": records.device.name,
        "base_model_id": artifact.model_id,
        "k": len(chosen),
        "sampler": sampler if k is not None else None,
        "seed": seed,
        "programs": len(measured),
        "families": _counts(measured.features.family),
        "protocols": {name: protocols.count(name) for name in sorted(set(protocols))},
        "cross_validated": {"before": checked.before, "after": checked.after},
        "weight": checked.weight,
        "width": checked.width,
        "unsupported": dict(records.unsupported) | ({"invalid_program": known.lost} if known.lost else {}),
        "warnings": warnings,
    }
    figures = checked.process, known.names, checked.weight, checked.width
    adapter = Adapter(records.device, *figures, report, scheduled=scheduled)
    made = adapted(artifact, adapter)
    result = {"model_id": made.model_id, **report, "selected": None, "before": None, "after": None}
    if k is not None:
        result["selected"] = sorted(records.origin[known.rows[chosen]].tolist())
        rest = np.setdiff1d(np.arange(len(known.rows)), chosen)
        if len(rest):
            before, after = _compare(artifact, made, records, known, rest, cache)
            result |= {"before": {"overall": before}, "after": {"overall": after}}
            adapter.report["remaining"] = {"before": before["mape"], "after": after["mape"], "n": before["n"]}
    result["seconds"] = {
        "survey": round(fitting - started, 3),
        "fit": round(fitted_s, 3),
        "all": round(time.monotonic() - started, 3),
    }
    return Adaptation(made, result)


def _of_one_part(artifact: Artifact, records: DeviceRecords) -> tuple[DeviceRecords, bool, list[Warning_]]:
    """The records that one network predicts, whether it is the part for scheduled programs, and warnings."""
    table, usable, warnings = records.table, records.usable, []
    collective = table.collective[usable]
    if collective.any():
        text = f"{collective.sum()} records are of collectives, which another model predicts: adapt it to them alone"
        warnings.append(warning("collectives_not_used", text))
        usable = usable[~collective]
    tvm = table.backend.is_("tvm")[usable] & (artifact.scheduled is not None)
    if tvm.any() and not tvm.all():
        text = f"{tvm.sum()} records have backend tvm, which another part of the model predicts: adapt it to them alone"
        warnings.append(warning("scheduled_not_used", text))
        usable = usable[~tvm]
    return replace(records, usable=usable), bool(tvm.all()), warnings


def _choose(known: Survey, k: int, sampler: str, seed: int, settings: ResidualSettings | None) -> Array:
    """Rows of the survey to use; latencies are not read."""
    rows = len(known.rows)
    if not 1 <= k <= rows:
        raise DataError(f"k = {k}, but {rows} records can be used", hint=f"k from 1 to {rows}, or bring more records")
    return choose_rows(known, np.arange(rows), k, sampler, seed, settings)


def _usable(records: DeviceRecords, known: Survey, chosen: Array) -> tuple[list[Warning_], Array]:
    """Chosen rows without physically implausible ones, if any remain, and a warning about those."""
    reasons = records.table.excluded.take(known.rows[chosen]).array()
    good = chosen[reasons == ""]
    lost = len(chosen) - len(good)
    if not lost or not len(good):
        return [], chosen
    names = ", ".join(sorted({str(reason) for reason in reasons if reason}))
    return [warning("implausible_records", f"{lost} of the records are left out ({names})")], good


def _measured(records: DeviceRecords, known: Survey, used: Array) -> tuple[MeasuredQueries, Array]:
    """Distinct measured queries (the geometric mean where one was measured several times)."""
    queries, which = np.unique(known.query[used], return_inverse=True)
    logs = np.log(records.table.latency_s[known.rows[used]])
    mean = np.bincount(which, weights=logs) / np.bincount(which)
    features = known.features.take(queries)
    return MeasuredQueries(mean, known.point[queries], known.levels[queries], features), queries


def _thinned(measured: MeasuredQueries, seed: int) -> Array:
    if len(measured) <= MAX_PROCESS_ROWS:
        return np.arange(len(measured))
    features = measured.features
    return np.sort(choose("kmeans", features.numeric, features.family, MAX_PROCESS_ROWS, seed))


def _evidence(checked: Checked, k: int) -> list[Warning_]:
    """Warning where cross-validation does not support the whole correction."""
    if k < CHECKED_FROM:
        message = f"{k} measured program cannot be left out, so nothing was checked: the base's predictions are kept"
        return [warning("not_checked", message)]
    if checked.weight == 1.0:
        return []
    tried = f"on measurements left out the whole correction has an error of {100 * checked.whole:.1f} %"
    base = f"the base model {100 * checked.before:.1f} %"
    if checked.weight:
        message = f"{tried}, {checked.weight:.0%} of it {100 * checked.after:.1f} %, {base}: this part is applied"
        return [warning("little_gain", message)]
    return [warning("no_gain", f"{tried}, {base}, and no part of it is better: the base's predictions are kept")]


def _counts(families: Array) -> dict[str, int]:
    codes, counts = np.unique(families, return_counts=True)
    return {FAMILIES[code]: count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}


def _compare(
    base: Artifact, made: Artifact, records: DeviceRecords, known: Survey, rest: Array, cache: FeatureCache
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of base and adapted model on the same rows."""
    rows, query = known.rows[rest], known.query[rest]
    surveyed = (known.point, known.levels, known.factor), answers_after(made, known)
    figures = []
    for artifact, columns in zip((base, made), surveyed, strict=True):
        again = _consistent(InferencePipeline(artifact), records, rows, cache)
        figures.append(overall(records.table, rows, *(again or (column[query] for column in columns))))
    return figures[0], figures[1]


def _consistent(
    pipeline: InferencePipeline, records: DeviceRecords, rows: Array, cache: FeatureCache
) -> tuple[Array, Array, Array] | None:
    """Predictions of rows where some of them depend on other protocols or types; None where none does."""
    parts = list(query_parts(records.table, rows, cache, records.specs, pipeline.half_type))
    if not any(pipeline.needs_other_predictions(part.batch) for part in parts if len(part.index)):
        return None
    point, levels, factor = np.empty(len(rows)), np.empty((len(rows), len(LEVELS))), np.empty(len(rows))
    for part in parts:
        output = pipeline.forward(part.batch)
        for column, values in ((point, output.point), (levels, output.levels), (factor, output.factor)):
            column[part.index] = values[part.position]
    return point, levels, factor


def answers_after(made: Artifact, known: Survey) -> tuple[Array, Array, Array]:
    """Point, levels and factor (:class:`cdmpp.model.raw_predictions.RawPredictions`) of the adapted model for every
    surveyed query, computed from those of the base."""
    adapter = made.adapter
    assert adapter is not None
    if not adapter.weight:
        return known.point, known.levels, known.factor
    point, levels, _ = adapter.apply(known.point, known.levels, known.features)
    return point, levels, np.full(len(point), adapter.width)
