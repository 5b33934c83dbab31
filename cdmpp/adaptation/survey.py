"""What the base model says of every record of a device, in one pass: the ground for choosing and adapting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.adaptation.records import DeviceRecords
from cdmpp.errors import DataError
from cdmpp.evaluation.cache import FeatureCache
from cdmpp.evaluation.query_batches import asked_parts
from cdmpp.nn.adapter_features import FeatureMaker, Names
from cdmpp.nn.inputs import roofline_s, stack_devices
from cdmpp.nn.pipeline import InferencePipeline
from cdmpp.nn.residuals import AdapterFeatures

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Survey:
    """Base answers, per distinct query; a row is a measurement of one of them.

    Attributes
    ----------
    rows : (n,) int
        Rows of the records' table that the model can answer.
    query : (n,) int
        Which query each row measured.
    point, levels, factor, score : per query
        As :class:`cdmpp.nn.pipeline.Answers`, of the base.
    roofline_s : per query
        max(arithmetic at peak, traffic at full bandwidth).
    features : AdapterFeatures
        Per query.
    names : Names
    lost : int
        Rows whose program cannot be encoded.
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
    answerer: InferencePipeline,
    records: DeviceRecords,
    cache: FeatureCache,
    progress: Callable[[int], None] | None = None,
) -> Survey:
    """Ask the base model about every record of a device; no latency is read.

    Raises
    ------
    DataError
        Not one program can be encoded.
    """
    maker = FeatureMaker(answerer.artifact.weights)
    rows: list[Array] = []
    query: list[Array] = []
    said: list[tuple[Array, ...]] = []
    features: list[AdapterFeatures] = []
    count, lost = 0, 0
    for part in asked_parts(records.table, records.usable, cache, records.specs):
        lost += len(part.lost)
        if len(part.index):
            base = answerer.base(part.asked)
            score = base.strangeness + base.step
            asked = part.asked.rows
            bounds = roofline_s(part.asked.store.summary[asked.program], stack_devices(part.asked.specs)[asked.device])
            said.append(
                (base.point, base.levels.astype(np.float32), answerer.factor(score), score, np.maximum(*bounds))
            )
            assert base.peers is not None and base.view is not None
            features.append(maker.features(part.asked, base.peers, base.view))
            rows.append(records.usable[part.index])
            query.append(part.same + count)
            count += len(asked)
        if progress is not None:
            progress(len(part.index) + len(part.lost))
    if not count:
        raise DataError(f"no program of the {lost} records can be encoded", hint="cdmpp inspect shows what is wrong")
    point, levels, factor, score, roofline = (np.concatenate(c) for c in zip(*said, strict=True))
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
