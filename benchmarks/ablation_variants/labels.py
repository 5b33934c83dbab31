"""Labels without a reference: the standardised log latency, and its Box-Cox transform."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cdmpp.model.nn.batch import Inputs, predict_rows
from cdmpp.model.nn.losses import relative_error_loss
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows
from cdmpp.train.draw import training_rows
from cdmpp.train.reference.box_cox import BoxCox
from cdmpp.train.step import Objective

Array = np.ndarray[Any, np.dtype[Any]]
LabelName = Literal["latency", "box-cox"]


def fit_label(dataset: Dataset, config: TrainConfig, name: LabelName) -> BoxCox:
    """The label of a run, fitted on its training rows; "latency" is Box-Cox with exponent 0."""
    index = training_rows(dataset, config)[0]
    rng = np.random.default_rng([config.seed, 7])
    return BoxCox.fit(dataset.rows.log_latency[index], rng, 0.0 if name == "latency" else None)


class LabelObjective(Objective):
    """The training objective with another label; needs ``head = "ratio"`` and no ranking loss."""

    def __init__(self, dataset: Dataset, config: TrainConfig, inputs: Inputs, *, name: LabelName) -> None:
        if config.network.head != "ratio" or config.optimiser.ranking_weight:
            raise ValueError(f"label {name!r} needs network.head = 'ratio' and optimiser.ranking_weight = 0")
        super().__init__(dataset, config, inputs)
        self._name, self._transform = name, fit_label(dataset, config, name)

    def label(self, rows: MeasuredRows, reference: Array) -> Array:
        """Labels of rows, (rows,)."""
        return self._transform.encode(rows.log_latency)

    def error(self, point: Tensor, target: Tensor) -> Tensor:
        """Relative error where the label is a logarithm, the squared error otherwise."""
        if self._name == "box-cox":
            return torch.nn.functional.mse_loss(point, target)
        return relative_error_loss(point * self._transform.spread, target * self._transform.spread)


def predict_log(
    network: LatencyNetwork, inputs: Inputs, rows: MeasuredRows, label: BoxCox | None, *, known: bool = True
) -> Array:
    """Predicted log latency of rows, (rows,); ``label`` is None for a network trained on ratios."""
    point = predict_rows(network, inputs, rows, known=known)[0]
    return point if label is None else label.decode(point - inputs.reference(rows))
