"""Builder of ONNX graphs, limited to what the network needs.

It uses numpy and onnx only, so a model folder can be converted without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]

#: Operator set of the newest operator used (Gelu), and the matching file format.
OPSET, IR_VERSION = 20, 9
#: Name of a value in the graph.
Value = str

_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}


class Graph:
    """A graph under construction. A call adds a node and returns its output.

    Parameters
    ----------
    weights : mapping of str to array
        Arrays by name; those that are used are stored in the graph.

    Examples
    --------
    >>> graph = Graph({})
    >>> doubled = graph("Mul", graph.input("x", "float32", ["rows"]), 2.0)
    """

    def __init__(self, weights: dict[str, Array]) -> None:
        self._weights = weights
        #: What the names of weights begin with.
        self.prefix = ""
        self._nodes: list[Any] = []
        self._stored: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._count = 0

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> Value:
        """Add an input; texts in its shape are variable sizes."""
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], list(shape)))
        return name

    def output(self, value: Value, name: str, shape: Sequence[int | str]) -> None:
        """Make a value an output of this name."""
        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))

    def weight(self, name: str) -> Value:
        """A weight, by its name behind the prefix."""
        name = self.prefix + name
        if name not in self._stored:
            self._stored[name] = numpy_helper.from_array(np.ascontiguousarray(self._weights[name]), name)
        return name

    def constant(self, value: Array | Sequence[int] | int | float) -> Value:
        """A constant: floats are float32, integers int64."""
        array = np.asarray(value)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        # Equal constants are stored once.
        name = f"constant_{array.dtype.kind}{list(array.shape)}_{array.tobytes().hex()[:96]}"
        if array.nbytes > 48:
            name = f"constant_{self._next()}"
        if name not in self._stored:
            self._stored[name] = numpy_helper.from_array(array, name)
        return name

    def __call__(self, kind: str, *inputs: Value | Array | float | int, **attributes: Any) -> Value:
        """Add a node and return its output; numbers and arrays among its inputs become constants."""
        return self.several(kind, 1, *inputs, **attributes)[0]

    def several(self, kind: str, outputs: int, *inputs: Value | Array | float | int, **attributes: Any) -> list[Value]:
        """Add a node with several outputs and return them."""
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        made = [f"v{self._next()}" for _ in range(outputs)]
        self._nodes.append(helper.make_node(kind, names, made, **attributes))
        return made

    def linear(self, x: Value, name: str) -> Value:
        """``torch.nn.Linear`` of two dimensions."""
        return self("Gemm", x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), transB=1)

    def norm(self, x: Value, name: str) -> Value:
        """``torch.nn.LayerNorm`` of the last dimension."""
        scale, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5)

    def columns(self, x: Value, first: int, last: int) -> Value:
        """Columns ``first`` up to ``last`` of two dimensions."""
        return self("Slice", x, np.array([first]), np.array([last]), np.array([1]))

    def column(self, x: Value, place: int) -> Value:
        """One column of two dimensions, (rows, columns) -> (rows,)."""
        return self("Gather", x, place, axis=1)

    def model(self) -> bytes:
        """The finished and checked graph as an ONNX file."""
        graph = helper.make_graph(self._nodes, "latency", self._inputs, self._outputs, list(self._stored.values()))
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="cdmpp"
        )
        onnx.checker.check_model(model)
        content: bytes = model.SerializeToString()
        return content

    def _next(self) -> int:
        self._count += 1
        return self._count
