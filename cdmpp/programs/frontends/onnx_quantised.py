"""Products of quantised operands in ONNX graphs, each launched as one quantised ``linear``, ``bmm`` or ``conv2d``.

What becomes one program:

* MatMul, Gemm or Conv between DequantizeLinear nodes (also ``DequantizeLinear(QuantizeLinear(x))``);
* MatMul or Gemm whose weight alone is dequantised: a weight-only product of the activations' type;
* QLinearMatMul, with the QuantizeLinear before it and the DequantizeLinear behind it;
* MatMulInteger, with the DynamicQuantizeLinear before it and the conversion and scaling behind it.

A quantised ``linear`` or ``bmm`` includes the quantisation of its activations, so the nodes that do it launch nothing.
A ``conv2d`` does not: its QuantizeLinear is a kernel of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_groups import Group, is_closed, match_at
from cdmpp.programs.frontends.onnx_operands import Operand, Scales, dequantised, is_quantiser, narrow, scaling_of
from cdmpp.programs.frontends.onnx_products import conv_launch, gemm_launch, is_bias, matmul_fields
from cdmpp.programs.frontends.onnx_rules import Fields, Unsupported, dtype_of, shape_of

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


def quantised_groups(graph: OnnxGraph, claimed: set[int]) -> list[Group]:
    """Groups of all quantised products whose nodes are not in ``claimed`` (indices of nodes)."""
    groups: list[Group] = []
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


def _settle_absorbed(graph: OnnxGraph, groups: Sequence[Group], taken: set[int]) -> list[Group]:
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
        mine = readers[node.index]
        return all((c.index in nodes and readers[c.index] <= mine) or owner.get(c.index) in mine for c in consumers)

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


def _product(graph: OnnxGraph, node: OnnxNode) -> Group | None:
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
        return Group((node,), {**launch.fields, **types.fields()}, remark, tuple(absorbed))
    fields = matmul_fields(graph, node.inputs[0], node.inputs[1], node.outputs[0], types.dtype)
    fields |= types.fields()
    members = [node]
    if fields["operator"] == "linear" and (bias_add := _bias(graph, node.outputs[0])):
        fields["bias"] = True
        members.append(bias_add[0])
        absorbed += bias_add[1]
    return Group(tuple(members), fields, types.remark, tuple(absorbed))


def _types(a: Operand, b: Operand) -> _Types | None:
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


def _weight_only(activations: str, weight: Operand) -> _Types | None:
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

    Raises
    ------
    Unsupported
        There is no such product.
    """
    scales = Scales("channel") if block >= k else Scales("block", block)
    types = _weight_only(activations, Operand(weight_dtype, weight_dtype, scales, constant=True))
    if types is None:
        raise Unsupported(f"weights of type {weight_dtype} under {activations} activations")
    return {"dtype": types.dtype, **types.fields()}, types.remark


def _source_remarks(*operands: Operand) -> list[str]:
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


def _convolution(graph: OnnxGraph, node: OnnxNode, a: Operand | None, b: Operand | None) -> Group | None:
    if a is None or b is None or (a.dtype, b.dtype) != ("int8", "int8"):
        return None
    absorbed = [n for n in a.nodes if n.op != "QuantizeLinear"] + list(b.nodes)
    absorbed += _dequantised_bias(graph, node.input(2))
    launch = conv_launch(graph, node, "int8")
    return Group((node,), launch.fields, launch.remark, tuple(absorbed))


def _qlinear_matmul(graph: OnnxGraph, node: OnnxNode) -> Group | None:
    a, b = narrow(graph, node.inputs[0], node.inputs[1]), narrow(graph, node.inputs[3], node.inputs[4])
    types = _types(a, b) if a and b else None
    if a is None or b is None or types is None:
        return None
    fields = matmul_fields(graph, node.inputs[0], node.inputs[3], node.outputs[0], types.dtype)
    members = [node]
    after = graph.sole_consumer(node.outputs[0])
    if after is not None and is_quantiser(after, "DequantizeLinear") and after.inputs[0] == node.outputs[0]:
        members.append(after)
    return Group(tuple(members), {**fields, **types.fields()}, types.remark, (*a.nodes, *b.nodes))


def _matmul_integer(graph: OnnxGraph, node: OnnxNode) -> Group | None:
    a, b = narrow(graph, node.inputs[0]), narrow(graph, node.inputs[1])
    if a is None or b is None:
        return None
    bare = matmul_fields(graph, node.inputs[0], node.inputs[1], node.outputs[0], a.dtype)
    after = _rescale(graph, node, [value for n in (*a.nodes, *b.nodes) if "Dynamic" in n.op for value in n.outputs])
    if after is None or not a.quantised_here:
        return Group((node,), bare, "the product alone: int32 results are not rescaled in it")
    members, absorbed, per_column = after
    if b.scales.kind == "none":
        b = replace(b, scales=Scales("channel" if per_column else "tensor"))
    types = _types(a, b)
    if types is None:
        return None
    fields = {**bare, **types.fields()}
    if fields["operator"] == "linear" and (bias_add := _bias(graph, members[-1].outputs[0])):
        fields["bias"] = True
        members.append(bias_add[0])
    return Group((node, *members), fields, types.remark, (*a.nodes, *b.nodes, *absorbed))


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
