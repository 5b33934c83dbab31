"""Predictions for queries that arrive as arrays, without an object per row.

The results equal those of :meth:`cdmpp.predictor.LatencyPredictor.predict_queries` to the last digit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cdmpp.domain.calibration import read_interval
from cdmpp.domain.score import THRESHOLDS
from cdmpp.errors import DataError, InvalidProgramError
from cdmpp.features.bulk import TIR, FeatureAnswers, FeatureQueries
from cdmpp.features.encode import EncodedPrograms
from cdmpp.inference.pipeline import InferencePipeline
from cdmpp.nn.config import LEVELS
from cdmpp.nn.inputs import roofline_s, stack_devices
from cdmpp.nn.rows import QueryBatch, QueryRows
from cdmpp.nn.store import ProgramStore

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
    store = _store(queries, artifact.config.leaf_width)
    batch = QueryBatch(
        store,
        queries.kinds,
        queries.kind,
        specs,
        QueryRows(
            program=np.arange(len(queries)),
            device=queries.device.astype(np.int64),
            backend=queries.backend.astype(np.int64),
            protocol=queries.protocol.astype(np.int64),
            framework=queries.framework.astype(np.int64),
        ),
    )
    # Features from an unknown source may be finite and still overflow.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        output = pipeline.predict(batch)
        bound = np.maximum(*roofline_s(store.summary, stack_devices(specs)[batch.rows.device]))
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


def _store(queries: FeatureQueries, width: int) -> ProgramStore:
    """A store with one program per row, added by leaf count and kind."""
    scheduled = np.array([operator == TIR for operator, _ in queries.kinds])[queries.kind]
    if queries.leaves.shape[2] < width and scheduled.any():
        raise InvalidProgramError(
            f"row {int(scheduled.argmax())}: its features lack the schedule columns that the model reads",
            hint="encode programs given as TIR with schedule=True",
        )
    store = ProgramStore(len(queries), width)
    groups = np.stack([queries.leaf_count, queries.kind], axis=1)
    distinct, inverse = np.unique(groups, axis=0, return_inverse=True)
    families = queries.families
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
            ),
        )
    store.finish()
    return store
