"""ONNX Runtime's fused operators (domain ``com.microsoft``): their rules, and the types of their results.

Activations of fused products cost nothing. A norm with a residual reads and writes two tensors.
"""

from __future__ import annotations

from collections.abc import Callable

from cdmpp.programs.frontends.graph import NoRuleError
from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_quantised import DOMAIN, QUANTISED_RULES, quantised_types
from cdmpp.programs.frontends.onnx_rules import (
    Fields,
    NodeLaunch,
    Outcome,
    Shape,
    attention_fields,
    conv_launch,
    conv_shape,
    dtype_of,
    gemm_launch,
    over,
    product_fields,
    shape_of,
)

Types = dict[str, tuple[int, Shape]]


def _fused_conv(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    added = (("add", over(graph, "add", node.outputs[0])),) if node.input(3) else ()
    return NodeLaunch(conv_launch(graph, node).fields, then=added)


def _sides(graph: OnnxGraph, node: OnnxNode) -> tuple[Shape, Shape]:
    """Shapes of the operands of FusedMatMul as they are multiplied."""
    if node.attrs.get("transBatchA") or node.attrs.get("transBatchB"):
        raise NoRuleError("transposed batches")
    shapes = [(shape_of(graph, node.input(i)), node.attrs.get(name)) for i, name in enumerate(("transA", "transB"))]
    left, right = ((*s[:-2], s[-1], s[-2]) if turned and len(s) > 1 else s for s, turned in shapes)
    return left, right


def _gelu(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    remark = "timed as gelu, which moves the same bytes" if node.op == "QuickGelu" else ""
    return NodeLaunch(over(graph, "gelu", node.outputs[0]), remark)


def simplified_norm(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """SimplifiedLayerNormalization, which also exists in the standard domain of exported models."""
    return NodeLaunch(over(graph, "rmsnorm", node.inputs[0]))


def _skip_norm(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    if "Simplified" in node.op:
        return NodeLaunch(over(graph, "fused_add_rms_norm", node.inputs[0]))
    fields = over(graph, "layernorm", node.inputs[0])
    return NodeLaunch({**fields, "rows": 2 * fields["rows"]}, "with its residual: timed as a norm of twice the rows")


def _rotary(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    shape = shape_of(graph, node.inputs[0])
    heads, rotated = int(node.attrs.get("num_heads", 0)), int(node.attrs.get("rotary_embedding_dim", 0))
    batch, length, columns = (shape[0], shape[2], shape[1] * shape[3]) if len(shape) == 4 else shape
    width = shape[3] if len(shape) == 4 else columns // heads if heads else 2 * shape_of(graph, node.input(2))[-1]
    return NodeLaunch(_rotation(dtype_of(graph, node.outputs[0]), batch * length, columns, rotated or width))


def _rotation(dtype: str, rows: int, cols: int, head_dim: int) -> Fields:
    return {"operator": "rotary_embedding", "dtype": dtype, "rows": rows, "cols": cols, "head_dim": head_dim}


def _attention_sizes(graph: OnnxGraph, node: OnnxNode) -> tuple[int, int, int, int, int, int]:
    """Batch, tokens of queries and of keys, heads, key-value heads, and columns of a head."""
    heads = int(node.attrs["num_heads"])
    query, key = shape_of(graph, node.inputs[0]), node.input(1)
    if node.op == "GroupQueryAttention":
        kv_heads = int(node.attrs["kv_num_heads"])
        dim = query[2] // heads if key else query[2] // (heads + 2 * kv_heads)
        total = graph.scalar(node.input(6)) or query[1] + _cached(graph, node, 3)
        return query[0], query[1], int(total), heads, kv_heads, dim
    if node.op == "Attention":
        dim = shape_of(graph, node.inputs[1])[1] // 3 // heads
        return query[0], query[1], query[1] + _cached(graph, node, 4), heads, heads, dim
    if len(query) == 5:  # packed: (batch, tokens, heads, 3, columns)
        return query[0], query[1], query[1], heads, heads, query[4]
    length = shape_of(graph, key)[1 if len(shape_of(graph, key)) == 3 else 2]
    return query[0], query[1], length + _cached(graph, node, 6), heads, heads, query[2] // heads


def _cached(graph: OnnxGraph, node: OnnxNode, index: int) -> int:
    """Tokens of the cache that an input holds; 0 where it is left out."""
    return shape_of(graph, node.input(index))[-2] if node.input(index) else 0


def _attention(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    batch, q_len, k_len, heads, kv_heads, dim = _attention_sizes(graph, node)
    dtype, window = dtype_of(graph, node.outputs[0]), int(node.attrs.get("local_window_size", -1))
    k_len = max(window, q_len) if 0 < window < k_len else k_len  # inside of a prompt the window is not counted
    causal = node.op == "GroupQueryAttention" or bool(node.attrs.get("unidirectional"))
    fields = attention_fields(dtype, batch, q_len, k_len, heads, kv_heads, dim, causal)
    if node.op == "Attention":
        weight = shape_of(graph, node.inputs[1])
        product = {"operator": "linear", "dtype": dtype, "m": batch * q_len, "n": weight[1], "k": weight[0]}
        return NodeLaunch({**product, "bias": bool(node.input(2))}, then=(("attention", fields),))
    if node.attrs.get("do_rotary"):
        rotated = _rotation(dtype, batch * q_len, (heads + kv_heads) * dim, dim)
        return NodeLaunch(rotated, then=(("attention", fields),))
    return NodeLaunch(fields)


_NORMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
_SAME_SHAPE = {
    **dict.fromkeys(("Gelu", "FastGelu", "BiasGelu", "QuickGelu"), _gelu),
    **dict.fromkeys(_NORMS, _skip_norm),
    "SimplifiedLayerNormalization": simplified_norm,
    "RotaryEmbedding": _rotary,
}
_ATTENTIONS = ("GroupQueryAttention", "MultiHeadAttention", "Attention")
CONTRIB_RULES: dict[str, Callable[[OnnxGraph, OnnxNode], Outcome]] = {
    **QUANTISED_RULES,
    **_SAME_SHAPE,
    **dict.fromkeys(_ATTENTIONS, _attention),
    "FusedConv": _fused_conv,
    "FusedMatMul": lambda graph, node: NodeLaunch(
        product_fields(*_sides(graph, node), shape_of(graph, node.outputs[0]), dtype_of(graph, node.outputs[0]))
    ),
    "FusedGemm": gemm_launch,
}


def contrib_types(graph: OnnxGraph, node: OnnxNode) -> Types:
    """Element type and shape of the results of ONNX Runtime's operators; nothing where they are not known."""
    if node.op == "SimplifiedLayerNormalization" and node.inputs and node.outputs:
        shape = graph.shape(node.inputs[0])
        return {} if shape is None else {node.outputs[0]: (graph.elem_type(node.inputs[0]), shape)}
    if node.domain != DOMAIN or node.op in QUANTISED_RULES or node.op not in CONTRIB_RULES:
        return quantised_types(graph, node)
    try:
        shapes = _result_shapes(graph, node)
    except (LookupError, TypeError, ValueError, ArithmeticError, NoRuleError):  # the rule says what is wrong
        return {}
    elem_type = graph.elem_type(node.inputs[0])
    results = zip(node.outputs, shapes, strict=False)
    return {name: (elem_type, shape) for name, shape in results if name and shape and elem_type}


def _result_shapes(graph: OnnxGraph, node: OnnxNode) -> list[Shape | None]:
    shape = shape_of(graph, node.inputs[0])
    if node.op in _NORMS:
        return [shape, shape[:-1], shape[:-1], shape]
    if node.op in _SAME_SHAPE:
        return [shape]
    if node.op == "FusedGemm":
        fields = gemm_launch(graph, node, "float32").fields
        return [(fields["m"], fields["n"])]
    if node.op == "FusedConv":
        return [conv_shape(node, shape, shape_of(graph, node.inputs[1]))]
    if node.op == "FusedMatMul":
        left, right = _sides(graph, node)
        return [(*(left[:-2] if len(left) >= len(right) else right[:-2]), *left[-2:-1], right[-1])]
    batch, q_len, k_len, heads, kv_heads, dim = _attention_sizes(graph, node)
    cache = (batch, kv_heads, k_len, dim)
    present = cache if node.op != "Attention" else (2, *cache)
    return [(batch, q_len, heads * dim), present, present]
