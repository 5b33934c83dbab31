"""Application of boosters (:mod:`cdmpp.model.boosters`) to the network's output."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from cdmpp.model.boosters import BoosterGroup, Boosters, Trees, tree_columns, tree_graph
from cdmpp.model.domain.score import Context
from cdmpp.model.inference.engine import session_of
from cdmpp.model.nn.config import LEVELS
from cdmpp.model.raw_predictions import RawPredictions

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Array = np.ndarray[Any, np.dtype[Any]]

_MEDIAN = LEVELS.index(0.5)
#: Operators of one ensemble, at most.
_OPERATORS = 1000


_lock = threading.Lock()
_sessions: WeakKeyDictionary[Trees, InferenceSession] = WeakKeyDictionary()


def _session(trees: Trees) -> InferenceSession:
    """Made at the first query of a group, once; it goes with the model."""
    with _lock:
        if trees not in _sessions:
            _sessions[trees] = session_of(tree_graph(trees))
        return _sessions[trees]


def booster_code(boosters: Boosters, contexts: frozenset[str], context: Context) -> int:
    """Ensemble and operator of a query as one number; -1 where training had no row of its context.

    ``contexts``: :attr:`cdmpp.model.domain.score.Domain.contexts`. The device of ``context`` is "" where training did
    not have it.
    """
    group = BoosterGroup.of(context)
    index = boosters.index.get(group) if group else None
    if index is None or context.launch_key() not in contexts:
        return -1
    operators = boosters.trees[index].operators
    return index * _OPERATORS + operators.index(context.operator) if context.operator in operators else -1


def boost(boosters: Boosters, output: RawPredictions, queries: Array, embedding: Array, code: Array) -> None:
    """Correct the point and the quantiles of an engine's output in place.

    ``queries``: float32, (n, INPUT_WIDTH), inputs of the network. ``embedding``: int, (n,), index of each row's device
    in the network's embedding. ``code``: int, (n,), :func:`booster_code`.
    """
    for index in np.unique(code[code >= 0] // _OPERATORS).tolist():
        trees, rows = boosters.trees[index], np.flatnonzero(code // _OPERATORS == index)
        operator = code[rows] % _OPERATORS
        columns = tree_columns(queries[rows], embedding[rows], operator)
        [correction] = _session(trees).run(None, {"columns": columns})
        by = np.clip(correction[:, 0].astype(np.float64), -trees.reach, trees.reach)
        output.point[rows] += by
        median, width = output.levels[rows, _MEDIAN, None], np.array(trees.widths)[operator, None]
        output.levels[rows] = median + by[:, None] + (output.levels[rows] - median) * width
