"""Answers to queries that come as arrays: no object per row on the way.

The figures are those that a predictor gives for the same rows one by one, to the last digit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cdmpp.errors import DataError, InvalidProgramError
from cdmpp.features.bulk import TIR, FeatureAnswers, FeatureQueries
from cdmpp.features.encode import EncodedPrograms
from cdmpp.nn.calibration import read_quantiles
from cdmpp.nn.domain import THRESHOLDS
from cdmpp.nn.inputs import roofline_s, stack_devices
from cdmpp.nn.levels import LEVELS
from cdmpp.nn.pipeline import InferencePipeline, Queries, QueryBatch
from cdmpp.nn.store import ProgramStore

Array = np.ndarray[Any, np.dtype[Any]]


def answer_features(answerer: InferencePipeline, queries: FeatureQueries) -> FeatureAnswers:
    """Answer rows in their order.

    Raises
    ------
    DataError
        A level is not one of the network's range.
    InvalidProgramError
        A program given as TIR lacks columns that the network reads, or figures of a row make no latency.
    UnknownDeviceError
        A device's name is not known.
    """
    artifact = answerer.artifact
    levels = queries.quantiles
    if not levels or not all(LEVELS[0] <= level <= LEVELS[-1] for level in levels):
        raise DataError(f"quantiles {list(levels)} are not levels between {LEVELS[0]} and {LEVELS[-1]}")
    specs = [artifact.device(d) if isinstance(d, str) else d for d in queries.devices]
    if not len(queries):
        return FeatureAnswers.none(levels, artifact.model_id)
    store = _store(queries, artifact.config.leaf_width)
    asked = QueryBatch(
        store,
        queries.kinds,
        queries.kind,
        specs,
        Queries(
            program=np.arange(len(queries)),
            device=queries.device.astype(np.int64),
            backend=queries.backend.astype(np.int64),
            protocol=queries.protocol.astype(np.int64),
            framework=queries.framework.astype(np.int64),
        ),
    )
    # Features of nobody knows where may be finite and yet add up to none of this world's latencies.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        said = answerer.answer(asked)
        bound = np.maximum(*roofline_s(store.summary, stack_devices(specs)[asked.rows.device]))
        point = np.exp(said.point)
        values = np.exp(read_quantiles(said.levels, said.factor, levels))
    figures = np.column_stack([point, values, said.score, bound])
    bad = ~(np.isfinite(figures).all(axis=1) & (point > 0) & (values > 0).all(axis=1))
    if bad.any():
        raise InvalidProgramError(
            f"row {int(bad.argmax())}: its features make no latency",
            hint="features are what cdmpp.features.encode makes of a program",
        )
    return FeatureAnswers(
        latency_s=point,
        # The point minimises the relative error and lies a little below the median.
        lower_s=np.minimum(point, values.min(axis=1)),
        upper_s=np.maximum(point, values.max(axis=1)),
        quantiles=values,
        domain=((said.coverage > THRESHOLDS[0]).astype(np.int8) + (said.coverage > THRESHOLDS[1])),
        domain_score=np.array([round(score, 4) for score in said.score.tolist()]),
        roofline_s=bound,
        levels=levels,
        model_id=artifact.model_id,
    )


def _store(queries: FeatureQueries, width: int) -> ProgramStore:
    """Rows as programs of a store, those of one leaf count and kind together."""
    scheduled = np.array([operator == TIR for operator, _ in queries.kinds])[queries.kind]
    if queries.leaves.shape[2] < width and scheduled.any():
        raise InvalidProgramError(
            f"row {int(scheduled.argmax())}: its features lack the schedule's columns",
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
