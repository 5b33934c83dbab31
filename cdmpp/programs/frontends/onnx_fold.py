"""Evaluation of the small constant parts of an ONNX graph: shapes, axes, scales, masks.

ONNX's own reference implementation computes the values. The size of a result is bounded before it is computed, and
only operators that decide shapes and patterns are evaluated. Weights are never read: a latency depends on their
shape alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Largest number of elements of a constant that is evaluated: a causal mask of 2048 x 2048.
MAX_ELEMENTS = 1 << 22

#: TensorProto.DataType -> numpy name, for the types that constants are computed in.
NUMPY_TYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "float32",  # numpy has no bfloat16; float32 holds its values exactly
}


class NotFoldable(Exception):  # noqa: N818 - an outcome, not an error
    """The node cannot be evaluated here, or its result is too large."""


def fold(
    op: str, opset: int, inputs: Sequence[Array | None], attrs: Mapping[str, Any], outputs: int = 1
) -> list[Array]:
    """Evaluate one node of the standard domain on constant inputs.

    Parameters
    ----------
    op : str
        Operator type.
    opset : int
        Version of the operator set that the model imports.
    inputs : sequence of array or None
        None for an optional input that is left out.
    attrs : mapping of str to int, float, str, list of these, or array
        Attributes of the node.
    outputs : int
        Number of outputs.

    Raises
    ------
    NotFoldable
        The operator is not evaluated here, its inputs do not fit it, or the result exceeds :data:`MAX_ELEMENTS`.
    """
    bound = _BOUNDS.get(op)
    if bound is None:
        raise NotFoldable(op)
    try:
        if not 0 <= bound(inputs, attrs) <= MAX_ELEMENTS:
            raise NotFoldable(f"{op}: too large")
        with np.errstate(all="ignore"):
            values = _evaluate(op, opset, inputs, attrs, outputs)
    except NotFoldable:
        raise
    except Exception as error:  # a malformed constant part is reported where its value is needed
        raise NotFoldable(f"{op}: {error}") from error
    if sum(value.size for value in values) > MAX_ELEMENTS:
        raise NotFoldable(f"{op}: too large")
    return values


def _evaluate(
    op: str, opset: int, inputs: Sequence[Array | None], attrs: Mapping[str, Any], outputs: int
) -> list[Array]:
    import onnx
    from onnx.reference import ReferenceEvaluator

    names = ["" if value is None else f"input_{i}" for i, value in enumerate(inputs)]
    node = onnx.helper.make_node(op, names, [f"output_{i}" for i in range(outputs)])
    for name, value in attrs.items():
        tensor = isinstance(value, np.ndarray)
        node.attribute.append(
            onnx.helper.make_attribute(name, onnx.numpy_helper.from_array(value) if tensor else value)
        )
    feeds = {name: value for name, value in zip(names, inputs, strict=True) if value is not None}
    graph = onnx.helper.make_graph(
        [node], op, [onnx.ValueInfoProto(name=n) for n in feeds], [onnx.ValueInfoProto(name=n) for n in node.output]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    values = [np.asarray(value) for value in ReferenceEvaluator(model).run(None, feeds)]
    # Types that numpy does not have, such as bfloat16, come as extension types.
    return [value if value.dtype.isbuiltin == 1 else value.astype(np.float32) for value in values]


def _ints(value: Any) -> list[int]:
    return [int(v) for v in np.asarray(value).reshape(-1)]


def _given(inputs: Sequence[Array | None], index: int = 0) -> Array:
    value = inputs[index] if index < len(inputs) else None
    if value is None:
        raise NotFoldable("missing input")
    return value


def _first(inputs: Sequence[Array | None], attrs: Mapping[str, Any]) -> int:
    return _given(inputs).size


def _broadcast(inputs: Sequence[Array | None], attrs: Mapping[str, Any]) -> int:
    _given(inputs)
    return math.prod(np.broadcast_shapes(*(value.shape for value in inputs if value is not None)))


def _range(inputs: Sequence[Array | None], attrs: Mapping[str, Any]) -> int:
    start, limit, delta = (float(_given(inputs, i).reshape(-1)[0]) for i in range(3))
    return max(0, math.ceil((limit - start) / delta))


def _expand(inputs: Sequence[Array | None], attrs: Mapping[str, Any]) -> int:
    return math.prod(np.broadcast_shapes(_given(inputs).shape, tuple(_ints(_given(inputs, 1)))))


def _gather(inputs: Sequence[Array | None], attrs: Mapping[str, Any]) -> int:
    data = _given(inputs)
    elements: int = data.size // max(data.shape[int(attrs.get("axis", 0))], 1) * _given(inputs, 1).size
    return elements


#: Operators that are evaluated, with the number of elements that their result has at most.
_BOUNDS: dict[str, Callable[[Sequence[Array | None], Mapping[str, Any]], int]] = {
    "Range": _range,
    "Expand": _expand,
    "Gather": _gather,
    "ConstantOfShape": lambda inputs, attrs: math.prod(_ints(_given(inputs))),
    "Tile": lambda inputs, attrs: _given(inputs).size * math.prod(_ints(_given(inputs, 1))),
    "Concat": lambda inputs, attrs: sum(value.size for value in inputs if value is not None),
    **dict.fromkeys(
        (
            *("Identity", "Dropout", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Slice"),
            *("Split", "Trilu", "CumSum", "ReduceProd", "ReduceSum", "ReduceMin", "ReduceMax"),
            *("Sqrt", "Reciprocal", "Neg", "Abs", "Floor", "Ceil", "Exp", "Log", "Not"),
        ),
        _first,
    ),
    **dict.fromkeys(
        (
            *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Where"),
            *("And", "Or", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        ),
        _broadcast,
    ),
}
