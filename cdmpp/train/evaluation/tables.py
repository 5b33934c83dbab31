"""Evaluation of a model on measured tables (``cdmpp eval``).

Distinct programs of a table are encoded once, some thousands at a time, and their rows are predicted in large
batches, so memory is bounded by the table's columns. Predictions equal those of
:class:`cdmpp.predict.predictor.LatencyPredictor` on the same rows, except for the last digits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cdmpp.data.table import MeasurementTable
from cdmpp.devices.registry import find_known, lookup
from cdmpp.errors import DataError
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.domain.calibration import read_interval
from cdmpp.model.inference.collectives import collectives_of, predict_rows
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.metrics import measure, rank
from cdmpp.train.evaluation.parts import CODES, row_parts, trained_on
from cdmpp.train.evaluation.query_batches import QueryPart, query_parts

Array = np.ndarray[Any, np.dtype[Any]]
#: Source, device, operator, element types.
Group = tuple[str, str, str, str]

#: The interval whose coverage is reported.
INTERVAL = (0.1, 0.9)
#: Latencies outside are errors of units or of the clock; their relative error is meaningless.
BELIEVABLE_S = (1e-9, 1e6)


class HasArtifact(Protocol):
    """An object with an artifact, such as a LatencyPredictor."""

    @property
    def artifact(self) -> Artifact:
        """The loaded model."""


@dataclass
class _Scores:
    """Results over all tables: group and latencies per predicted row, and counts of the other rows."""

    groups: dict[Group, int] = field(default_factory=dict)
    #: Group, measured, point, lower, upper; task and device, program (-1: no task).
    columns: list[tuple[Array, ...]] = field(default_factory=list)
    #: (task, device name in the file) and program hash, numbered over all tables.
    tasks: dict[tuple[str, str], int] = field(default_factory=dict)
    schedules: dict[str, int] = field(default_factory=dict)
    unsupported: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    #: Predicted rows per part of the model's split; and how many of them were training rows.
    parts: Counter[str] = field(default_factory=Counter)
    trained_on: int = 0

    def result(self) -> dict[str, Any]:
        columns = [np.concatenate(parts) for parts in zip(*self.columns, strict=True)]
        group, measured, point, lower, upper, task, schedule = columns or [np.zeros(0)] * 7

        def figures(rows: Any) -> dict[str, Any]:
            metrics = measure(point[rows], measured[rows], lower[rows], upper[rows])
            if (task[rows] >= 0).any():
                metrics |= rank(point[rows], measured[rows], task[rows], schedule[rows])
            return metrics

        order = np.argsort(group, kind="stable")
        edges = np.searchsorted(group[order], np.arange(len(self.groups) + 1))
        groups = []
        for (source, device, op, dtype), code in sorted(self.groups.items()):
            rows = order[edges[code] : edges[code + 1]]
            if len(rows):
                groups.append({"source": source, "device": device, "op": op, "dtype": dtype, **figures(rows)})
        return {
            "overall": figures(slice(None)),
            "groups": groups,
            "parts": {name: self.parts[name] for name in CODES} | {"trained_on": self.trained_on}
            if self.parts
            else None,
            "unsupported": [
                {"source": source, "device": device, "op": op, "reason": reason, "n": n}
                for (source, device, op, reason), n in sorted(self.unsupported.items())
            ],
        }


def evaluate(
    model: Artifact | HasArtifact,
    tables: Iterable[MeasurementTable],
    *,
    devices: Collection[str] | None = None,
    part: str | None = None,
    cache: FeatureCache | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Errors of a model on measured tables, which are read one after the other: with a generator, one is in memory at a
    time.

    Only rows of ``devices`` count: names or aliases that cdmpp knows, or names as a table has them; and only rows of
    this ``part`` ("train", "validation" or "test") of the split that the model was trained with. ``cache`` is that of
    programs given as TVM JSON; ``progress`` is called with the number of rows done since the last call.

    ``overall``: the figures of :func:`cdmpp.train.evaluation.metrics.measure` over all predicted rows, each row of
    equal weight, and of :func:`cdmpp.train.evaluation.metrics.rank` where programs are schedules of tasks; ``groups``:
    the same by ``source``, ``device`` and ``op``, the latter two as the file names them, and ``dtype``, the element
    types ("float8_e4m3+block128", "" for TIR); ``parts``: predicted rows in the training, validation and test part of
    the model's split (:mod:`cdmpp.train.evaluation.parts`), and how many of them it was trained on, or None if the
    model names no split; ``unsupported``: how many rows (``n``) of which group were not predicted, and the ``reason``:
    a code of :data:`cdmpp.data.table.UNSUPPORTED`, ``failed``, ``no_latency``, ``latency_not_positive``,
    ``latency_not_believable`` (outside 1 ns to 10^6 s), or ``invalid_program`` with what is wrong with the program.
    Every row is in one of the two.
    """
    if part is not None and part not in CODES:
        raise DataError(f"unknown part {part!r}", hint="one of: " + ", ".join(CODES))
    artifact = model if isinstance(model, Artifact) else model.artifact
    wanted = None if devices is None else {*devices, *(d.name for d in map(find_known, devices) if d)}
    scores, kept = _Scores(), cache or FeatureCache(schedule=artifact.reads_schedules)
    unmatched = {name for name in devices or () if find_known(name) is None}
    for table in tables:
        unmatched -= set(table.device_name.names)
        _evaluate_table(artifact, table, wanted, part, kept, scores, progress or (lambda _: None))
    for name in sorted(unmatched):
        lookup(name)  # raises, with the nearest names
    return scores.result()


def _evaluate_table(
    artifact: Artifact,
    table: MeasurementTable,
    wanted: set[str] | None,
    part: str | None,
    cache: FeatureCache,
    scores: _Scores,
    progress: Callable[[int], None],
) -> None:
    chosen = np.ones(len(table), dtype=np.bool_)
    if wanted is not None:
        chosen = rows_of(table, wanted)
    try:
        parts = row_parts(artifact, table)
    except DataError:
        if part is not None:
            raise
        parts = None
    if part is not None:
        chosen &= parts == CODES[part]
    reason = reasons(table)
    lost = np.flatnonzero(chosen & (reason != ""))
    _count(scores, table, lost, reason[lost])
    rows = np.flatnonzero(chosen & (reason == ""))
    progress(len(table) - len(rows))
    if not len(rows):
        return
    rows = rows[np.argsort(table.program_key[rows], kind="stable")]
    if parts is not None:
        scores.parts.update({name: int((parts[rows] == code).sum()) for name, code in CODES.items()})
        scores.trained_on += int(trained_on(artifact, table, parts)[rows].sum())
    rows = _score_collectives(artifact, table, rows, scores, progress)
    if not len(rows):
        return
    pipeline = InferencePipeline(artifact)
    batches = query_parts(table, rows, cache, half_type=pipeline.half_type)
    _score_rows(pipeline, table, rows, batches, scores, progress)


def _score_collectives(
    artifact: Artifact, table: MeasurementTable, rows: Array, scores: _Scores, progress: Callable[[int], None]
) -> Array:
    """Predict and score the collectives among the rows; returns the other rows."""
    collective = table.collective[rows]
    if collective.any():
        of_collectives = rows[collective]
        output = predict_rows(collectives_of(artifact), table, of_collectives)
        _score(scores, table, of_collectives, output.point, output.levels, output.factor)
        progress(len(of_collectives))
    return rows[~collective]


def _score_rows(
    pipeline: InferencePipeline,
    table: MeasurementTable,
    rows: Array,
    parts: Iterable[QueryPart],
    scores: _Scores,
    progress: Callable[[int], None],
) -> None:
    for part in parts:
        _count(scores, table, rows[part.failed], np.array(part.reasons, dtype=object))
        if len(part.index):
            output = pipeline.forward(part.batch)
            figures = (column[part.position] for column in (output.point, output.levels, output.factor))
            _score(scores, table, rows[part.index], *figures)
        progress(len(part.index) + len(part.failed))


def _score(scores: _Scores, table: MeasurementTable, rows: Array, point: Array, levels: Array, factor: Array) -> None:
    """Add predictions (log point, log quantiles and their factor) of rows and their measured latencies."""
    point_s = np.exp(point)
    *bounds_s, _ = read_interval(levels, factor, INTERVAL, point_s)
    ranked = _schedules(scores, table, rows)
    scores.columns.append((_groups(scores, table, rows), table.latency_s[rows], point_s, *bounds_s, *ranked))


def overall(table: MeasurementTable, rows: Array, point: Array, levels: Array, factor: Array) -> dict[str, Any]:
    """``overall`` of :func:`evaluate` from given predictions of rows: the fields (n,), (n, len(LEVELS)) and (n,) of
    :class:`cdmpp.model.raw_predictions.RawPredictions`."""
    scores = _Scores()
    _score(scores, table, rows, point, levels, factor)
    figures: dict[str, Any] = scores.result()["overall"]
    return figures


def rows_of(table: MeasurementTable, wanted: Collection[str]) -> Array:
    """Mask of the rows whose device has one of these names, canonical or as in the file."""
    canonical = np.array([name in wanted for name in table.device.names])
    written = np.array([name in wanted for name in table.device_name.names])
    mask: Array = canonical[table.device.codes] | written[table.device_name.codes]
    return mask


def reasons(table: MeasurementTable) -> Array:
    """Reason why each row cannot be evaluated; "" where it can."""
    reason = table.unsupported.array()
    reason[(reason == "") & table.failed] = "failed"
    with np.errstate(invalid="ignore"):
        reason[(reason == "") & (table.latency_s <= 0)] = "latency_not_positive"
    reason[(reason == "") & ~np.isfinite(table.latency_s)] = "no_latency"
    believable = (table.latency_s >= BELIEVABLE_S[0]) & (table.latency_s <= BELIEVABLE_S[1])
    reason[(reason == "") & ~believable] = "latency_not_believable"
    return reason


def _groups(scores: _Scores, table: MeasurementTable, rows: Array) -> Array:
    """Group of each row, numbered over all tables."""
    columns = (table.source, table.device_name, table.op, table.element_types)
    codes = np.stack([labels.codes[rows] for labels in columns], axis=1)
    distinct, inverse = np.unique(codes, axis=0, return_inverse=True)
    number = []
    for group in distinct.tolist():
        source, device, op, dtype = (labels.names[code] for labels, code in zip(columns, group, strict=True))
        number.append(scores.groups.setdefault((source, device, op, dtype), len(scores.groups)))
    return np.array(number, dtype=np.int64)[inverse.reshape(-1)]


def _schedules(scores: _Scores, table: MeasurementTable, rows: Array) -> tuple[Array, Array]:
    """Task and device, and program, of each row, numbered over all tables; -1 without a task."""
    task, program = np.full(len(rows), -1, dtype=np.int64), np.full(len(rows), -1, dtype=np.int64)
    position = table.program_key[rows] - table.tvm.first_key
    for i in np.flatnonzero(position >= 0).tolist():
        name = table.tvm.tasks[position[i]]
        if name:
            device = table.device_name[int(rows[i])]
            task[i] = scores.tasks.setdefault((name, device), len(scores.tasks))
            digest = table.tvm.hashes[position[i]]
            program[i] = scores.schedules.setdefault(digest, len(scores.schedules))
    return task, program


def _count(scores: _Scores, table: MeasurementTable, rows: Array, reasons: Array) -> None:
    labels = (table.source.take(rows), table.device_name.take(rows), table.op.take(rows))
    scores.unsupported.update(zip(*(column.array() for column in labels), reasons, strict=True))
