"""Predictions for queries that arrive as arrays, without an object per row.

The results equal those of :meth:`cdmpp.predict.predictor.LatencyPredictor.predict_queries` to the last digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidProgramError
from cdmpp.features.encode import (
    TIR,
    EncodedPrograms,
    encode_as,
    finite,
    overflow,
    structure_types,
    unbound,
    unbound_error,
)
from cdmpp.model.domain.calibration import read_interval
from cdmpp.model.domain.score import THRESHOLDS
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.model.nn.config import LEVELS
from cdmpp.model.nn.inputs import roofline_s, stack_devices
from cdmpp.model.nn.rows import ProgramStore, QueryBatch, QueryRows
from cdmpp.predict.bulk import FeatureAnswers, FeatureQueries
from cdmpp.programs.query_options import BACKENDS
from cdmpp.programs.templates import size_names

Array = np.ndarray[Any, np.dtype[Any]]


def predict_features(pipeline: InferencePipeline, queries: FeatureQueries) -> FeatureAnswers:
    """Predict rows, in their order.

    Raises
    ------
    DataError
        A quantile level is outside the network's range.
    InvalidProgramError
        A program given as TIR lacks columns that the network reads, or the features of a row give no latency.
    UnknownDeviceError
        A device name is not known.
    """
    artifact = pipeline.artifact
    levels = queries.quantiles
    if not levels or not all(LEVELS[0] <= level <= LEVELS[-1] for level in levels):
        raise DataError(f"quantiles {list(levels)} must be one or more levels between {LEVELS[0]} and {LEVELS[-1]}")
    specs = [artifact.device(d) if isinstance(d, str) else d for d in queries.devices]
    if not len(queries):
        return FeatureAnswers.none(levels, artifact.model_id)
    _check_bindings(queries, specs)
    kinds, kind, half, further = _halves(queries, pipeline)
    store = _store(queries, artifact.leaf_width, further)
    batch = QueryBatch(
        store,
        kinds,
        kind,
        specs,
        QueryRows(
            program=np.arange(len(queries)),
            device=queries.device.astype(np.int64),
            backend=queries.backend.astype(np.int64),
            protocol=queries.protocol.astype(np.int64),
            framework=queries.framework.astype(np.int64),
        ),
        half,
    )
    # Features from an unknown source may be finite and still overflow.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        output = pipeline.predict(batch)
        bound = np.maximum(*roofline_s(store.summary[: len(queries)], stack_devices(specs)[batch.rows.device]))
        point = np.exp(output.point)
        lower, upper, values = read_interval(output.levels, output.factor, levels, point)
    figures = np.column_stack([point, values, output.score, bound])
    bad = ~(np.isfinite(figures).all(axis=1) & (point > 0) & (values > 0).all(axis=1))
    if bad.any():
        raise InvalidProgramError(
            f"row {int(bad.argmax())}: its features give no finite latency",
            hint="compute features with cdmpp.features.encode",
        )
    return FeatureAnswers(
        latency_s=point,
        lower_s=lower,
        upper_s=upper,
        quantiles=values,
        domain=((output.coverage > THRESHOLDS[0]).astype(np.int8) + (output.coverage > THRESHOLDS[1])),
        domain_score=np.array([round(score, 4) for score in output.score.tolist()]),
        roofline_s=bound,
        levels=levels,
        model_id=artifact.model_id,
    )


def _check_bindings(queries: FeatureQueries, specs: Sequence[DeviceSpec]) -> None:
    """Refuse TIR that its device cannot run, as :func:`cdmpp.features.encode.binding_error` does."""
    scheduled = np.array([operator == TIR for operator, _ in queries.kinds])[queries.kind]
    on_gpu = np.array([spec.kind == "gpu" for spec in specs])[queries.device]
    rows = np.flatnonzero(scheduled & on_gpu & (queries.backend == BACKENDS.index("tvm")))
    if len(rows):
        padding = np.arange(queries.leaves.shape[1]) >= queries.leaf_count[rows, None]
        loose = unbound(queries.leaves[rows], padding)
        if loose.any():
            row = int(rows[loose.argmax()])
            leaves = queries.leaves[row, : queries.leaf_count[row]]
            raise unbound_error(f"row {row}", specs[queries.device[row]].name, leaves)


def _halves(
    queries: FeatureQueries, pipeline: InferencePipeline
) -> tuple[list[tuple[str, str]], Array, Array, list[tuple[Array, EncodedPrograms]]]:
    """16-bit forms of the rows' programs, where their predictions may depend on them.

    Returns
    -------
    kinds, kind, half
        Fields of :class:`QueryBatch`; the keys of the forms follow those of the rows.
    further : list of (keys, features)
    """
    rows = len(queries)
    given = zip(queries.kinds, queries.structures, strict=True)
    kinds = [(operator, structure_types(structure, dtype)) for (operator, dtype), structure in given]
    kind, half = [queries.kind], np.full(rows, -1)
    further = []
    backends = np.unique(queries.backend).tolist()
    for number, ((operator, types), structure) in enumerate(zip(tuple(kinds), queries.structures, strict=True)):
        for backend in backends:
            wanted = pipeline.half_type(operator, types, BACKENDS[backend])
            members = np.flatnonzero((queries.kind == number) & (queries.backend == backend))
            if wanted is None or not structure or not len(members):
                continue
            features = encode_as(structure, wanted, queries.sizes[members])
            if not finite(features).all():
                raise overflow(f"row {int(members[(~finite(features)).argmax()])}")
            keys = rows + np.arange(len(members))
            rows += len(members)
            half[members] = keys
            kind.append(np.full(len(members), len(kinds)))
            kinds.append((operator, wanted))
            further.append((keys, features))
    return kinds, np.concatenate(kind), half, further


@lru_cache(maxsize=512)
def _size_count(operator: str) -> int:
    return len(size_names(operator))


def _store(queries: FeatureQueries, width: int, further: list[tuple[Array, EncodedPrograms]]) -> ProgramStore:
    """A store with one program per row, added by leaf count and kind, and further programs."""
    scheduled = np.array([operator == TIR for operator, _ in queries.kinds])[queries.kind]
    if queries.leaves.shape[2] < width and scheduled.any():
        raise InvalidProgramError(
            f"row {int(scheduled.argmax())}: its features lack the schedule columns that the model reads",
            hint="encode programs given as TIR with schedule=True",
        )
    store = ProgramStore(len(queries) + sum(len(keys) for keys, _ in further), width)
    groups = np.stack([queries.leaf_count, queries.kind], axis=1)
    distinct, inverse = np.unique(groups, axis=0, return_inverse=True)
    families = queries.families
    sized = [_size_count(structure.partition(":")[0]) if structure else 0 for structure in queries.structures]
    for group, (leaves, kind) in enumerate(distinct.tolist()):
        rows = np.flatnonzero(inverse.reshape(-1) == group)
        store.add(
            rows,
            EncodedPrograms(
                queries.leaves[rows, :leaves, :width],
                queries.positions[rows, :leaves],
                queries.totals[rows],
                queries.kinds[kind][1],
                families[kind],
                queries.structures[kind],
                queries.sizes[rows, : sized[kind]] if sized[kind] else None,
            ),
        )
    for keys, features in further:
        store.add(keys, features)
    store.finish()
    return store
