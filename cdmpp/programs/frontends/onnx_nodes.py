"""Single ONNX nodes as operator specifications: one rule per operator type.

A rule returns the fields of a specification, or marks the node as free, or raises
:class:`~cdmpp.programs.frontends.graph.NoRuleError` with the reason. What several nodes make together is in
``onnx_patterns``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cdmpp.programs.frontends.graph import NoRuleError
from cdmpp.programs.frontends.onnx_contrib import CONTRIB_RULES, simplified_norm
from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_quantised import DOMAIN, quantise, quantise_dynamic
from cdmpp.programs.frontends.onnx_rules import (
    PRODUCT_RULES,
    Free,
    NodeLaunch,
    Outcome,
    attention_fields,
    constant_ints,
    dtype_of,
    over,
    rowwise,
    shape_of,
)


def map_node(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """Operator that a framework launches for one node. Raises NoRuleError: there is no specification for it."""
    if not node.domain and node.op in _FREE:
        return Free(_FREE[node.op])
    rules = {"": _RULES, DOMAIN: CONTRIB_RULES}.get(node.domain)
    if rules is None:
        raise NoRuleError(f"operator of the domain {node.domain!r}")
    rule = rules.get(node.op)
    if rule is None:
        raise NoRuleError(
            f"operator of the domain {node.domain!r}" if node.domain else "no operator specification for it"
        )
    for value in (*node.inputs, *node.outputs[:1]):
        if not value:
            continue
        shape = graph.shape(value)
        if shape is None:
            raise NoRuleError(f"the shape of {value!r} is not static")
        if value == node.outputs[0] and 0 in shape:
            return Free("free: its output is empty")
    return rule(graph, node)


# -- element by element -----------------------------------------------------------------------


def _unary(operator: str, remark: str = "") -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    return lambda graph, node: NodeLaunch(over(graph, operator, node.outputs[0]), remark)


def _binary(operator: str, scalar: str) -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    """An operator on two tensors, or on one and a constant of one element."""

    def rule(graph: OnnxGraph, node: OnnxNode) -> Outcome:
        out = node.outputs[0]
        for index, name in enumerate(node.inputs[:2]):
            if graph.is_constant(name) and math.prod(shape_of(graph, name)) == 1:
                turned = index == 0 and operator in ("sub", "div", "pow")
                return NodeLaunch(over(graph, scalar, out), "the scalar is on the left" if turned else "")
        return NodeLaunch(over(graph, operator, out))

    return rule


def _variadic(operator: str, single: str) -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    """Sum, Max and Min of any number of tensors; with a scalar alone it is a clamp (``single``)."""

    def rule(graph: OnnxGraph, node: OnnxNode) -> Outcome:
        tensors = [i for i in node.inputs if not (graph.is_constant(i) and math.prod(shape_of(graph, i)) == 1)]
        out = node.outputs[0]
        if len(tensors) == 1:
            if len(node.inputs) == 1:
                return Free("free: one input alone is passed on")
            return NodeLaunch(over(graph, single, out), f"with a scalar: timed as {single}, which moves the same bytes")
        if len(tensors) > 4:
            raise NoRuleError(f"{len(tensors)} inputs, at most 4")
        return NodeLaunch(over(graph, operator, out, inputs=len(tensors)))

    return rule


# -- along an axis ----------------------------------------------------------------------------


def _softmax(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    shape = shape_of(graph, node.outputs[0])
    dtype = dtype_of(graph, node.outputs[0])
    axis = int(node.attrs.get("axis", -1 if node.opset >= 13 else 1))
    axis += len(shape) if axis < 0 else 0
    # Before operator set 13 everything from the axis on was one row.
    cols = shape[axis] if node.opset >= 13 else math.prod(shape[axis:])
    remark = "log-softmax timed as softmax" if node.op == "LogSoftmax" else ""
    return NodeLaunch(rowwise("softmax", dtype, shape, cols), remark)


def _norm(operator: str) -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    def rule(graph: OnnxGraph, node: OnnxNode) -> Outcome:
        shape = shape_of(graph, node.inputs[0])
        cols = math.prod(shape[int(node.attrs.get("axis", -1)) :])
        return NodeLaunch(rowwise(operator, dtype_of(graph, node.outputs[0]), shape, cols))

    return rule


def _reduce_mean(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    shape = shape_of(graph, node.inputs[0])
    axes = constant_ints(graph, node, 1, "axes")
    if not axes:
        if node.attrs.get("noop_with_empty_axes"):
            return Free("free: reduces over no axis")
        axes = list(range(len(shape)))
    cols = math.prod(shape[axis] for axis in {a % len(shape) for a in axes})
    return NodeLaunch(rowwise("reduce_mean", dtype_of(graph, node.outputs[0]), shape, cols))


# -- data movement ----------------------------------------------------------------------------


def _copy(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    data, out = node.inputs[0], node.outputs[0]
    tensors = [i for i in node.inputs if 0 not in shape_of(graph, i)] if node.op == "Concat" else [data]
    same = graph.shape(tensors[0]) == graph.shape(out) if tensors else False
    steps = graph.value(node.input(4)) if node.op == "Slice" and node.input(4) else None
    if same and len(tensors) == 1 and (steps is None or not (steps < 0).any()):
        return Free("free: its output is its input")
    return NodeLaunch(over(graph, "copy", out))


def _split(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    if len(node.outputs) == 1:
        return Free("free: its output is its input")
    return NodeLaunch(over(graph, "copy", node.inputs[0]))


def _transpose(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    shape = shape_of(graph, node.inputs[0])
    perm = [int(v) for v in node.attrs.get("perm", range(len(shape))[::-1])]
    moved = [axis for axis in perm if shape[axis] != 1]
    if moved == sorted(moved):
        return Free("free: only axes of extent 1 move")
    turned = moved[-1] != max(moved)  # the axis that is contiguous in memory is not the last any more
    return NodeLaunch(over(graph, "copy", node.inputs[0], transposed=turned))


def _cast(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    source, target = graph.dtype(node.inputs[0]), graph.dtype(node.outputs[0])
    if source == target:
        return Free("free: same element type")
    return NodeLaunch(over(graph, "copy", node.outputs[0]), f"conversion {source} to {target}, timed as a copy")


def _gather(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    data, indices = shape_of(graph, node.inputs[0]), shape_of(graph, node.inputs[1])
    axis = int(node.attrs.get("axis", 0)) % max(len(data), 1)
    if graph.is_constant(node.inputs[1]) and math.prod(indices) == 1:
        return NodeLaunch(over(graph, "copy", node.outputs[0]), "selects one slice")
    outer = math.prod(data[:axis])
    sizes = {"rows": outer * math.prod(indices), "cols": math.prod(data[axis + 1 :]), "table_rows": outer * data[axis]}
    return NodeLaunch({"operator": "embedding", "dtype": dtype_of(graph, node.outputs[0]), **sizes})


def _dropout(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    if node.input(2) and graph.scalar(node.input(2)) != 0.0:
        raise NoRuleError("dropout in training mode")
    return Free("free: does nothing at inference")


def _attention(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """The fused operator of operator set 23: (batch, heads, len, dim), or (batch, len, heads * dim)."""
    q, k, v = (shape_of(graph, node.inputs[i]) for i in range(3))
    if len(q) == 4:
        (batch, heads, q_len, dim), kv_heads, k_len, v_dim = q, k[1], k[2], v[3]
    else:
        heads, kv_heads = int(node.attrs["q_num_heads"]), int(node.attrs["kv_num_heads"])
        (batch, q_len, width), k_len = q, k[1]
        dim, v_dim = width // heads, v[2] // kv_heads
    if v_dim != dim:
        raise NoRuleError(f"values of {v_dim} elements per head beside keys of {dim}")
    if node.input(4):
        k_len += shape_of(graph, node.input(4))[2]
    dtype, causal = dtype_of(graph, node.outputs[0]), bool(node.attrs.get("is_causal"))
    return NodeLaunch(attention_fields(dtype, batch, q_len, k_len, heads, kv_heads, dim, causal))


_FREE = {
    "Constant": "constant: part of the model",
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), "free: the same memory in another shape"),
    "Identity": "free: the same memory",
    **dict.fromkeys(("Shape", "Size"), "free: sizes are known beforehand"),
}

_UNARY = ("Relu", "Gelu", "Tanh", "Sigmoid", "Exp", "Sqrt", "Erf", "Abs", "Neg", "Log")
_RULES: dict[str, Callable[[OnnxGraph, OnnxNode], Outcome]] = {
    **PRODUCT_RULES,
    **{name: _unary(name.lower()) for name in _UNARY},
    "Swish": _unary("silu"),
    "Clip": _unary("relu", "clamp timed as relu, which moves the same bytes"),
    "LeakyRelu": _unary("relu", "timed as relu, which moves the same bytes"),
    "Reciprocal": _unary("div_scalar", "the scalar is on the left"),
    **{name: _binary(name.lower(), f"{name.lower()}_scalar") for name in ("Add", "Mul", "Div", "Pow")},
    "Sub": _binary("sub", "add_scalar"),
    "Sum": _variadic("add", "add_scalar"),
    "Max": _variadic("maximum", "relu"),
    "Min": _variadic("minimum", "relu"),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    "LayerNormalization": _norm("layernorm"),
    "RMSNormalization": _norm("rmsnorm"),
    "SimplifiedLayerNormalization": simplified_norm,
    "ReduceMean": _reduce_mean,
    **dict.fromkeys(("Concat", "Slice", "Expand", "Tile", "Pad"), _copy),
    "Split": _split,
    "Transpose": _transpose,
    "Cast": _cast,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), quantise),
    "DynamicQuantizeLinear": quantise_dynamic,
    "Gather": _gather,
    "Dropout": _dropout,
    "Attention": _attention,
}
