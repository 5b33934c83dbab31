"""The in-memory form of an ONNX graph: nodes, shapes, types, constants, who writes and reads what.

Small constant parts (shapes, axes, scales, masks) are evaluated by ONNX's own reference implementation. The size of a
result is bounded before it is computed, and only operators that decide shapes and patterns are evaluated. Weights are
never read: a latency depends on their shape alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cdmpp.errors import InvalidProgramError

Array = npt.NDArray[Any]

#: Largest number of elements of a constant that is evaluated: a causal mask of 2048 x 2048.
MAX_ELEMENTS = 1 << 22

#: Types that constants are computed in; bfloat16 as float32, which holds its values exactly.
_COMPUTED = frozenset(
    {"float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "bool", "float16", "float64", "uint32", "uint64"}
    | {"bfloat16"}
)


class NotFoldable(Exception):  # noqa: N818 - an outcome, not an error
    """The node cannot be evaluated here, or its result is too large."""


def fold(
    op: str, opset: int, inputs: Sequence[Array | None], attrs: Mapping[str, Any], outputs: int = 1
) -> list[Array]:
    """Evaluate one node of the standard domain on constant inputs; None stands for an optional input that is left out.

    Raises NotFoldable: the operator is not evaluated here, its inputs do not fit it, or the result exceeds
    :data:`MAX_ELEMENTS`.
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


@cache
def type_name(number: int) -> str:
    """Numpy's name of an element type of ``TensorProto.DataType``, else ONNX's; ``"unknown"`` where it is not given."""
    import onnx

    names = {kind: name.lower() for name, kind in onnx.TensorProto.DataType.items()}
    return {0: "unknown", 1: "float32", 11: "float64"}.get(number) or names.get(number, "unknown")


#: Operators whose result differs from run to run, and ones that a runtime does not fold away.
_NEVER_CONSTANT = {
    *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"),
    *("DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear"),
}


@dataclass(frozen=True)
class OnnxNode:
    """One node; ``captured`` are outer values that its If or Loop bodies may read."""

    index: int
    id: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    captured: tuple[str, ...] = ()
    opset: int = 1

    @property
    def label(self) -> str:
        """Operator type with its domain, unless that is the standard one."""
        return f"{self.domain}::{self.op}" if self.domain else self.op

    def input(self, index: int) -> str:
        """Name of an input, empty when it is left out."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def is_(self, *ops: str) -> bool:
        """Whether this is one of the standard operators ``ops``."""
        return not self.domain and self.op in ops


@dataclass
class OnnxGraph:
    """A graph with static shapes; answers what the mapping rules ask."""

    nodes: list[OnnxNode]
    initializers: Mapping[str, Any]
    outputs: Sequence[str]
    folder: Path | None
    name: str
    model: Any = None
    _types: dict[str, tuple[int, tuple[int, ...] | None]] = field(default_factory=dict)
    _producer: dict[str, OnnxNode] = field(default_factory=dict)
    _consumers: dict[str, list[OnnxNode]] = field(default_factory=dict)
    _constant: set[str] = field(default_factory=set)
    _values: dict[str, Array | None] = field(default_factory=dict)
    _budget: int = 8 * MAX_ELEMENTS

    def __post_init__(self) -> None:
        for node in self.nodes:
            for value in node.outputs:
                if value:
                    self._producer[value] = node

        self._constant.update(self.initializers)

    def set_type(self, name: str, elem_type: int, shape: tuple[int, ...] | None) -> None:
        """Take over a value's inferred type and shape."""
        self._types[name] = (elem_type, shape)

    def settle(self, node: OnnxNode) -> None:
        """Decide whether a node is constant; its inputs' types are known, and their nodes settled."""
        if self._is_constant_node(node):
            self._constant.update(o for o in node.outputs if o)
            return  # a Shape does not read its input at run time
        for value in (*node.inputs, *node.captured):
            if value:
                self._consumers.setdefault(value, []).append(node)

    def _is_constant_node(self, node: OnnxNode) -> bool:
        if node.domain or node.captured or node.op in _NEVER_CONSTANT:
            return False
        if node.op in ("Shape", "Size"):
            return self.shape(node.inputs[0]) is not None
        return all(not value or value in self._constant for value in node.inputs)

    # -- queries -----------------------------------------------------------------------------

    def shape(self, value: str) -> tuple[int, ...] | None:
        """Static shape, or None when it is not known."""
        return self._types.get(value, (0, None))[1]

    def elem_type(self, value: str) -> int:
        """Element type as a number of ``TensorProto.DataType``, 0 when it is not known."""
        return self._types.get(value, (0, None))[0]

    def dtype(self, value: str) -> str:
        """Element type by its numpy-style name, ``"unknown"`` when it is not known."""
        return type_name(self.elem_type(value))

    def is_constant(self, value: str) -> bool:
        """Whether the value is the same in every run (a weight, or computed from weights and shapes)."""
        return value in self._constant

    def producer(self, value: str) -> OnnxNode | None:
        """The node that writes a value; None for inputs, weights and whatever is constant."""
        return None if value in self._constant else self._producer.get(value)

    def consumers(self, value: str) -> list[OnnxNode]:
        """The nodes that read a value at run time, once per input that reads it."""
        return self._consumers.get(value, [])

    def sole_consumer(self, value: str) -> OnnxNode | None:
        """The only node that reads a value, when there is one and the value is not an output."""
        readers = self.consumers(value)
        return readers[0] if len(readers) == 1 and value not in self.outputs else None

    def value(self, name: str, limit: int = MAX_ELEMENTS) -> Array | None:
        """A constant's value, or None when it is not constant, too large or cannot be evaluated."""
        if name not in self._constant:
            return None
        shape = self.shape(name)
        if shape is not None and math.prod(shape) > limit:
            return None
        for node in self._cone(name):
            self._evaluate(node)
        if name not in self._values and name in self.initializers:
            self._values[name] = self._read(name)
        return self._values.get(name)

    def scalar(self, name: str) -> float | None:
        """A constant's value when it has exactly one element."""
        shape = self.shape(name)
        if name not in self._constant or shape is None or math.prod(shape) != 1:
            return None
        value = self.value(name)
        return None if value is None or value.size != 1 else float(value.reshape(-1)[0])

    # -- evaluation ----------------------------------------------------------------------------

    def _cone(self, name: str) -> list[OnnxNode]:
        """Nodes that a constant depends on and that are not evaluated yet, in topological order."""
        nodes: dict[int, OnnxNode] = {}
        stack = [name]
        while stack:
            value = stack.pop()
            node = self._producer.get(value)
            if node is None or value in self._values or node.index in nodes:
                continue
            nodes[node.index] = node
            if node.op not in ("Shape", "Size"):
                stack.extend(i for i in node.inputs if i)
        return [nodes[index] for index in sorted(nodes)]

    def _evaluate(self, node: OnnxNode) -> None:
        values: list[Array | None]
        try:
            values = list(self._fold(node))
        except NotFoldable:
            values = [None] * len(node.outputs)
        for name, value in zip(node.outputs, values, strict=False):
            if value is not None:
                self._budget -= value.size
            self._values[name] = value if self._budget >= 0 else None

    def _fold(self, node: OnnxNode) -> list[Array]:
        if node.op == "Shape" or node.op == "Size":
            shape = self.shape(node.inputs[0])
            if shape is None:
                raise NotFoldable(node.op)
            if node.op == "Size":
                return [np.asarray(math.prod(shape), dtype=np.int64)]
            start, end = int(node.attrs.get("start", 0)), node.attrs.get("end")
            return [np.asarray(shape[start : None if end is None else int(end)], dtype=np.int64)]
        if node.op == "Constant":
            return [self._constant_node(node)]
        inputs = []
        for name in node.inputs:
            value = self._values.get(name)
            if value is None and name in self.initializers:
                value = self._values[name] = self._read(name)
            if name and value is None:
                raise NotFoldable(node.op)
            inputs.append(value)
        attrs = dict(node.attrs)
        if node.op == "ConstantOfShape" and "value" in attrs:
            attrs["value"] = self._decode(attrs["value"], "value")
        return fold(node.op, node.opset, inputs, attrs, len(node.outputs))

    def _constant_node(self, node: OnnxNode) -> Array:
        for key in ("value_float", "value_floats", "value_int", "value_ints"):
            if key in node.attrs:
                return np.asarray(node.attrs[key], dtype=np.float32 if "float" in key else np.int64)
        if "value" not in node.attrs:
            raise NotFoldable("Constant")
        return self._decode(node.attrs["value"], node.id)

    def _read(self, name: str) -> Array | None:
        try:
            return self._decode(self.initializers[name], name)
        except NotFoldable:
            return None

    def _decode(self, tensor: Any, name: str) -> Array:
        """A TensorProto's value, read from an external file if need be."""
        import onnx
        from onnx import external_data_helper, numpy_helper

        elements = math.prod(tensor.dims)
        kind = type_name(tensor.data_type)
        if elements > MAX_ELEMENTS or kind not in _COMPUTED:
            raise NotFoldable(name)
        try:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                if self.folder is None:
                    raise FileNotFoundError("a model given as bytes has no external files")
                tensor = onnx.TensorProto.FromString(tensor.SerializeToString())
                # Refuses paths that lead out of the model's folder.
                external_data_helper.load_external_data_for_tensor(tensor, str(self.folder))
            kind = "float32" if kind == "bfloat16" else kind
            value: Array = numpy_helper.to_array(tensor).astype(kind, copy=False)
            return value
        except Exception as error:
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            what = "its external data cannot be read" if external else "its data are damaged"
            line = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise InvalidProgramError(
                f"{self.name}: constant {name!r} decides sizes or operators, but {what}: {line}",
                hint="keep the external data files beside the .onnx file, or export the model again",
            ) from None
