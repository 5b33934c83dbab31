"""Analytic baselines: the roofline, and the mean ratio to it per operator."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from cdmpp.model.nn.batch import Inputs
from cdmpp.model.nn.inputs import roofline_s
from cdmpp.programs.query_options import FLOOR_S, PROTOCOLS
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows

Array = np.ndarray[Any, np.dtype[Any]]


def roofline_log(dataset: Dataset, rows: MeasuredRows) -> Array:
    """log of max(arithmetic at peak, traffic at bandwidth) + the protocol's launch floor."""
    compute, memory = roofline_s(dataset.store.summary[rows.program], dataset.device_matrix[rows.device])
    floor = np.array([FLOOR_S[p] for p in PROTOCOLS])[rows.protocol]
    return np.asarray(np.log(np.maximum(compute, memory) + floor))


class RooflineBaseline:
    """:func:`roofline_log`; nothing is fitted."""

    def __init__(self, dataset: Dataset, inputs: Inputs, config: TrainConfig) -> None:
        self.dataset = dataset

    def fit(self, index: Array) -> Self:
        """Nothing to fit."""
        return self

    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows."""
        return roofline_log(self.dataset, rows)


class MeanBaseline:
    """The geometric mean of latency / reference per operator, dtype, protocol and backend.

    The reference is that of the network: arithmetic + traffic + launch floor. An operator without training rows of a
    protocol has its mean over all protocols; an operator without training rows has the overall mean.
    """

    def __init__(self, dataset: Dataset, inputs: Inputs, config: TrainConfig) -> None:
        self.dataset, self.inputs = dataset, inputs
        self._means: list[dict[int, float]] = []

    def _keys(self, rows: MeasuredRows) -> list[Array]:
        """Codes of rows, from the finest to the coarsest grouping."""
        kind = self.dataset.kind[rows.program].astype(np.int64)
        return [(kind * 64 + rows.protocol) * 64 + rows.backend, kind, np.zeros(len(rows), dtype=np.int64)]

    def fit(self, index: Array) -> Self:
        """Means over the training rows ``index``."""
        rows = self.dataset.rows.take(index)
        ratio = rows.log_latency - self.inputs.reference(rows)
        self._means = []
        for keys in self._keys(rows):
            distinct, inverse = np.unique(keys, return_inverse=True)
            means = np.bincount(inverse, weights=ratio) / np.bincount(inverse)
            self._means.append(dict(zip(distinct.tolist(), means.tolist(), strict=True)))
        return self

    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows."""
        found = np.full(len(rows), np.nan)
        for keys, means in zip(self._keys(rows), self._means, strict=True):
            distinct, inverse = np.unique(keys, return_inverse=True)
            values = np.array([means.get(key, np.nan) for key in distinct.tolist()])[inverse]
            found = np.where(np.isnan(found), values, found)
        return np.asarray(found + self.inputs.reference(rows))
