"""ONNX files that fight: small as bytes, large, endless or contradictory as graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.fuzz import mutate
from benchmarks.fuzz.seeds import EXAMPLES

Nodes = list[Any]


def _model(
    nodes: Nodes, constants: dict[str, Any] | None = None, *, shape: tuple[Any, ...] = (2, 8)
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _node(op: str, inputs: list[str], outputs: list[str] | None = None, **attributes: Any) -> Any:
    return helper.make_node(op, inputs, outputs or ["y"], **attributes)


def _sizes(*values: int) -> Any:
    return np.asarray(values, np.int64)


def _range(end: int, step: int) -> onnx.ModelProto:
    sizes = {"a": np.int64(0), "b": np.int64(end), "c": np.int64(step)}
    return _model([_node("Range", ["a", "b", "c"], ["t"]), _node("Reshape", ["x", "t"])], sizes)


def _convolution(kernel: int, **attributes: Any) -> onnx.ModelProto:
    weight = np.zeros((1, 1, kernel, kernel), np.float32)
    return _model([_node("Conv", ["x", "w"], **attributes)], {"w": weight}, shape=(1, 1, 8, 8))


def _chain(count: int) -> onnx.ModelProto:
    names = ["x", *(f"v{i}" for i in range(count - 1)), "y"]
    return _model([_node("Relu", [a], [b]) for a, b in pairwise(names)])


def _doubling(times: int) -> onnx.ModelProto:
    """A tensor that doubles at each node."""
    names = ["x", *(f"v{i}" for i in range(times - 1)), "y"]
    return _model([_node("Concat", [a, a], [b], axis=0) for a, b in pairwise(names)])


def _nested(depth: int) -> onnx.ModelProto:
    """If inside If."""
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    leaf = body = helper.make_graph([_node("Relu", ["x"])], "leaf", [], out)
    for _ in range(depth):
        body = helper.make_graph([_node("If", ["c"], then_branch=body, else_branch=leaf)], "b", [], out)
    return _model([_node("If", ["c"], then_branch=body, else_branch=leaf)], {"c": np.asarray(True)})


def _functions(levels: int, calls: int) -> onnx.ModelProto:
    """Functions that call functions: ``calls ** levels`` nodes once inlined."""
    made = _model([helper.make_node(f"F{levels}", ["x"], ["y"], domain="own")])
    for level in range(levels + 1):
        names = ["a", *(f"t{i}" for i in range(calls - 1)), "b"]
        nodes = [
            helper.make_node(f"F{level - 1}", [s], [d], domain="own") if level else _node("Relu", [s], [d])
            for s, d in pairwise(names)
        ]
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
        made.functions.append(helper.make_function("own", f"F{level}", ["a"], ["b"], nodes, opsets))
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made


def _recursive() -> onnx.ModelProto:
    made = _functions(0, 1)
    made.functions[0].node[0].op_type, made.functions[0].node[0].domain = "F0", "own"
    return made


def _external() -> onnx.ModelProto:
    made = _model([_node("Reshape", ["x", "s"])], {"s": _sizes(16)})
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../../etc/passwd")
    return made


def _claims(*dims: int) -> onnx.ModelProto:
    """A weight that claims a size and holds nothing."""
    made = _model([_node("MatMul", ["x", "w"])], {"w": np.zeros((8, 8), np.float32)})
    made.graph.initializer[0].dims[:] = dims
    made.graph.initializer[0].ClearField("raw_data")
    return made


@cache
def adversarial() -> tuple[bytes, ...]:
    """Each is small enough to send thousands of times."""
    huge, i32 = 2**62, 2**31 - 1
    models = [
        _chain(2),
        _chain(3000),
        _doubling(20),
        _doubling(70),
        _nested(5),
        _nested(20),
        _functions(3, 3),
        _functions(20, 10),
        _recursive(),
        _external(),
        _claims(8, i32),
        _claims(huge, huge),
        _claims(-8, 8),
        _claims(8, 8, 8),
        _claims(),
        _model([_node("Expand", ["x", "s"])], {"s": _sizes(i32, 2, 8)}),
        _model([_node("ConstantOfShape", ["s"], ["t"]), _node("Add", ["x", "t"])], {"s": _sizes(2**20, 2**20)}),
        _range(2**40, 1),
        _range(5, 0),
        _model([_node("Tile", ["x", "s"])], {"s": _sizes(2**30, 2**30)}),
        _model([_node("Tile", ["x", "s"])], {"s": _sizes(-1, 3)}),
        _model([_node("Reshape", ["x", "s"])], {"s": _sizes(-1, -1)}),
        _model([_node("Reshape", ["x", "s"])], {"s": _sizes(*[1] * 5000)}),
        _model([_node("Split", ["x"], [f"o{i}" for i in range(500)] + ["y"], num_outputs=501)]),
        _model([_node("Split", ["x"], ["y"], num_outputs=2**40)]),
        _convolution(1, kernel_shape=[0, 0], strides=[0, 0]),
        _convolution(3, pads=[2**40] * 4, dilations=[2**40] * 2),
        _model([_node("MaxPool", ["x"], kernel_shape=[2**31, 2**31])], shape=(1, 1, 8, 8)),
        _model([_node("Transpose", ["x"], perm=[0, 0])]),
        _model([_node("Einsum", ["x", "x"], equation="a" * 5000 + ",b->c")]),
        _model([_node("Gather", ["x", "i"], axis=99)], {"i": _sizes(5)}),
        _model([_node("Pad", ["x", "p"])], {"p": _sizes(2**40, 2**40, -(2**40), 0)}),
        _model(
            [_node("Resize", ["x", "", "", "s"], mode="nearest")], {"s": _sizes(1, 1, i32, i32)}, shape=(1, 1, 8, 8)
        ),
        _model(
            [_node("Resize", ["x", "", "f"], mode="nearest")],
            {"f": np.asarray([1, 1, 1e30, np.nan], np.float32)},
            shape=(1, 1, 8, 8),
        ),
        _model([_node("OneHot", ["i", "d", "v"])], {"i": _sizes(1), "d": _sizes(2**50), "v": np.zeros(2, np.float32)}),
        _model([_node("Mystery", ["x"], domain="x" * 3000)]),
        _model([_node("Relu", ["x"], name="n" * 100_000)]),
        _model([_node("Relu", ["y"])]),
        _model([_node("Cast", ["x"], to=999)]),
        _model([_node("Loop", ["m", "", "x"], body=helper.make_graph([], "b", [], []))], {"m": np.int64(2**60)}),
    ]
    return tuple(made.SerializeToString() for made in models)


@cache
def examples() -> tuple[bytes, ...]:
    """The shipped models."""
    return tuple(path.read_bytes() for path in sorted(EXAMPLES.glob("*.onnx")))


def onnx_case(rng: random.Random) -> bytes:
    """One hostile file."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(adversarial())
    if kind < 0.45:
        return mutate.octets(rng, rng.choice(examples()))
    if kind < 0.7:
        return mutate.octets(rng, rng.choice(adversarial()))
    model = onnx.load_from_string(rng.choice((*examples(), *adversarial()[:15])))
    for _ in range(rng.choice((1, 1, 2, 4))):
        if model.graph.node:
            rng.choice(_STRUCTURE)(rng, model, rng.choice(model.graph.node))
    return bytes(model.SerializeToString())


def _name(rng: random.Random, model: onnx.ModelProto) -> str:
    names = [n for node in model.graph.node for n in (*node.input, *node.output)]
    return rng.choice([*names, "", "nobody", "x" * 500, *(t.name for t in model.graph.initializer)])


def _rewire(rng: random.Random, model: onnx.ModelProto, node: Any) -> None:
    side = node.input if rng.random() < 0.6 else node.output
    if side:
        side[rng.randrange(len(side))] = _name(rng, model)


_OPERATORS = (
    *("MatMul", "Conv", "Reshape", "Softmax", "Expand", "If", "Loop", "Scan", "Gemm", "LSTM", "LayerNormalization"),
    *("Einsum", "Concat", "Split", "Shape", "NonZero", "TopK", ""),
)


def _operator(rng: random.Random, model: onnx.ModelProto, node: Any) -> None:
    node.op_type = rng.choice(_OPERATORS)


def _attribute(rng: random.Random, model: onnx.ModelProto, node: Any) -> None:
    if not node.attribute:
        node.attribute.append(
            helper.make_attribute(rng.choice(("axis", "to", "perm", "group", "")), rng.getrandbits(40))
        )
        return
    attribute = rng.choice(node.attribute)
    attribute.i = rng.choice((0, -1, 1, 2**31, 2**62, -(2**63)))
    for i in range(len(attribute.ints)):
        attribute.ints[i] = rng.choice((0, -1, 1, 2**31, 2**62))
    if rng.random() < 0.2:
        attribute.type = rng.choice((0, 1, 2, 3, 4, 5, 7))
    if rng.random() < 0.1:
        attribute.ints.extend([1] * 1000)


def _dims(rng: random.Random, model: onnx.ModelProto, node: Any) -> None:
    size = rng.choice((0, -1, 1, 3, 2**31, 2**48, 2**62))
    if model.graph.initializer and rng.random() < 0.5:
        tensor = rng.choice(model.graph.initializer)
        if tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = size
        else:
            tensor.dims.append(size)
        return
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if rng.random() < 0.5:
                dim.dim_value = size


def _type(rng: random.Random, model: onnx.ModelProto, node: Any) -> None:
    if model.graph.initializer:
        rng.choice(model.graph.initializer).data_type = rng.randrange(30)
    for value in model.graph.input:
        value.type.tensor_type.elem_type = rng.randrange(30)


def _nodes(rng: random.Random, model: onnx.ModelProto, node: Any) -> None:
    if rng.random() < 0.5:
        model.graph.node.remove(node)
    else:
        model.graph.node.add().CopyFrom(node)


_Change = Callable[[random.Random, onnx.ModelProto, Any], None]
_STRUCTURE: tuple[_Change, ...] = (_rewire, _rewire, _operator, _attribute, _attribute, _dims, _dims, _type, _nodes)
