"""TVM's own features of scheduled programs (PerStoreFeature), and XGBoost on them as TVM uses it.

Features are kept on disk, one file for a set of programs: extracting them takes some milliseconds a program.
"""

from __future__ import annotations

import hashlib
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.evaluation.cache import cache_dir

Array = np.ndarray[Any, np.dtype[Any]]

WIDTH = 164


def per_store_features(texts: Sequence[str], folder: Path | None = None) -> list[Array]:
    """PerStoreFeature of programs given as TVM JSON.

    Parameters
    ----------
    texts : sequence of str
    folder : Path, optional
        Where they are kept; by default beside the evaluation's features.

    Returns
    -------
    list of float32 array, (stores, 164)
        As TVM scales them: log2(1 + x).
    """
    names = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    digest = hashlib.sha256("".join(names).encode()).hexdigest()[:24]
    path = (folder or cache_dir() / "per-store") / f"{digest}.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as kept:
            return np.split(kept["rows"], np.cumsum(kept["counts"])[:-1])
    found = _extract(texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.stem}.{os.getpid()}.part.npz")
    np.savez_compressed(aside, rows=np.concatenate(found), counts=[len(f) for f in found])
    aside.replace(path)
    return found


def _extract(texts: Sequence[str]) -> list[Array]:
    # TuneContext imports the tensor intrinsics, half a minute of work that no feature needs.
    name = "tvm.s_tir.tensor_intrin"
    sys.modules.setdefault(name, types.ModuleType(name))
    import tvm
    from tvm.s_tir import meta_schedule as ms

    extractor = ms.feature_extractor.PerStoreFeature()
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    found: list[Array] = []
    context = None
    for start in range(0, len(texts), 256):
        candidates = []
        for text in texts[start : start + 256]:
            module = tvm.ir.load_json(text)
            module = module if isinstance(module, tvm.IRModule) else tvm.IRModule({"main": module})
            candidates.append(ms.MeasureCandidate(tvm.s_tir.Schedule(module), []))
        # Of the context the extractor reads the target alone.
        context = context or ms.TuneContext(candidates[0].sch.mod, target=target, num_threads=1)
        found += [rows.numpy().astype(np.float32) for rows in extractor.extract_from(context, candidates)]
    return found


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
    be asked for on several devices: columns of the question are repeated for each of its stores.

    Parameters
    ----------
    features : sequence of array, (stores, 164)
        By program.
    options : dict
        Of xgboost.train.
    trees : int
    """

    def __init__(self, features: Sequence[Array], options: dict[str, Any], trees: int) -> None:
        self.features, self.options, self.trees = features, options, trees
        self.model: Any = None

    def _rows(self, program: Array, question: Array) -> tuple[Array, Array]:
        counts = np.array([len(self.features[key]) for key in program])
        owner = np.repeat(np.arange(len(program)), counts)
        stores = np.concatenate([self.features[key] for key in program])
        return np.concatenate([stores, question[owner]], axis=1), owner

    def fit(self, program: Array, question: Array, target: Array) -> PackedSum:
        """Fit on rows (program key, columns of the question) and their label."""
        import xgboost

        table, owner = self._rows(program, question)
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

    def predict(self, program: Array, question: Array) -> Array:
        """Label of rows."""
        import xgboost

        table, owner = self._rows(program, question)
        margin = (self.base / np.bincount(owner))[owner]
        each = self.model.predict(xgboost.DMatrix(table, base_margin=margin), output_margin=True)
        return np.asarray(np.bincount(owner, weights=each))
