"""XGBoost on TVM's own features of scheduled programs (PerStoreFeature), as TVM uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.programs.frontends.per_store import WIDTH
from cdmpp.train.reference.network import per_store_features

__all__ = ["PackedSum", "per_store_features", "summed"]

Array = np.ndarray[Any, np.dtype[Any]]


def summed(features: Sequence[Array]) -> Array:
    """Per program the sum over its stores (of magnitudes, then log2 again), and how many they are."""
    out = np.empty((len(features), WIDTH + 1), dtype=np.float32)
    for i, rows in enumerate(features):
        plain = np.exp2(rows.astype(np.float64)) - 1
        out[i, :WIDTH] = np.log2(1 + np.maximum(plain.sum(axis=0), 0))
        out[i, WIDTH] = len(rows)
    return out


class PackedSum:
    """Trees over single stores whose outputs are summed over the stores of a program.

    What TVM's XGBModel does ("pack-sum"), with a squared error on the label at hand. Rows of one program may
    be predicted on several devices: columns of the query are repeated for each of its stores.

    ``features``, (stores, 164): by program. ``options``: of xgboost.train.
    """

    def __init__(self, features: Sequence[Array], options: dict[str, Any], trees: int) -> None:
        self.features, self.options, self.trees = features, options, trees
        self.model: Any = None

    def _rows(self, program: Array, query: Array) -> tuple[Array, Array]:
        counts = np.array([len(self.features[key]) for key in program])
        owner = np.repeat(np.arange(len(program)), counts)
        stores = np.concatenate([self.features[key] for key in program])
        return np.concatenate([stores, query[owner]], axis=1), owner

    def fit(self, program: Array, query: Array, target: Array) -> PackedSum:
        """Fit on rows (program key, columns of the query) and their label."""
        import xgboost

        table, owner = self._rows(program, query)
        share = 1.0 / np.bincount(owner)

        def gradient(predicted: Array, _: Any) -> tuple[Array, Array]:
            error = np.bincount(owner, weights=predicted) - target
            # The step of every store moves the sum: curvature is shared among them.
            return error[owner], (1.0 / share)[owner]

        # Every store starts with its share of the mean label.
        self.base = float(target.mean())
        margin = (share * self.base)[owner]
        data = xgboost.DMatrix(table, base_margin=margin)
        self.model = xgboost.train(self.options, data, num_boost_round=self.trees, obj=gradient)
        return self

    def predict(self, program: Array, query: Array) -> Array:
        """Label of rows."""
        import xgboost

        table, owner = self._rows(program, query)
        margin = (self.base / np.bincount(owner))[owner]
        per_store = self.model.predict(xgboost.DMatrix(table, base_margin=margin), output_margin=True)
        return np.asarray(np.bincount(owner, weights=per_store))
