"""The in-memory form of an ONNX graph: nodes, shapes, types, constants, who writes and reads what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.onnx_fold import MAX_ELEMENTS, NUMPY_TYPES, Array, NotFoldable, fold

#: TensorProto.DataType -> name, for the types that programs may have, and the others by their ONNX name.
TYPE_NAMES = {
    0: "unknown",
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "string",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
    17: "float8e4m3fn",
    18: "float8e4m3fnuz",
    19: "float8e5m2",
    20: "float8e5m2fnuz",
    21: "uint4",
    22: "int4",
    23: "float4e2m1",
}

#: Operators whose result differs from run to run, and ones that a runtime does not fold away.
_NEVER_CONSTANT = {
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
    "DequantizeLinear",
    "QuantizeLinear",
    "DynamicQuantizeLinear",
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
        return TYPE_NAMES.get(self.elem_type(value), "unknown")

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
        import numpy as np

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
        import numpy as np

        for key, kind in (
            ("value_float", np.float32),
            ("value_floats", np.float32),
            ("value_int", np.int64),
            ("value_ints", np.int64),
        ):
            if key in node.attrs:
                return np.asarray(node.attrs[key], dtype=kind)
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
        if elements > MAX_ELEMENTS or tensor.data_type not in NUMPY_TYPES:
            raise NotFoldable(name)
        try:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                if self.folder is None:
                    raise FileNotFoundError("a model given as bytes has no external files")
                tensor = onnx.TensorProto.FromString(tensor.SerializeToString())
                # Refuses paths that lead out of the model's folder.
                external_data_helper.load_external_data_for_tensor(tensor, str(self.folder))
            value: Array = numpy_helper.to_array(tensor).astype(NUMPY_TYPES[tensor.data_type], copy=False)
            return value
        except Exception as error:
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            what = "its external data cannot be read" if external else "its data are damaged"
            line = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise InvalidProgramError(
                f"{self.name}: constant {name!r} decides sizes or operators, but {what}: {line}",
                hint="keep the external data files beside the .onnx file, or export the model again",
            ) from None
