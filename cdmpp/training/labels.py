"""What the network is asked to say: the ratio to a reference, or a latency on its own.

A model that is served says ratios. The two others are for comparisons: a latency without a reference, and the
original's Box-Cox transform of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cdmpp.nn.batch import Inputs, predict_rows
from cdmpp.nn.losses import relative_error_loss
from cdmpp.nn.network import LatencyNetwork
from cdmpp.training.dataset import Rows

Array = np.ndarray[Any, np.dtype[Any]]

LabelName = Literal["ratio", "latency", "box-cox"]
#: Rows that the transform is fitted on.
FIT_ROWS = 100_000


@dataclass(frozen=True)
class Label:
    """A transform of latencies, fitted on training rows alone.

    Attributes
    ----------
    kind : {"ratio", "latency", "box-cox"}
        log(latency / reference); log latency, standardised; Box-Cox of the latency in seconds, standardised.
    mean, spread : float
        Of the transformed training latencies; 0 and 1 for ratios.
    exponent : float
        Box-Cox's lambda.
    lowest, highest : float
        Log of the shortest and the longest latency fitted on: a Box-Cox value may have no inverse.
    """

    kind: LabelName = "ratio"
    mean: float = 0.0
    spread: float = 1.0
    exponent: float = 0.0
    lowest: float = -np.inf
    highest: float = np.inf

    @staticmethod
    def fit(kind: LabelName, log_latency: Array, rng: np.random.Generator) -> Label:
        """Fit on (a seeded sample of) the log latencies of training rows."""
        if kind == "ratio":
            return Label()
        sample = rng.choice(log_latency, min(len(log_latency), FIT_ROWS), replace=False)
        exponent = 0.0
        if kind == "box-cox":
            from scipy.stats import boxcox_normmax

            exponent = float(boxcox_normmax(np.exp(sample), method="mle"))
        values = _box_cox(sample, exponent)
        return Label(
            kind,
            float(values.mean()),
            float(max(values.std(), 1e-9)),
            exponent,
            float(log_latency.min()),
            float(log_latency.max()),
        )

    def encode(self, log_latency: Array, reference: Array) -> Array:
        """Labels of rows, (rows,); ``reference`` is log(reference seconds)."""
        if self.kind == "ratio":
            return log_latency - reference
        return (_box_cox(log_latency, self.exponent) - self.mean) / self.spread

    def decode(self, label: Array, reference: Array) -> Array:
        """log latency of labels, (rows,)."""
        if self.kind == "ratio":
            return label + reference
        values = label * self.spread + self.mean
        if self.exponent:
            with np.errstate(invalid="ignore", divide="ignore"):
                inside = values * self.exponent + 1
                values = np.log(np.maximum(inside, 1e-300)) / self.exponent
        return np.clip(values, self.lowest - 1, self.highest + 1)

    def loss(self, point: Tensor, label: Tensor) -> Tensor:
        """Relative error of the latency where the label is its logarithm, the squared error otherwise."""
        if self.kind == "box-cox":
            return torch.nn.functional.mse_loss(point, label)
        return relative_error_loss(point * self.spread, label * self.spread)

    def predict(self, network: LatencyNetwork, inputs: Inputs, rows: Rows, *, known: bool = True) -> Array:
        """log latency of rows from a network that was trained on this label."""
        reference = inputs.reference(rows)
        return self.decode(predict_rows(network, inputs, rows, known=known)[0] - reference, reference)


def _box_cox(log_latency: Array, exponent: float) -> Array:
    return np.expm1(log_latency * exponent) / exponent if exponent else log_latency
