"""Quantised operands of ONNX products: their types, their scales, and the nodes that make them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_rules import shape_of
from cdmpp.programs.quantisation import combinations

#: ONNX element type -> element type of a specification. Signed and unsigned integers take the same time.
NARROW = {
    **dict.fromkeys(("int8", "uint8"), "int8"),
    **dict.fromkeys(("int4", "uint4"), "int4"),
    **dict.fromkeys(("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"), "float8_e4m3"),
    "float4e2m1": "float4_e2m1",
}
#: Domains of the quantisation operators: the standard one, and the one of ONNX Runtime, which had some of them first.
_DOMAINS = ("", "com.microsoft")
_VIEWS = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast")
_MAX_VIEWS = 8


@dataclass(frozen=True)
class Scales:
    """How the scales of an operand are laid out.

    ``kind`` is ``none``, ``tensor``, ``channel`` (one per row or column), ``block`` (of ``block`` elements), or
    ``dynamic``: computed at run time.
    """

    kind: str
    block: int = 0


@dataclass(frozen=True)
class Operand:
    """One side of a product.

    Attributes
    ----------
    dtype : str
        Element type of the specification.
    source : str
        Element type in the model, as ONNX names it.
    scales : Scales
    constant : bool
        Whether it is a weight.
    nodes : tuple of OnnxNode
        Nodes that quantise and dequantise it.
    """

    dtype: str
    source: str
    scales: Scales
    constant: bool
    nodes: tuple[OnnxNode, ...] = ()

    @property
    def dynamic(self) -> bool:
        """Whether its scales are computed at run time."""
        return self.scales.kind == "dynamic"

    @property
    def quantised_here(self) -> bool:
        """Whether one of its nodes quantises it."""
        return any("Quantize" in node.op and node.op != "DequantizeLinear" for node in self.nodes)


def is_quantiser(node: OnnxNode | None, *ops: str) -> bool:
    """Whether a node is one of the quantisation operators ``ops``."""
    return node is not None and node.domain in _DOMAINS and node.op in ops


def scales_of(graph: OnnxGraph, scale: str, block: int = 0) -> Scales:
    """Layout of a static scale."""
    if math.prod(shape_of(graph, scale)) == 1:
        return Scales("tensor")
    return Scales("block", block) if block else Scales("channel")


def dequantised(graph: OnnxGraph, value: str) -> Operand | None:
    """A floating-point operand that a DequantizeLinear makes of narrow values, perhaps transposed; else None."""
    path: list[OnnxNode] = []
    node = graph.producer(value)
    while node is not None and node.is_(*_VIEWS) and len(path) < _MAX_VIEWS:
        path.append(node)
        node = graph.producer(node.inputs[0])
    if node is None or not is_quantiser(node, "DequantizeLinear"):
        return None
    source = graph.dtype(node.inputs[0])
    if source not in NARROW:
        return None
    path.append(node)
    inner = graph.producer(node.inputs[1])
    if inner is not None and is_quantiser(inner, "DequantizeLinear"):  # scales are quantised too
        path.append(inner)
    quantiser = graph.producer(node.inputs[0])
    data = node.inputs[0]
    if quantiser is not None and is_quantiser(quantiser, "QuantizeLinear"):
        path.append(quantiser)
        data = quantiser.inputs[0]
    scales = scales_of(graph, node.inputs[1], int(node.attrs.get("block_size", 0)))
    return Operand(NARROW[source], source, scales, graph.is_constant(data), tuple(path))


def narrow(graph: OnnxGraph, value: str, scale: str = "") -> Operand | None:
    """A narrow operand, as QLinearMatMul and MatMulInteger read it; None for another element type."""
    source = graph.dtype(value)
    if source not in NARROW:
        return None
    quantiser = graph.producer(value)
    if quantiser is not None and is_quantiser(quantiser, "DynamicQuantizeLinear"):
        return Operand(NARROW[source], source, Scales("dynamic"), False, (quantiser,))
    if quantiser is not None and is_quantiser(quantiser, "QuantizeLinear"):
        scales = scales_of(graph, quantiser.inputs[1], int(quantiser.attrs.get("block_size", 0)))
        constant = graph.is_constant(quantiser.inputs[0])
        return Operand(NARROW[source], source, scales, constant, (quantiser,))
    scales = scales_of(graph, scale) if scale else Scales("none")
    return Operand(NARROW[source], source, scales, graph.is_constant(value))


def scaling_of(dtype: str, weight_dtype: str, scales: Scales) -> tuple[str | None, str] | None:
    """``scaling`` nearest to a layout of scales, and a remark when it is another; None: no such product."""
    weight = None if weight_dtype == dtype else weight_dtype
    possible = [scaling for w, scaling in combinations(dtype) if w == weight]
    if scales.kind == "none":
        return (None, "") if None in possible else None
    known = next((scaling for scaling in _preference(scales) if scaling in possible), None)
    if known is None:
        return None
    if scales.kind == "block":
        exact = {"nvfp4": 16, "mx32": 32, "block128": 128}.get(known) == scales.block
        return known, "" if exact else f"scales of blocks of {scales.block}, timed as {known}"
    meant = "channel" if scales.kind == "dynamic" else scales.kind
    return known, "" if known == meant else f"one scale per {meant}, timed as {known}"


def _preference(scales: Scales) -> tuple[str, ...]:
    if scales.kind == "tensor":
        return ("tensor", "channel", "block128", "mx32", "nvfp4")
    if scales.kind in ("channel", "dynamic"):
        return ("channel", "tensor", "block128", "mx32", "nvfp4")
    if scales.block <= 16:
        return ("nvfp4", "mx32", "block128", "channel", "tensor")
    if scales.block <= 64:
        return ("mx32", "block128", "nvfp4", "channel", "tensor")
    return ("block128", "mx32", "nvfp4", "channel", "tensor")
