"""Quantised products in ONNX graphs, each launched as one ``linear``, ``bmm`` or ``conv2d``.

What becomes one program:

* MatMul, Gemm or Conv between DequantizeLinear nodes (also ``DequantizeLinear(QuantizeLinear(x))``);
* MatMul or Gemm whose weight alone is dequantised: a weight-only product of the activations' type;
* QLinearMatMul, with the QuantizeLinear before it and the DequantizeLinear behind it;
* MatMulInteger, with the DynamicQuantizeLinear before it and the conversion and scaling behind it.

A quantised ``linear`` or ``bmm`` includes the quantisation of its activations, so the nodes that do it launch nothing.
A ``conv2d`` does not: its QuantizeLinear is a kernel of its own.

The quantised operators of ONNX Runtime (domain ``com.microsoft``) have their rules here, and the types of their
results, which ``onnx`` does not infer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.programs.elements import combinations
from cdmpp.programs.frontends.graph import NoRuleError
from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_rules import (
    Fields,
    Free,
    NodeGroup,
    NodeLaunch,
    Outcome,
    conv_launch,
    dtype_of,
    gemm_launch,
    is_bias,
    is_closed,
    match_at,
    matmul_fields,
    over,
    rows_cols,
    shape_of,
)

#: ONNX element type -> element type of a specification. Signed and unsigned integers take the same time.
NARROW = {
    **dict.fromkeys(("int8", "uint8"), "int8"),
    **dict.fromkeys(("int4", "uint4"), "int4"),
    **dict.fromkeys(("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"), "float8_e4m3"),
    "float4e2m1": "float4_e2m1",
}
#: Domain of ONNX Runtime's operators, which had some quantisation operators before the standard domain.
DOMAIN = "com.microsoft"
_VIEWS = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast")
_MAX_VIEWS = 8


@dataclass(frozen=True)
class ScaleLayout:
    """How the scales of an operand are laid out.

    ``kind`` is ``none``, ``tensor``, ``channel`` (one per row or column), ``block`` (of ``block`` elements), or
    ``dynamic``: computed at run time.
    """

    kind: str
    block: int = 0


@dataclass(frozen=True)
class QuantisedOperand:
    """One side of a product."""

    dtype: str  # element type of the specification
    source: str  # element type in the model, as ONNX names it
    scales: ScaleLayout
    constant: bool  # whether it is a weight
    nodes: tuple[OnnxNode, ...] = ()  # nodes that quantise and dequantise it

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
    return node is not None and node.domain in ("", DOMAIN) and node.op in ops


def scales_of(graph: OnnxGraph, scale: str, block: int = 0) -> ScaleLayout:
    """Layout of a static scale."""
    if math.prod(shape_of(graph, scale)) == 1:
        return ScaleLayout("tensor")
    return ScaleLayout("block", block) if block else ScaleLayout("channel")


def dequantised(graph: OnnxGraph, value: str) -> QuantisedOperand | None:
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
    return QuantisedOperand(NARROW[source], source, scales, graph.is_constant(data), tuple(path))


def narrow(graph: OnnxGraph, value: str, scale: str = "") -> QuantisedOperand | None:
    """A narrow operand, as QLinearMatMul and MatMulInteger read it; None for another element type."""
    source = graph.dtype(value)
    if source not in NARROW:
        return None
    quantiser = graph.producer(value)
    if quantiser is not None and is_quantiser(quantiser, "DynamicQuantizeLinear"):
        return QuantisedOperand(NARROW[source], source, ScaleLayout("dynamic"), False, (quantiser,))
    if quantiser is not None and is_quantiser(quantiser, "QuantizeLinear"):
        scales = scales_of(graph, quantiser.inputs[1], int(quantiser.attrs.get("block_size", 0)))
        constant = graph.is_constant(quantiser.inputs[0])
        return QuantisedOperand(NARROW[source], source, scales, constant, (quantiser,))
    scales = scales_of(graph, scale) if scale else ScaleLayout("none")
    return QuantisedOperand(NARROW[source], source, scales, graph.is_constant(value))


def scaling_of(dtype: str, weight_dtype: str, scales: ScaleLayout) -> tuple[str | None, str] | None:
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
    granularity = "channel" if scales.kind == "dynamic" else scales.kind
    return known, "" if known == granularity else f"one scale per {granularity}, timed as {known}"


def _preference(scales: ScaleLayout) -> tuple[str, ...]:
    if scales.kind == "tensor":
        return ("tensor", "channel", "block128", "mx32", "nvfp4")
    if scales.kind in ("channel", "dynamic"):
        return ("channel", "tensor", "block128", "mx32", "nvfp4")
    if scales.block <= 16:
        return ("nvfp4", "mx32", "block128", "channel", "tensor")
    if scales.block <= 64:
        return ("mx32", "block128", "nvfp4", "channel", "tensor")
    return ("block128", "mx32", "nvfp4", "channel", "tensor")


_PRODUCTS = ("MatMul", "Gemm", "Conv", "QLinearMatMul", "MatMulInteger")
#: Activations of weight-only products; float32 is timed as the last.
_WIDE = ("bfloat16", "float16")


@dataclass(frozen=True)
class _Types:
    """Element types and scaling of a product, with a remark on what they leave out."""

    dtype: str
    weight_dtype: str
    scaling: str | None
    remark: str = ""

    def fields(self) -> Fields:
        weight = {} if self.weight_dtype == self.dtype else {"weight_dtype": self.weight_dtype}
        return {**weight, **({} if self.scaling is None else {"scaling": self.scaling})}


def quantised_groups(graph: OnnxGraph, claimed: set[int]) -> list[NodeGroup]:
    """Groups of all quantised products whose nodes are not in ``claimed`` (indices of nodes)."""
    groups: list[NodeGroup] = []
    taken = set(claimed)
    for node in graph.nodes:
        if not node.is_(*_PRODUCTS) or node.index in taken:
            continue
        group = match_at(graph, node, _product)
        if group is None or not taken.isdisjoint(n.index for n in group.members):
            continue
        if is_closed(graph, group.members):
            taken.update(n.index for n in group.members)
            groups.append(group)
    return _settle_absorbed(graph, groups, taken)


def _settle_absorbed(graph: OnnxGraph, groups: Sequence[NodeGroup], taken: set[int]) -> list[NodeGroup]:
    """Keep the absorbed nodes that nothing else reads: the others also run by themselves."""
    readers: dict[int, set[int]] = {}
    nodes: dict[int, OnnxNode] = {}
    owner = {member.index: at for at, group in enumerate(groups) for member in group.members}
    for at, group in enumerate(groups):
        for node in group.absorbed:
            if node.index not in taken:
                nodes[node.index] = node
                readers.setdefault(node.index, set()).add(at)

    def runs_in_products_only(node: OnnxNode) -> bool:
        if any(value in graph.outputs for value in node.outputs):
            return False
        consumers = [c for value in node.outputs for c in graph.consumers(value)]
        node_readers = readers[node.index]
        return all(
            (c.index in nodes and readers[c.index] <= node_readers) or owner.get(c.index) in node_readers
            for c in consumers
        )

    while left := [index for index, node in nodes.items() if not runs_in_products_only(node)]:
        for index in left:
            del nodes[index]
    shared = Counter(index for index, at in readers.items() for _ in at)
    settled = []
    for group in groups:
        absorbed = tuple(n for n in {n.index: n for n in group.absorbed}.values() if n.index in nodes)
        remarks = [group.remark] if group.remark else []
        times = max((shared[n.index] for n in absorbed if "Dynamic" in n.op or n.op == "QuantizeLinear"), default=1)
        if times > 1:
            remarks.append(f"the quantisation that {times} products share is counted in each")
        settled.append(replace(group, absorbed=absorbed, remark="; ".join(remarks)))
    return settled


def _product(graph: OnnxGraph, node: OnnxNode) -> NodeGroup | None:
    if node.op == "QLinearMatMul":
        return _qlinear_matmul(graph, node)
    if node.op == "MatMulInteger":
        return _matmul_integer(graph, node)
    a, b = dequantised(graph, node.inputs[0]), dequantised(graph, node.inputs[1])
    if node.op == "Conv":
        return _convolution(graph, node, a, b)
    if b is None or (a is None and not b.constant):
        return None
    types = _types(a, b) if a is not None else _weight_only(dtype_of(graph, node.outputs[0]), b)
    if types is None:
        return None
    absorbed = [*(a.nodes if a else ()), *b.nodes]
    if node.op == "Gemm":
        launch = gemm_launch(graph, node, types.dtype)
        absorbed += _dequantised_bias(graph, node.input(2))
        remark = "; ".join(filter(None, (types.remark, launch.remark)))
        return NodeGroup((node,), {**launch.fields, **types.fields()}, remark, tuple(absorbed))
    fields = matmul_fields(graph, node.inputs[0], node.inputs[1], node.outputs[0], types.dtype)
    fields |= types.fields()
    members = [node]
    if fields["operator"] == "linear" and (bias_add := _bias(graph, node.outputs[0])):
        fields["bias"] = True
        members.append(bias_add[0])
        absorbed += bias_add[1]
    return NodeGroup(tuple(members), fields, types.remark, tuple(absorbed))


def _types(a: QuantisedOperand, b: QuantisedOperand) -> _Types | None:
    """Types of a product of two narrow operands."""
    scales = a.scales if a.dynamic or b.scales.kind in ("tensor", "none") else b.scales
    choice = scaling_of(a.dtype, b.dtype, scales)
    if choice is None:
        return None
    scaling, remark = choice
    remarks = [remark, *_source_remarks(a, b)]
    if scaling == "channel" and not a.dynamic and a.scales.kind == "tensor":
        remarks.append("the activations' one static scale is timed as one per row")
    if scaling is not None and not a.constant and not a.quantised_here:
        remarks.append("its input arrives quantised; the program quantises it")
    return _Types(a.dtype, b.dtype, scaling, "; ".join(filter(None, remarks)))


def _weight_only(activations: str, weight: QuantisedOperand) -> _Types | None:
    """Types of a product with a dequantised weight."""
    dtype = activations if activations in _WIDE else _WIDE[-1]
    choice = scaling_of(dtype, weight.dtype, weight.scales)
    if choice is None:
        return None
    remarks = [choice[1], *_source_remarks(weight)]
    if dtype != activations:
        remarks.append(f"{activations} activations timed as {dtype}")
    return _Types(dtype, weight.dtype, choice[0], "; ".join(filter(None, remarks)))


def weight_only_fields(activations: str, weight_dtype: str, block: int, k: int) -> tuple[Fields, str]:
    """Types of a product whose weight has scales of ``block`` elements along ``k``, and a remark.

    Raises NoRuleError: there is no such product.
    """
    scales = ScaleLayout("channel") if block >= k else ScaleLayout("block", block)
    types = _weight_only(activations, QuantisedOperand(weight_dtype, weight_dtype, scales, constant=True))
    if types is None:
        raise NoRuleError(f"weights of type {weight_dtype} under {activations} activations")
    return {"dtype": types.dtype, **types.fields()}, types.remark


def _source_remarks(*operands: QuantisedOperand) -> list[str]:
    odd = sorted({o.source for o in operands if o.source.startswith("float8e5m2")})
    return [f"{source} timed as float8_e4m3" for source in odd]


def _bias(graph: OnnxGraph, value: str) -> tuple[OnnxNode, tuple[OnnxNode, ...]] | None:
    """The Add of a constant vector that alone reads ``value``, and the nodes that dequantise the vector."""
    add = graph.sole_consumer(value)
    if add is None or not add.is_("Add"):
        return None
    bias = add.inputs[1] if add.inputs[0] == value else add.inputs[0]
    if not is_bias(graph, bias, add):
        return None
    if graph.is_constant(bias):
        return add, ()
    nodes = _dequantised_bias(graph, bias)
    return (add, nodes) if nodes else None


def _dequantised_bias(graph: OnnxGraph, value: str) -> tuple[OnnxNode, ...]:
    """The node that dequantises a constant bias, usually of int32 values."""
    node = graph.producer(value)
    if node is None or not is_quantiser(node, "DequantizeLinear") or not graph.is_constant(node.inputs[0]):
        return ()
    return (node,)


def _convolution(
    graph: OnnxGraph, node: OnnxNode, a: QuantisedOperand | None, b: QuantisedOperand | None
) -> NodeGroup | None:
    if a is None or b is None or (a.dtype, b.dtype) != ("int8", "int8"):
        return None
    absorbed = [n for n in a.nodes if n.op != "QuantizeLinear"] + list(b.nodes)
    absorbed += _dequantised_bias(graph, node.input(2))
    launch = conv_launch(graph, node, "int8")
    return NodeGroup((node,), launch.fields, launch.remark, tuple(absorbed))


def _qlinear_matmul(graph: OnnxGraph, node: OnnxNode) -> NodeGroup | None:
    a, b = narrow(graph, node.inputs[0], node.inputs[1]), narrow(graph, node.inputs[3], node.inputs[4])
    types = _types(a, b) if a and b else None
    if a is None or b is None or types is None:
        return None
    fields = matmul_fields(graph, node.inputs[0], node.inputs[3], node.outputs[0], types.dtype)
    members = [node]
    after = graph.sole_consumer(node.outputs[0])
    if after is not None and is_quantiser(after, "DequantizeLinear") and after.inputs[0] == node.outputs[0]:
        members.append(after)
    return NodeGroup(tuple(members), {**fields, **types.fields()}, types.remark, (*a.nodes, *b.nodes))


def _matmul_integer(graph: OnnxGraph, node: OnnxNode) -> NodeGroup | None:
    a, b = narrow(graph, node.inputs[0]), narrow(graph, node.inputs[1])
    if a is None or b is None:
        return None
    bare = matmul_fields(graph, node.inputs[0], node.inputs[1], node.outputs[0], a.dtype)
    after = _rescale(graph, node, [value for n in (*a.nodes, *b.nodes) if "Dynamic" in n.op for value in n.outputs])
    if after is None or not a.quantised_here:
        return NodeGroup((node,), bare, "the product alone: int32 results are not rescaled in it")
    members, absorbed, per_column = after
    if b.scales.kind == "none":
        b = replace(b, scales=ScaleLayout("channel" if per_column else "tensor"))
    types = _types(a, b)
    if types is None:
        return None
    fields = {**bare, **types.fields()}
    if fields["operator"] == "linear" and (bias_add := _bias(graph, members[-1].outputs[0])):
        fields["bias"] = True
        members.append(bias_add[0])
    return NodeGroup((node, *members), fields, types.remark, (*a.nodes, *b.nodes, *absorbed))


def _rescale(
    graph: OnnxGraph, product: OnnxNode, dynamic: Sequence[str]
) -> tuple[list[OnnxNode], list[OnnxNode], bool] | None:
    """Conversion of int32 results and the products with scales behind it; None when they are not rescaled.

    The second list has the nodes that combine the scales. The flag says that a scale differs between columns.
    """
    cast = graph.sole_consumer(product.outputs[0])
    if cast is None or not cast.is_("Cast"):
        return None
    members, combined, per_column = [cast], list[OnnxNode](), False
    while (mul := graph.sole_consumer(members[-1].outputs[0])) is not None and mul.is_("Mul"):
        value = members[-1].outputs[0]
        scale = mul.inputs[1] if mul.inputs[0] == value else mul.inputs[0]
        inner = _scale_nodes(graph, scale, dynamic)
        if inner is None or graph.shape(mul.outputs[0]) != graph.shape(value):
            break
        combined += inner
        members.append(mul)
        per_column = per_column or math.prod(shape_of(graph, scale)) > 1
    return (members, combined, per_column) if len(members) > 1 else None


def _scale_nodes(graph: OnnxGraph, value: str, dynamic: Sequence[str]) -> list[OnnxNode] | None:
    """Nodes that compute a scale from constants and dynamic scales; None when it is no scale."""
    if graph.is_constant(value) or value in dynamic:
        return []
    node = graph.producer(value)
    if node is None or not node.is_("Mul") or not all(graph.is_constant(i) or i in dynamic for i in node.inputs):
        return None
    return [node]


_WEIGHT_BITS = {4: "int4", 8: "int8"}


def quantise(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """A QuantizeLinear or DequantizeLinear that is part of no product."""
    if node.op == "QuantizeLinear" and graph.is_constant(node.inputs[0]):
        return Free("constant: computed before the model runs")
    wide = node.inputs[0] if node.op == "QuantizeLinear" else node.outputs[0]
    kinds = f"{graph.dtype(node.inputs[0])} to {graph.dtype(node.outputs[0])}"
    return NodeLaunch(over(graph, "mul_scalar", wide), f"conversion {kinds}, timed as mul_scalar")


def quantise_dynamic(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """A DynamicQuantizeLinear that is part of no product: a reduction, then a conversion."""
    value = node.inputs[0]
    remark = "the range timed as reduce_mean, the conversion as mul_scalar"
    return NodeLaunch(over(graph, "reduce_mean", value), remark, then=(("convert", over(graph, "mul_scalar", value)),))


def _matmul_nbits(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """A weight of 4 or 8 bits in blocks along k: inputs A, packed B, scales, zero points, group index, bias."""
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs["block_size"])
    n, k = int(node.attrs["N"]), int(node.attrs["K"])
    if block < 1:
        raise ValueError(f"block_size={block} is not positive")
    if bits not in _WEIGHT_BITS:
        raise NoRuleError(f"weights of {bits} bits, not " + " or ".join(map(str, _WEIGHT_BITS)))
    shape = shape_of(graph, node.inputs[0])
    if shape[-1] != k:
        raise ValueError(f"K={k}, but its input has {shape[-1]} columns")
    types, remark = weight_only_fields(dtype_of(graph, node.inputs[0]), _WEIGHT_BITS[bits], block, k)
    sizes = {"m": math.prod(shape[:-1]), "n": n, "k": k, "bias": bool(node.input(5))}
    return NodeLaunch({"operator": "linear", **sizes, **types}, remark)


def _int8_product(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """Products of int8 values with a floating-point result.

    MatMulIntegerToFloat reads A, B, both scales, both zero points, a bias; DynamicQuantizeMatMul reads A, B, the
    scale and zero point of B, a bias.
    """
    dynamic = node.op == "DynamicQuantizeMatMul"
    if graph.dtype(node.inputs[1]) not in NARROW:
        raise NoRuleError(f"a weight of type {graph.dtype(node.inputs[1])}")
    weight = scales_of(graph, node.inputs[2] if dynamic else node.inputs[3])
    choice = scaling_of("int8", "int8", ScaleLayout("dynamic") if dynamic else weight)
    scaling, remark = choice or (None, "")
    fields = matmul_fields(graph, node.inputs[0], node.inputs[1], node.outputs[0], "int8") | {"scaling": scaling}
    bias = node.input(4 if dynamic else 6)
    if bias and fields["operator"] == "linear":
        fields["bias"] = True
    arrives = "" if dynamic else "its input arrives quantised; the program quantises it"
    return NodeLaunch(fields, "; ".join(filter(None, (remark, arrives))))


def _qgemm(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """A, its scale and zero point, B, its scale and zero point, a bias, then the scale of the result."""
    m, n, k = _gemm_sizes(graph, node)
    scaling, remark = scaling_of("int8", "int8", scales_of(graph, node.inputs[4])) or (None, "")
    fields = {"operator": "linear", "dtype": "int8", "scaling": scaling, "m": m, "n": n, "k": k}
    arrives = "its input arrives quantised; the program quantises it"
    return NodeLaunch(fields | {"bias": bool(node.input(6))}, "; ".join(filter(None, (remark, arrives))))


def _gemm_sizes(graph: OnnxGraph, node: OnnxNode) -> tuple[int, int, int]:
    a, b = shape_of(graph, node.inputs[0]), shape_of(graph, node.inputs[3])
    m, k = (a[1], a[0]) if node.attrs.get("transA") else (a[0], a[1])
    return m, b[0] if node.attrs.get("transB") else b[1], k


def _narrow(operator: str, remark: str = "") -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    """An operator on 8-bit tensors with scales; rows are those of the last axis."""

    def rule(graph: OnnxGraph, node: OnnxNode) -> Outcome:
        sizes = rows_cols(shape_of(graph, node.outputs[0]))
        return NodeLaunch({"operator": operator, "dtype": "int8", **sizes}, remark)

    return rule


QUANTISED_RULES: dict[str, Callable[[OnnxGraph, OnnxNode], Outcome]] = {
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
_TYPE_OF = dict.fromkeys(QUANTISED_RULES, 0) | {"MatMulIntegerToFloat": 2, "QuantizeLinear": 2, "DequantizeLinear": 1}


def quantised_types(graph: OnnxGraph, node: OnnxNode) -> dict[str, tuple[int, tuple[int, ...]]]:
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
