"""Fitting of boosters (:mod:`cdmpp.model.boosters`) to the network's residuals."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.model.boosters import LEAF, LEAF_STEP, BoosterGroup, Boosters, Trees, tree_columns
from cdmpp.model.domain.calibration import fit_factor
from cdmpp.model.domain.evidence import contexts_of
from cdmpp.model.domain.score import Context
from cdmpp.model.inference.boosting import boost, booster_code
from cdmpp.model.nn.batch import NetworkInputs, predict_rows
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.train.dataset import Dataset, MeasuredRows

Array = np.ndarray[Any, np.dtype[Any]]

logger = logging.getLogger(__name__)

#: Trees of an ensemble at most, and training rows per leaf of a tree with its bounds.
TREES, LEAF_ROWS, LEAVES = 300, 600, (31, 127)
#: Share of a tree's correction that counts, with so many training rows; it goes with their root, within bounds.
RATE, RATE_ROWS, RATES = 0.12, 60_000, (0.1, 0.35)
#: Training rows of an ensemble: at least, and at most, a seeded sample of them. Validation rows at least.
MIN_ROWS, MAX_ROWS, MIN_HELD = 1000, 600_000, 20
#: Validation rows that the width of an operator's intervals is fitted to, at least.
MIN_CALIBRATION = 200
#: Relative errors below this count less: the loss is quadratic there.
SMOOTH = 0.05
#: Trees without a gain on validation rows after which a fit ends.
PATIENCE = 20
#: Share of the training rows' corrections that are within an ensemble's reach.
REACH = 0.999


@dataclass(frozen=True)
class RowPredictor:
    """Predicts rows of a dataset with the network and, where it has some, its boosters."""

    network: LatencyNetwork
    inputs: NetworkInputs
    dataset: Dataset
    # (devices,): of each device of the dataset, its index in the network's embedding (0: not trained on)
    embedding: Array
    contexts: frozenset[str]  # :attr:`cdmpp.model.domain.score.Domain.contexts` of the training rows
    boosters: Boosters | None = None

    def __call__(self, rows: MeasuredRows, *, known: bool = True) -> tuple[Array, Array]:
        """:func:`cdmpp.model.nn.batch.predict_rows` of rows, corrected where training had their contexts."""
        point, levels = predict_rows(self.network, self.inputs, rows, known=known, embedding=self.embedding)
        if self.boosters is not None and known:
            contexts, context = self.contexts_of(rows)
            code = np.array([booster_code(self.boosters, self.contexts, each) for each in contexts])[context]
            queries = self.inputs.queries(rows)[0]
            boost(self.boosters, RawPredictions(point, levels), queries, self.embedding[rows.device], code)
        return point, levels

    def contexts_of(self, rows: MeasuredRows) -> tuple[list[Context], Array]:
        """Distinct contexts of rows, and each row's index among them."""
        names = [device.name for device in self.dataset.devices]
        return contexts_of(rows, self.dataset.kind, self.dataset.kinds, names)


def fit_boosters(predict: RowPredictor, index: Array, seed: int) -> Boosters:
    """Fit an ensemble for each group of library kernels. ``predict`` is the network, without boosters; ``index`` are
    the training rows. The validation rows of their contexts decide the number of trees and the width of intervals."""
    dataset = predict.dataset
    index = np.concatenate([index, np.flatnonzero(dataset.rows.part == 1)])
    rows = dataset.rows.take(index)
    contexts, context = predict.contexts_of(rows)
    of = [BoosterGroup.of(each) if each.launch_key() in predict.contexts else None for each in contexts]
    groups = sorted(set(filter(None, of)))
    code = np.array([groups.index(group) if group else -1 for group in of])[context]
    fitted = {}
    for number, group in enumerate(groups):
        rng = np.random.default_rng([seed, 7, number])
        train, held = (np.flatnonzero((code == number) & (rows.part == part)) for part in (0, 1))
        if len(train) < MIN_ROWS or len(held) < MIN_HELD:
            continue
        train = np.sort(rng.choice(train, min(len(train), MAX_ROWS), replace=False))
        operators = tuple(sorted({contexts[each].operator for each in np.unique(context[train]).tolist()}))
        numbers = np.array([operators.index(c.operator) if c.operator in operators else -1 for c in contexts])
        held = held[numbers[context[held]] >= 0]
        sets: list[Array] = []
        for chosen in (train, held):
            part = rows.take(chosen)
            columns = tree_columns(
                predict.inputs.queries(part)[0], predict.embedding[part.device], numbers[context[chosen]]
            )
            sets += [columns, part.log_latency - predict(part)[0]]
        trees = fit_trees(*sets, operators=operators, seed=seed)
        logger.info("boosters of %s: %s rows, %s trees", group, f"{len(train):,}", len(trees.size) if trees else "no")
        if trees is not None:
            part, operator = rows.take(held), numbers[context[held]]
            levels = replace(predict, boosters=Boosters({group: trees}))(part)[1]
            fitted[group] = replace(trees, widths=interval_widths(part.log_latency, levels, operator, len(operators)))
    return Boosters(fitted)


def interval_widths(log_measured: Array, levels: Array, operator: Array, operators: int) -> tuple[float, ...]:
    """:attr:`Trees.widths` with which the intervals of validation rows have their nominal coverage."""
    members = [np.flatnonzero(operator == number) for number in range(operators)]
    return tuple(
        round(fit_factor(log_measured[rows], levels[rows]), 4) if len(rows) >= MIN_CALIBRATION else 1.0
        for rows in members
    )


def relative_loss(residual: Array, correction: Array) -> tuple[Array, Array]:
    """Gradient and curvature of a smooth mean relative error, as XGBoost's interface of scikit-learn wants them.

    The library's own pseudo-Huber loss on the logarithm estimates the median, whose relative error is larger where
    measurements scatter.
    """
    log_ratio = np.clip(correction - residual, -3, 3)
    weight = 1 / np.sqrt(1 + (np.expm1(log_ratio) / SMOOTH) ** 2)
    return weight * np.expm1(log_ratio) * np.exp(log_ratio), weight * np.exp(2 * log_ratio)


def relative_error(residual: Array, correction: Array) -> float:
    """Mean relative error of corrected predictions."""
    return float(np.abs(np.expm1(correction - residual)).mean())


def fit_trees(
    columns: Array, residual: Array, held_columns: Array, held_residual: Array, *, operators: tuple[str, ...], seed: int
) -> Trees | None:
    """Fit one ensemble to log residuals; None where it does not lower the error on the held-out rows."""
    from xgboost import XGBRegressor

    model = XGBRegressor(
        n_estimators=TREES,
        max_leaves=int(np.clip(len(columns) // LEAF_ROWS, *LEAVES)),
        max_depth=10,
        grow_policy="lossguide",
        learning_rate=float(np.clip(RATE * (len(columns) / RATE_ROWS) ** 0.5, *RATES)),
        min_child_weight=3,
        subsample=0.8,
        colsample_bytree=0.6,
        tree_method="hist",
        objective=relative_loss,
        max_delta_step=0.3,
        base_score=0.0,
        eval_metric=relative_error,
        early_stopping_rounds=PATIENCE,
        n_jobs=1,
        random_state=seed,
    )
    model.fit(columns, residual, eval_set=[(held_columns, held_residual)], verbose=False)
    if model.best_score >= relative_error(held_residual, np.zeros(len(held_residual))):
        return None
    booster = model.get_booster()[: model.best_iteration + 1]
    trees = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
    names = ("left_children", "right_children", "split_indices", "split_conditions")
    left, right, feature, value = (np.concatenate([np.array(tree[name]) for tree in trees]) for name in names)
    is_leaf = left < 0
    if not np.array_equal(right[~is_leaf], left[~is_leaf] + 1):
        raise AssertionError("XGBoost does not number the two children of a node one after the other")
    value = np.where(is_leaf, np.rint(value / LEAF_STEP) * LEAF_STEP, value).astype(np.float32)
    numbers, number = np.unique(value, return_inverse=True)
    return Trees(
        np.array([len(tree["left_children"]) for tree in trees], dtype=np.uint8),
        np.where(is_leaf, LEAF, feature).astype(np.uint8),
        left[~is_leaf].astype(np.uint8),
        number.astype(np.uint16),  # at most the library's 256 thresholds of a column, and the steps of a leaf
        numbers,
        operators,
        reach=round(float(np.quantile(np.abs(booster.inplace_predict(columns)), REACH)), 4),
        widths=(1.0,) * len(operators),
    )
