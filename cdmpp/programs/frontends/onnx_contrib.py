"""Quantised operators of ONNX Runtime (domain ``com.microsoft``): their rules, and the types of their results.

``onnx`` has no shape inference for them, so it is given here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_operands import NARROW, Scales, scales_of, scaling_of
from cdmpp.programs.frontends.onnx_products import matmul_fields
from cdmpp.programs.frontends.onnx_quantised import weight_only_fields
from cdmpp.programs.frontends.onnx_rules import Free, Launch, Outcome, Unsupported, dtype_of, over, rows_cols, shape_of

DOMAIN = "com.microsoft"
_WEIGHT_BITS = {4: "int4", 8: "int8"}


def quantise(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """A QuantizeLinear or DequantizeLinear that is part of no product."""
    if node.op == "QuantizeLinear" and graph.is_constant(node.inputs[0]):
        return Free("constant: computed before the model runs")
    wide = node.inputs[0] if node.op == "QuantizeLinear" else node.outputs[0]
    kinds = f"{graph.dtype(node.inputs[0])} to {graph.dtype(node.outputs[0])}"
    return Launch(over(graph, "mul_scalar", wide), f"conversion {kinds}, timed as mul_scalar")


def quantise_dynamic(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """A DynamicQuantizeLinear that is part of no product: a reduction, then a conversion."""
    value = node.inputs[0]
    remark = "the range timed as reduce_mean, the conversion as mul_scalar"
    return Launch(over(graph, "reduce_mean", value), remark, then=(("convert", over(graph, "mul_scalar", value)),))


def _matmul_nbits(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """A weight of 4 or 8 bits in blocks along k: inputs A, packed B, scales, zero points, group index, bias."""
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs["block_size"])
    n, k = int(node.attrs["N"]), int(node.attrs["K"])
    if block < 1:
        raise ValueError(f"block_size={block} is not positive")
    if bits not in _WEIGHT_BITS:
        raise Unsupported(f"weights of {bits} bits, not " + " or ".join(map(str, _WEIGHT_BITS)))
    shape = shape_of(graph, node.inputs[0])
    if shape[-1] != k:
        raise ValueError(f"K={k}, but its input has {shape[-1]} columns")
    types, remark = weight_only_fields(dtype_of(graph, node.inputs[0]), _WEIGHT_BITS[bits], block, k)
    sizes = {"m": math.prod(shape[:-1]), "n": n, "k": k, "bias": bool(node.input(5))}
    return Launch({"operator": "linear", **sizes, **types}, remark)


def _int8_product(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """Products of int8 values with a floating-point result.

    MatMulIntegerToFloat reads A, B, both scales, both zero points, a bias; DynamicQuantizeMatMul reads A, B, the
    scale and zero point of B, a bias.
    """
    dynamic = node.op == "DynamicQuantizeMatMul"
    if graph.dtype(node.inputs[1]) not in NARROW:
        raise Unsupported(f"a weight of type {graph.dtype(node.inputs[1])}")
    weight = scales_of(graph, node.inputs[2] if dynamic else node.inputs[3])
    choice = scaling_of("int8", "int8", Scales("dynamic") if dynamic else weight)
    scaling, remark = choice or (None, "")
    fields = matmul_fields(graph, node.inputs[0], node.inputs[1], node.outputs[0], "int8") | {"scaling": scaling}
    bias = node.input(4 if dynamic else 6)
    if bias and fields["operator"] == "linear":
        fields["bias"] = True
    arrives = "" if dynamic else "its input arrives quantised; the program quantises it"
    return Launch(fields, "; ".join(filter(None, (remark, arrives))))


def _qgemm(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """A, its scale and zero point, B, its scale and zero point, a bias, then the scale of the result."""
    m, n, k = _gemm_sizes(graph, node)
    scaling, remark = scaling_of("int8", "int8", scales_of(graph, node.inputs[4])) or (None, "")
    fields = {"operator": "linear", "dtype": "int8", "scaling": scaling, "m": m, "n": n, "k": k}
    arrives = "its input arrives quantised; the program quantises it"
    return Launch(fields | {"bias": bool(node.input(6))}, "; ".join(filter(None, (remark, arrives))))


def _gemm_sizes(graph: OnnxGraph, node: OnnxNode) -> tuple[int, int, int]:
    a, b = shape_of(graph, node.inputs[0]), shape_of(graph, node.inputs[3])
    m, k = (a[1], a[0]) if node.attrs.get("transA") else (a[0], a[1])
    return m, b[0] if node.attrs.get("transB") else b[1], k


def _narrow(operator: str, remark: str = "") -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    """An operator on 8-bit tensors with scales; rows are those of the last axis."""

    def rule(graph: OnnxGraph, node: OnnxNode) -> Outcome:
        sizes = rows_cols(shape_of(graph, node.outputs[0]))
        return Launch({"operator": operator, "dtype": "int8", **sizes}, remark)

    return rule


CONTRIB_RULES: dict[str, Callable[[OnnxGraph, OnnxNode], Outcome]] = {
    "MatMulNBits": _matmul_nbits,
    "MatMulIntegerToFloat": _int8_product,
    "DynamicQuantizeMatMul": _int8_product,
    "QGemm": _qgemm,
    "QLinearAdd": _narrow("add"),
    "QLinearMul": _narrow("mul"),
    "QLinearSigmoid": _narrow("sigmoid"),
    "QLinearSoftmax": _narrow("softmax"),
    "QLinearLeakyRelu": _narrow("relu", "timed as relu, which moves the same bytes"),
    "QuantizeLinear": quantise,
    "DequantizeLinear": quantise,
}

#: Operator -> which input has the element type of its result.
_TYPE_OF = {
    "MatMulNBits": 0,
    "MatMulIntegerToFloat": 2,
    "DynamicQuantizeMatMul": 0,
    "QGemm": 0,
    "QLinearAdd": 0,
    "QLinearMul": 0,
    "QLinearSigmoid": 0,
    "QLinearSoftmax": 0,
    "QLinearLeakyRelu": 0,
    "QuantizeLinear": 2,
    "DequantizeLinear": 1,
}


def contrib_types(graph: OnnxGraph, node: OnnxNode) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Element type and shape of the results of a node of this domain; nothing where they are not known."""
    if node.domain != DOMAIN or node.op not in _TYPE_OF or not node.inputs or not node.outputs:
        return {}
    elem_type = graph.elem_type(node.input(_TYPE_OF[node.op]))
    if node.op == "QuantizeLinear" and not node.input(2):
        elem_type = 2  # uint8 without a zero point
    shape = _result_shape(graph, node)
    return {node.outputs[0]: (elem_type, shape)} if shape is not None and elem_type else {}


def _result_shape(graph: OnnxGraph, node: OnnxNode) -> tuple[int, ...] | None:
    shape, other = graph.shape(node.inputs[0]), graph.shape(node.input(3))
    if shape is None:
        return None
    if node.op in ("QLinearAdd", "QLinearMul"):
        try:
            return None if other is None else tuple(int(x) for x in np.broadcast_shapes(shape, other))
        except ValueError:
            return None
    if node.op == "QGemm":
        return _gemm_sizes(graph, node)[:2] if other is not None and len(shape) == len(other) == 2 else None
    if "MatMul" not in node.op:
        return shape
    columns = _columns(graph, node, node.attrs)
    return None if columns is None or not shape else (*shape[:-1], columns)


def _columns(graph: OnnxGraph, node: OnnxNode, attrs: Mapping[str, Any]) -> int | None:
    """Columns of a product's result, None where they are not known."""
    if node.op == "MatMulNBits":
        return int(attrs["N"]) if isinstance(attrs.get("N"), int) and attrs["N"] > 0 else None
    weight = graph.shape(node.input(1))
    return weight[-1] if weight is not None and len(weight) == 2 else None
