"""Baselines of the error tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Self

import numpy as np

from cdmpp.model.nn.batch import Inputs
from cdmpp.train.baselines.analytic import MeanBaseline, RooflineBaseline, roofline_log
from cdmpp.train.baselines.trees import TreeBaseline, summed_leaves
from cdmpp.train.baselines.utilisation import UtilisationBaseline
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows

__all__ = [
    "BASELINES",
    "Baseline",
    "MeanBaseline",
    "RooflineBaseline",
    "TreeBaseline",
    "UtilisationBaseline",
    "fit_baselines",
    "roofline_log",
    "summed_leaves",
]

Array = np.ndarray[Any, np.dtype[Any]]
BaselineName = Literal["roofline", "mean", "xgboost", "utilisation"]


class Baseline(Protocol):
    """Interface of a baseline that is fitted on training rows."""

    def fit(self, index: Array) -> Self:
        """Fit on the rows ``index`` of the dataset."""

    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows, (rows,)."""


BASELINES: dict[BaselineName, Callable[[Dataset, Inputs, TrainConfig], Baseline]] = {
    "roofline": RooflineBaseline,
    "mean": MeanBaseline,
    "xgboost": TreeBaseline,
    "utilisation": UtilisationBaseline,
}


def fit_baselines(
    dataset: Dataset, inputs: Inputs, config: TrainConfig, index: Array, names: Sequence[BaselineName]
) -> dict[str, Baseline]:
    """The named baselines, fitted on the training rows ``index``."""
    return {name: BASELINES[name](dataset, inputs, config).fit(index) for name in names}
