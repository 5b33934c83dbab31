"""Boosters: trees that correct the network where training had rows of the query's context.

An ensemble adds its trees' outputs to the log of the predicted seconds. It reads the network's inputs. Only numpy is
needed to load it; :func:`tree_graph` gives an ensemble to ONNX Runtime.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from safetensors.numpy import load, save

from cdmpp.model.domain.score import Context
from cdmpp.model.nn.inputs import INPUT_WIDTH
from cdmpp.programs.operators import operator_family
from cdmpp.programs.query_options import BACKENDS

Array = np.ndarray[Any, np.dtype[Any]]

#: Columns that trees read: the network's inputs, the device's index in the network's embedding, the operator's index
#: in :attr:`Trees.operators`.
COLUMNS = INPUT_WIDTH + 2
#: ``feature`` of a leaf.
LEAF = 255
#: Values of leaves are multiples of this, so that their sum in float32 does not depend on the order of the trees.
LEAF_STEP = 2.0**-14
_ARRAYS = ("size", "feature", "left", "value", "numbers")
#: Element types of which the tables have most rows.
WIDE = ("float32", "float16", "bfloat16")


class BoosterGroup(NamedTuple):
    """Queries that one ensemble corrects."""

    framework: str  # "" where it is not stated
    protocol: str
    family: str
    narrow: bool  # whether an operand has another type than :data:`WIDE`

    @classmethod
    def of(cls, context: Context) -> BoosterGroup | None:
        """Group of a query for a library kernel; None for another program."""
        if context.backend != BACKENDS[0]:
            return None
        family = operator_family(context.operator)
        return cls(context.framework, context.protocol, family, context.dtype not in WIDE)


@dataclass(frozen=True, eq=False)
class Trees:
    """One ensemble."""

    size: Array  # uint8, (trees,): number of nodes of each tree. The first node of a tree is its root.
    feature: Array  # uint8, (nodes,): column that a node compares; :data:`LEAF` in a leaf
    # uint8, (nodes that are no leaves,): node of the tree for rows below the threshold; the next node has the other
    # rows.
    left: Array
    value: Array  # uint16, (nodes,): index of the threshold, or of a leaf's output, in ``numbers``
    numbers: Array  # float32, (.,)
    operators: Sequence[str]  # operators of the training rows
    reach: float  # largest correction of the log latency
    widths: Sequence[float]  # For each operator, a factor on the distance of the network's quantiles from the median.


class Boosters:
    """Ensembles by the group of queries that each corrects."""

    def __init__(self, groups: dict[BoosterGroup, Trees]) -> None:
        self.trees = tuple(groups.values())
        self.index = {group: i for i, group in enumerate(groups)}

    def save(self) -> bytes:
        """The content of a safetensors file."""
        tensors: dict[str, Array] = {}
        groups = []
        for group, i in self.index.items():
            trees = self.trees[i]
            tensors |= {f"{i}.{name}": getattr(trees, name) for name in _ARRAYS}
            groups.append([*group, list(trees.operators), trees.reach, list(trees.widths)])
        return save(tensors, {"format": "cdmpp", "groups": json.dumps(groups)})

    @classmethod
    def load(cls, content: bytes) -> Self:
        """Inverse of :meth:`save`."""
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        groups = {}
        for i, (*names, operators, reach, widths) in enumerate(json.loads(header["__metadata__"]["groups"])):
            arrays = {name: tensors[f"{i}.{name}"] for name in _ARRAYS}
            groups[BoosterGroup(*names)] = Trees(
                **arrays, operators=tuple(operators), reach=reach, widths=tuple(widths)
            )
        return cls(groups)


def tree_columns(queries: Array, embedding: Array, operator: Array) -> Array:
    """Columns that trees read, float32, (n, COLUMNS), from the network's inputs and two indices."""
    return np.column_stack([queries, embedding.astype(np.float32), operator.astype(np.float32)])


def tree_graph(trees: Trees) -> bytes:
    """An ONNX graph of an ensemble: from ``columns``, (n, COLUMNS), to ``correction``, (n, 1)."""
    from onnx import AttributeProto, TensorProto, helper

    size = trees.size.astype(np.int64)
    tree = np.repeat(np.arange(len(size)), size)
    node = np.arange(len(tree)) - np.repeat(np.cumsum(size) - size, size)
    is_leaf, value = trees.feature == LEAF, trees.numbers[trees.value]
    left = np.zeros(len(tree), dtype=np.int64)
    left[~is_leaf] = trees.left
    attributes = {
        "nodes_treeids": tree,
        "nodes_nodeids": node,
        "nodes_featureids": np.where(is_leaf, 0, trees.feature),
        "nodes_values": value,
        "nodes_modes": np.where(is_leaf, b"LEAF", b"BRANCH_LT"),
        "nodes_truenodeids": left,
        "nodes_falsenodeids": np.where(is_leaf, 0, left + 1),
        "target_treeids": tree[is_leaf],
        "target_nodeids": node[is_leaf],
        "target_ids": np.zeros(int(is_leaf.sum()), dtype=np.int64),
        "target_weights": value[is_leaf],
    }
    ensemble = helper.make_node("TreeEnsembleRegressor", ["columns"], ["correction"], domain="ai.onnx.ml", n_targets=1)
    for name, values in attributes.items():
        # Five times as fast as the helper, which checks every number.
        field = {"f": "floats", "S": "strings"}.get(values.dtype.kind, "ints")
        attribute = ensemble.attribute.add(name=name, type=AttributeProto.AttributeType.Value(field.upper()))
        getattr(attribute, field).extend(values.tolist())
    columns = helper.make_tensor_value_info("columns", TensorProto.FLOAT, [None, COLUMNS])
    correction = helper.make_tensor_value_info("correction", TensorProto.FLOAT, [None, 1])
    graph = helper.make_graph([ensemble], "boosters", [columns], [correction])
    opsets = [helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("", 20)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return model
