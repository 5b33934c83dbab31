"""Stages of a prediction: encode, forward, calibrate, report.

``encode`` makes the batch of queries, ``forward`` is :meth:`cdmpp.model.inference.pipeline.InferencePipeline.forward`,
``calibrate`` makes seconds, intervals and domains of its output, and ``report`` makes a :class:`Prediction` of each
row.
Queries that arrive as arrays (:class:`FeatureQueries`) pass the same stages without an object per row, and have the
same figures to the last digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.features.encode import (
    TIR,
    EncodedProgram,
    EncodedPrograms,
    binding_error,
    operator_name,
    overflow,
    unbound,
    unbound_error,
)
from cdmpp.model.domain.calibration import read_interval
from cdmpp.model.domain.score import THRESHOLDS
from cdmpp.model.inference.consistency import NO_UNITS
from cdmpp.model.inference.encoder import BatchBuilder, HalfType, ProgramEncoder
from cdmpp.model.nn.rows import QueryBatch, QueryRows
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.predict.bulk import DOMAINS, FeatureAnswers, FeatureQueries
from cdmpp.predict.prediction import Prediction, Query, framework_error, query_implementation, query_launcher
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import BACKENDS, PROTOCOLS, framework_code
from cdmpp.programs.templates import size_names

Array = np.ndarray[Any, np.dtype[Any]]


def encode_queries(
    encoder: ProgramEncoder, width: int, half_type: HalfType, queries: Sequence[tuple[Query, DeviceSpec]]
) -> tuple[QueryBatch | None, dict[int, CdmppError]]:
    """Encode queries of tensor programs; ``width`` and ``half_type`` are as in :class:`BatchBuilder`.

    Returns the batch of the queries without an error, in order (None if there is none), and the errors by position.
    """
    numbers: dict[tuple[str, str], int] = {}
    programs: list[TensorProgram | EncodedProgram] = []
    keys = []
    for query, _ in queries:
        program = query.program
        key = numbers.setdefault((program.hash, program.backend), len(numbers))
        keys.append(key)
        if key == len(programs):
            programs.append(program)
    features = encoder.encode(programs)
    builder = BatchBuilder(len(programs), width, half_type)
    for key, (program, encoded) in enumerate(zip(programs, features, strict=True)):
        if isinstance(encoded, EncodedPrograms):
            builder.add(np.array([key]), operator_name(program), encoded, [program.backend])
    overflowing = frozenset(builder.finish().tolist())
    errors: dict[int, CdmppError] = {}
    devices: dict[int, int] = {}
    specs: list[DeviceSpec] = []
    rows = []
    for position, (key, (query, spec)) in enumerate(zip(keys, queries, strict=True)):
        encoded = features[key]
        error = encoded if isinstance(encoded, CdmppError) else None
        if isinstance(encoded, EncodedPrograms):
            error = overflow(query.program.name) if key in overflowing else framework_error(query)
            error = error or binding_error(query.program, encoded, spec)
        if error is not None:
            errors[position] = error
            continue
        device = devices.setdefault(id(spec), len(devices))
        if device == len(specs):
            specs.append(spec)
        code = framework_code(query_launcher(query))
        rows.append((key, device, BACKENDS.index(query.program.backend), PROTOCOLS.index(query.protocol), code))
    return builder.batch(specs, QueryRows(*np.array(rows).T)) if rows else None, errors


def encode_features(
    queries: FeatureQueries, specs: Sequence[DeviceSpec], width: int, half_type: HalfType
) -> QueryBatch:
    """The batch of queries that arrive as arrays, at least one.

    ``specs``: specifications of ``queries.devices``. ``width``, ``half_type``: as in :class:`BatchBuilder`.
    Raises InvalidProgramError: a program given as TIR lacks columns that the network reads or cannot run on its device,
    or features overflow.
    """
    scheduled = np.array([operator == TIR for operator, _ in queries.kinds])[queries.kind]
    _check_bindings(queries, specs, scheduled)
    if queries.leaves.shape[2] < width and scheduled.any():
        raise InvalidProgramError(
            f"row {int(scheduled.argmax())}: its features lack the schedule columns that the model reads",
            hint="encode programs given as TIR with schedule=True",
        )
    builder = BatchBuilder(len(queries), width, half_type)
    groups = np.stack([queries.leaf_count, queries.kind, queries.backend], axis=1)
    distinct, inverse = np.unique(groups, axis=0, return_inverse=True)
    for group, (leaves, kind, backend) in enumerate(distinct.tolist()):
        rows = np.flatnonzero(inverse.reshape(-1) == group)
        (operator, dtype), structure = queries.kinds[kind], queries.structures[kind]
        sizes = queries.sizes[rows, : _size_count(structure.partition(":")[0])] if structure else None
        encoded = EncodedPrograms(
            queries.leaves[rows, :leaves],
            queries.positions[rows, :leaves],
            queries.totals[rows],
            dtype,
            queries.families[kind],
            structure,
            sizes,
        )
        builder.add(rows, operator, encoded, [BACKENDS[backend]])
    if len(overflowing := builder.finish()):
        raise overflow(f"row {int(overflowing[0])}")
    columns = (queries.device, queries.backend, queries.protocol, queries.framework)
    return builder.batch(specs, QueryRows(np.arange(len(queries)), *(column.astype(np.int64) for column in columns)))


def _check_bindings(queries: FeatureQueries, specs: Sequence[DeviceSpec], scheduled: Array) -> None:
    """Refuse TIR that its device cannot run, as :func:`cdmpp.features.bindings.binding_error` does."""
    on_gpu = np.array([spec.kind == "gpu" for spec in specs])[queries.device]
    rows = np.flatnonzero(scheduled & on_gpu & (queries.backend == BACKENDS.index("tvm")))
    if len(rows):
        padding = np.arange(queries.leaves.shape[1]) >= queries.leaf_count[rows, None]
        loose = unbound(queries.leaves[rows], padding)
        if loose.any():
            row = int(rows[loose.argmax()])
            leaves = queries.leaves[row, : queries.leaf_count[row]]
            raise unbound_error(f"row {row}", specs[queries.device[row]].name, leaves)


@lru_cache(maxsize=512)
def _size_count(operator: str) -> int:
    return len(size_names(operator))


def covered(raw: RawPredictions) -> Array:
    """Indices into DOMAINS by the coverage alone, (n,) int8."""
    return (raw.coverage > THRESHOLDS[0]).astype(np.int8) + (raw.coverage > THRESHOLDS[1])


def calibrate(raw: RawPredictions, levels: Sequence[float], model_id: str) -> FeatureAnswers:
    """Seconds, calibrated intervals and domains of predictions."""
    point_s = np.exp(raw.point)
    lower_s, upper_s, quantiles_s = read_interval(raw.levels, raw.factor, levels, point_s)
    return FeatureAnswers(
        latency_s=point_s,
        lower_s=lower_s,
        upper_s=upper_s,
        quantiles=quantiles_s,
        domain=np.where(raw.adjusted >= NO_UNITS, DOMAINS.index("out"), covered(raw)).astype(np.int8),
        domain_score=np.array([round(score, 4) for score in raw.score.tolist()]),
        roofline_s=raw.roofline_s,
        levels=tuple(levels),
        model_id=model_id,
    )


def check_finite(answers: FeatureAnswers) -> None:
    """Raise :class:`InvalidProgramError` for a row without a finite positive latency.

    Features from an unknown source may be finite and still overflow in the network.
    """
    positive = np.column_stack([answers.latency_s, answers.quantiles])
    figures = np.column_stack([positive, answers.domain_score, answers.roofline_s])
    bad = ~(np.isfinite(figures).all(axis=1) & (positive > 0).all(axis=1))
    if bad.any():
        raise InvalidProgramError(
            f"row {int(bad.argmax())}: its features give no finite latency",
            hint="compute features with cdmpp.features.encode",
        )


def report(
    queries: Sequence[tuple[Query, DeviceSpec]], answers: FeatureAnswers, reasons: Sequence[str | None]
) -> list[Prediction]:
    """A :class:`Prediction` of each query, from the rows of ``answers``; ``reasons`` are their ``domain_reason``."""
    names = [f"{level:g}" for level in answers.levels]
    columns = (
        answers.latency_s,
        answers.lower_s,
        answers.upper_s,
        answers.quantiles,
        answers.domain,
        answers.domain_score,
        answers.roofline_s,
    )
    rows = zip(queries, *(column.tolist() for column in columns), reasons, strict=True)
    return [
        Prediction(
            query.program.name,
            query.program.hash,
            spec.name,
            query.program.backend,
            query.protocol,
            query.framework,
            answers.model_id,
            latency_s,
            lower_s,
            upper_s,
            dict(zip(names, quantiles, strict=True)),
            DOMAINS[domain],
            score,
            roofline_s,
            reason,
            implementation=query_implementation(query),
        )
        for (query, spec), latency_s, lower_s, upper_s, quantiles, domain, score, roofline_s, reason in rows
    ]
