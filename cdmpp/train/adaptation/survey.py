"""Base predictions for every record of a device, in one pass; selection and adaptation start from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.errors import DataError
from cdmpp.model.adapter.features import FeatureMaker, Names
from cdmpp.model.adapter.residuals import AdapterFeatures
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.model.nn.inputs import roofline_s, stack_devices
from cdmpp.train.adaptation.records import DeviceRecords
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.query_batches import query_parts

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Survey:
    """Base predictions per distinct query; a row is one measurement of a query.

    Attributes
    ----------
    rows : (n,) int
        Rows of the records' table that the model can predict.
    query : (n,) int
        Query of each row.
    point, levels, factor, score : per query
        Point, quantiles, factor and coverage of :class:`cdmpp.model.raw_predictions.RawPredictions`, of the base.
    roofline_s : per query
        max(arithmetic at peak, traffic at full bandwidth).
    features : AdapterFeatures
        Adapter features per query.
    names : Names
    lost : int
        Number of rows whose program cannot be encoded.
    """

    rows: Array
    query: Array
    point: Array
    levels: Array
    factor: Array
    score: Array
    roofline_s: Array
    features: AdapterFeatures
    names: Names
    lost: int


def survey(
    pipeline: InferencePipeline,
    records: DeviceRecords,
    cache: FeatureCache,
    progress: Callable[[int], None] | None = None,
) -> Survey:
    """Predict every record of a device with the base model; latencies are not read.

    Raises
    ------
    DataError
        No program can be encoded.
    """
    maker = FeatureMaker(pipeline.artifact.weights)
    rows: list[Array] = []
    query: list[Array] = []
    outputs: list[tuple[Array, ...]] = []
    features: list[AdapterFeatures] = []
    count, lost = 0, 0
    for part in query_parts(records.table, records.usable, cache, records.specs):
        lost += len(part.failed)
        if len(part.index):
            batch, base = part.batch, pipeline.predict_base(part.batch)
            summary, matrix = batch.store.summary[batch.rows.program], stack_devices(batch.specs)[batch.rows.device]
            bound = np.maximum(*roofline_s(summary, matrix))
            outputs.append((base.point, base.levels.astype(np.float32), base.factor, base.coverage, bound))
            assert base.peers is not None and base.view is not None
            features.append(maker.features(batch, base.peers, base.view))
            rows.append(records.usable[part.index])
            query.append(part.position + count)
            count += len(batch.rows)
        if progress is not None:
            progress(len(part.index) + len(part.failed))
    if not count:
        raise DataError(
            f"none of the {lost} records has a program that can be encoded",
            hint="cdmpp inspect names the fault of a program",
        )
    point, levels, factor, score, roofline = (np.concatenate(column) for column in zip(*outputs, strict=True))
    return Survey(
        np.concatenate(rows),
        np.concatenate(query),
        point,
        levels,
        factor,
        score,
        roofline,
        AdapterFeatures.concat(features),
        maker.names,
        lost,
    )
