"""Small ONNX models for the tests, built with onnx.helper."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cdmpp.programs.frontends.graph import ProgramGraph
from cdmpp.programs.frontends.onnx_library import onnx_library_graph

Shape = Sequence[int | str]


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape],
    outputs: Sequence[str],
    constants: Mapping[str, Any] | None = None,
    dtype: int = TensorProto.FLOAT,
    opset: int = 18,
) -> bytes:
    """Serialised model; the outputs' shapes are left to shape inference."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, dtype, list(shape)) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    built = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return built.SerializeToString()


def weight(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


def scalar(value: float) -> np.ndarray[Any, Any]:
    return np.asarray(value, np.float32)


def single(
    op: str, inputs: Mapping[str, Shape], constants: Mapping[str, Any] | None = None, **options: Any
) -> ProgramGraph:
    """The graph of one node that reads ``inputs``, then ``constants``; other options are attributes."""
    keys = {k: options.pop(k) for k in ("dtype", "opset") if k in options}
    node = helper.make_node(op, [*inputs, *(constants or {})], ["y"], name="node", **options)
    return onnx_library_graph(model([node], inputs, ["y"], constants, **keys))


def texts(graph: ProgramGraph) -> dict[str, int]:
    """Operator text -> count."""
    return {p.operator.text(): n for p, n in zip(graph.programs, graph.counts, strict=True) if p.operator}


def attention(
    batch: int = 2,
    heads: int = 4,
    q_len: int = 8,
    k_len: int = 8,
    dim: int = 16,
    mask: np.ndarray[Any, Any] | None = None,
    condition: np.ndarray[Any, Any] | None = None,
    kv_heads: int | None = None,
) -> bytes:
    """Attention written out, q and v transposed before it and its result after it."""
    make = helper.make_node
    inputs: dict[str, Shape] = {"q": [batch, q_len, heads, dim]}
    constants: dict[str, Any] = {"scale": scalar(0.25)}
    nodes = [make("Transpose", ["q"], ["qt"], "q_t", perm=[0, 2, 1, 3])]
    if kv_heads is None:
        inputs |= {"k": [batch, k_len, heads, dim], "v": [batch, heads, k_len, dim]}
        nodes.append(make("Transpose", ["k"], ["kt"], "k_t", perm=[0, 2, 3, 1]))
        v = "v"
    else:
        inputs |= {"k": [batch, kv_heads, 1, k_len, dim], "v": [batch, kv_heads, 1, k_len, dim]}
        constants["many"] = np.asarray([batch, kv_heads, heads // kv_heads, k_len, dim], np.int64)
        constants["merged"] = np.asarray([batch, heads, k_len, dim], np.int64)
        for name in "kv":
            nodes.append(make("Expand", [name, "many"], [f"{name}e"], f"{name}_expand"))
            nodes.append(make("Reshape", [f"{name}e", "merged"], [f"{name}r"], f"{name}_merge"))
        nodes.append(make("Transpose", ["kr"], ["kt"], "k_t", perm=[0, 1, 3, 2]))
        v = "vr"
    nodes.append(make("MatMul", ["qt", "kt"], ["s0"], "scores"))
    nodes.append(make("Mul", ["s0", "scale"], ["s1"], "scaled"))
    value = "s1"
    if mask is not None:
        constants["mask"] = mask
        nodes.append(make("Add", ["s1", "mask"], ["s2"], "masked"))
        value = "s2"
    if condition is not None:
        constants |= {"condition": condition, "low": scalar(-1e30)}
        nodes.append(make("Where", ["condition", "s1", "low"], ["s2"], "masked"))
        value = "s2"
    nodes.append(make("Softmax", [value], ["p"], "softmax", axis=-1))
    nodes.append(make("MatMul", ["p", v], ["o"], "context"))
    nodes.append(make("Transpose", ["o"], ["y"], "out_t", perm=[0, 2, 1, 3]))
    return model(nodes, inputs, ["y"], constants)
