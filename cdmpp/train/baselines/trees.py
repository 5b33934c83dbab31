"""Gradient-boosted trees on the features of the network."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np

from cdmpp.features.schedule import SCHEDULE_COLUMNS, SCHEDULE_FLAGS
from cdmpp.features.schema import COLUMNS, LINEAR
from cdmpp.model.nn.batch import Inputs
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows

Array = np.ndarray[Any, np.dtype[Any]]

_LINEAR = np.array([*(name in LINEAR for name in COLUMNS), *(name in SCHEDULE_FLAGS for name in SCHEDULE_COLUMNS)])


def summed_leaves(dataset: Dataset) -> Array:
    """Leaf features of every program, summed over its leaves: magnitudes before the logarithm, flags."""
    width = dataset.store.width
    linear = _LINEAR[:width]
    summed = np.zeros((len(dataset.store.bucket), width), dtype=np.float32)
    for size, bucket in dataset.store.buckets.items():
        keys = np.flatnonzero(dataset.store.bucket == size)
        for start in range(0, len(keys), 8192):
            part = keys[start : start + 8192]
            leaves = bucket.leaves[dataset.store.slot[part]].astype(np.float64)
            plain = np.where(linear, leaves, np.copysign(np.exp2(np.abs(leaves)) - 1, leaves)).sum(axis=1)
            summed[part] = np.where(linear, plain, np.copysign(np.log2(1 + np.abs(plain)), plain))
    return summed


class TreeBaseline:
    """XGBoost on log(latency / reference), the network's label, with all inputs of the network.

    Its columns: the summed leaf features, the network's query inputs, the device's numbers and, where
    no device is held out, which device it is.

    Parameters
    ----------
    programs : array, (programs, columns), optional
        Other features of the programs, by key: then these and the device alone are the columns.
    label : {"ratio", "latency"}
        What the logarithm is taken of: latency over reference, or latency.
    """

    def __init__(
        self,
        dataset: Dataset,
        inputs: Inputs,
        config: TrainConfig,
        *,
        programs: Array | None = None,
        label: Literal["ratio", "latency"] = "ratio",
    ) -> None:
        self.dataset, self.inputs, self.config, self.label = dataset, inputs, config, label
        self.own = programs is None
        self.summed = summed_leaves(dataset) if programs is None else programs
        self.model: Any = None

    def base(self, rows: MeasuredRows) -> Array:
        """Log that is added to the trees' output."""
        return self.inputs.reference(rows) if self.label == "ratio" else np.zeros(len(rows))

    def features(self, rows: MeasuredRows) -> Array:
        """Columns of rows, float32."""
        asked = self.inputs.queries(rows)[:2] if self.own else ()
        with np.errstate(divide="ignore"):
            device = np.log2(self.dataset.device_matrix[rows.device]).astype(np.float32)
        columns = [self.summed[rows.program], *asked, device]
        if not self.config.data.holdout_devices:
            columns.append(rows.device[:, None].astype(np.float32))
        table: Array = np.nan_to_num(np.concatenate(columns, axis=1), nan=-1.0, posinf=-1.0, neginf=-1.0)
        return table

    def fit(self, index: Array) -> Self:
        """Fit on (a seeded sample of) the training rows ``index``."""
        from xgboost import XGBRegressor

        finish = self.config.finish
        rng = np.random.default_rng([self.config.seed, 5])
        chosen = np.sort(rng.choice(index, min(len(index), finish.xgboost_rows), replace=False))
        rows = self.dataset.rows.take(chosen)
        target = rows.log_latency - self.base(rows)
        self.model = XGBRegressor(
            n_estimators=finish.xgboost_trees,
            max_depth=9,
            learning_rate=0.1,
            subsample=0.8,
            colsample_bytree=0.6,
            tree_method="hist",
            objective="reg:absoluteerror",
            n_jobs=self.config.optimiser.threads or 2,
            random_state=self.config.seed,
        )
        self.model.fit(self.features(rows), target)
        return self

    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows."""
        out = np.empty(len(rows))
        for start in range(0, len(rows), 50_000):
            part = rows.take(np.arange(start, min(start + 50_000, len(rows))))
            ratio = self.model.predict(self.features(part))
            out[start : start + len(part)] = ratio + self.base(part)
        return out
