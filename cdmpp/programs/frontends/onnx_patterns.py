"""Groups of ONNX nodes that a framework launches as one kernel: activations, norms, linear with bias.

A matcher starts at the one node that gives its pattern away and returns the nodes of a group, or None.
Every value inside a group is read by the group alone, so that the group can stand for its nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cdmpp.programs.frontends.onnx_attention import match_attention, match_attention_operator
from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_groups import Group, is_closed, match_at
from cdmpp.programs.frontends.onnx_products import is_bias, matmul_fields
from cdmpp.programs.frontends.onnx_quantised import quantised_groups
from cdmpp.programs.frontends.onnx_rules import Fields, dtype_of, over, shape_of

_TOLERANCE = 1e-2  # constants are often stored as float16


def find_groups(graph: OnnxGraph) -> list[Group]:
    """All groups of a graph, without overlap; the larger patterns go first."""
    groups: list[Group] = []
    claimed: set[int] = set()
    _find(graph, _MATCHERS, groups, claimed)
    quantised = quantised_groups(graph, claimed)
    groups += quantised
    claimed.update(node.index for group in quantised for node in (*group.members, *group.absorbed))
    _find(graph, (("MatMul", _linear_bias),), groups, claimed)
    return groups


def _find(graph: OnnxGraph, matchers: Matchers, groups: list[Group], claimed: set[int]) -> None:
    """Add the groups of ``matchers`` whose nodes are not claimed."""
    for op, matcher in matchers:
        for node in graph.nodes:
            if not node.is_(op) or node.index in claimed:
                continue
            group = match_at(graph, node, matcher)
            if group is None:
                continue
            nodes, fields, remark = group
            members = sorted({n.index: n for n in nodes}.values(), key=lambda n: n.index)
            if claimed.isdisjoint(n.index for n in members) and is_closed(graph, members):
                claimed.update(n.index for n in members)
                groups.append(Group(tuple(members), fields, remark))


Found = tuple[list[OnnxNode], Fields, str]
Matchers = tuple[tuple[str, Callable[[OnnxGraph, OnnxNode], Found | None]], ...]


def _near(value: float | None, wanted: float) -> bool:
    return value is not None and abs(value - wanted) <= _TOLERANCE * max(abs(wanted), 1e-3)


def _scaled(graph: OnnxGraph, node: OnnxNode | None, *ops: str) -> tuple[str, float] | None:
    """(tensor, scalar) of a node with one constant one-element operand."""
    if node is None or not node.is_(*ops) or len(node.inputs) != 2:
        return None
    for tensor, scalar in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        value = graph.scalar(scalar)
        if value is not None and not graph.is_constant(tensor):
            if node.op in ("Div", "Pow", "Sub") and scalar == node.inputs[0]:
                return None
            return tensor, value
    return None


# -- gelu, silu -------------------------------------------------------------------------------


def _times_x_half(graph: OnnxGraph, start: OnnxNode, x: str, inner: list[OnnxNode]) -> list[OnnxNode] | None:
    """Products that turn ``1 + f(x)`` into ``0.5 * x * (1 + f(x))``, in any order."""
    members, value = [start], start.outputs[0]
    seen_half = seen_x = False
    while not (seen_half and seen_x):
        node = graph.sole_consumer(value)
        if node is None or not node.is_("Mul"):
            return None
        other = node.inputs[1] if node.inputs[0] == value else node.inputs[0]
        if _near(graph.scalar(other), 0.5) and not seen_half:
            seen_half = True
        elif other == x and not seen_x:
            seen_x = True
        elif (half := _scaled(graph, factor := graph.producer(other), "Mul", "Div")) and factor:
            if half[0] != x or not _near(half[1], 0.5 if factor.op == "Mul" else 2.0) or seen_x or seen_half:
                return None
            members.append(factor)
            seen_half = seen_x = True
        else:
            return None
        members.append(node)
        value = node.outputs[0]
    return [*inner, *members]


def _gelu_erf(graph: OnnxGraph, erf: OnnxNode) -> Found | None:
    """``0.5 * x * (1 + erf(x / sqrt 2))``, as exported where there is no Gelu operator."""
    scale = graph.producer(erf.inputs[0])
    scaled = _scaled(graph, scale, "Div", "Mul")
    if scaled is None or scale is None:
        return None
    if not _near(scaled[1], math.sqrt(2) if scale.op == "Div" else math.sqrt(0.5)):
        return None
    return _gelu(graph, erf, scaled[0], [scale, erf])


def _gelu_tanh(graph: OnnxGraph, tanh: OnnxNode) -> Found | None:
    """``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``."""
    inner, stack, roots, constants = [tanh], [tanh.inputs[0]], set[str](), set[float]()
    while stack:
        value = stack.pop()
        node = graph.producer(value)
        if node is None or not node.is_("Mul", "Add", "Pow") or len(graph.consumers(value)) != 1:
            # Not part of the polynomial: its argument.
            roots.add(value)
            continue
        inner.append(node)
        if len(inner) > 9:
            return None
        for operand in node.inputs:
            scalar = graph.scalar(operand)
            if scalar is None:
                stack.append(operand)
            else:
                constants.add(scalar)
    x = [r for r in roots if all(r not in n.outputs for n in inner)]
    # x * x * x written as products leaves x * x with one reader, which the walk enters by itself.
    if len(x) != 1 or not any(_near(c, 0.044715) or _near(c, 0.0356774) for c in constants):
        return None
    return _gelu(graph, tanh, x[0], inner)


def _gelu(graph: OnnxGraph, anchor: OnnxNode, x: str, inner: list[OnnxNode]) -> Found | None:
    add = graph.sole_consumer(anchor.outputs[0])
    one = _scaled(graph, add, "Add")
    if add is None or one is None or not _near(one[1], 1.0):
        return None
    members = _times_x_half(graph, add, x, inner)
    return None if members is None else (members, over(graph, "gelu", x), "")


def _silu(graph: OnnxGraph, sigmoid: OnnxNode) -> Found | None:
    """``x * sigmoid(x)``."""
    node, x = graph.sole_consumer(sigmoid.outputs[0]), sigmoid.inputs[0]
    if node is None or not node.is_("Mul") or x not in node.inputs:
        return None
    return [sigmoid, node], over(graph, "silu", x), ""


# -- norms ------------------------------------------------------------------------------------


def _mean_axes(graph: OnnxGraph, node: OnnxNode) -> tuple[int, ...]:
    rank = len(shape_of(graph, node.inputs[0]))
    axes = node.attrs.get("axes")
    if axes is None:
        value = graph.value(node.input(1)) if node.input(1) else None
        axes = range(rank) if value is None else value.reshape(-1).tolist()
    return tuple(sorted(int(axis) % rank for axis in axes))


def _norm(graph: OnnxGraph, sqrt: OnnxNode) -> Found | None:
    """Layer and RMS normalisation written out: ``x / sqrt(mean(x ** 2) + eps) * weight (+ bias)``."""
    add = graph.producer(sqrt.inputs[0])
    with_eps = _scaled(graph, add, "Add")
    mean = graph.producer(with_eps[0]) if with_eps else None
    if add is None or mean is None or not mean.is_("ReduceMean"):
        return None
    axes = _mean_axes(graph, mean)
    rank = len(shape_of(graph, mean.inputs[0]))
    if axes != tuple(range(axes[0], rank)):
        return None
    square = graph.producer(mean.inputs[0])
    if square is None:
        return None
    power = _scaled(graph, square, "Pow")
    if power and power[1] == 2.0:
        centred = power[0]
    elif square.is_("Mul") and square.inputs[0] == square.inputs[1]:
        centred = square.inputs[0]
    else:
        return None
    members, operator, x = [square, mean, add, sqrt], "rmsnorm", centred
    minus = graph.producer(centred)
    if minus is not None and minus.is_("Sub"):
        first = graph.producer(minus.inputs[1])
        if first is not None and first.is_("ReduceMean") and first.inputs[0] == minus.inputs[0]:
            if _mean_axes(graph, first) != axes:
                return None
            members, operator, x = [first, minus, *members], "layernorm", minus.inputs[0]
    divided = _normalise(graph, sqrt, centred)
    if divided is None:
        return None
    members += divided
    members, dtype = _norm_affine(graph, members, operator)
    wide = graph.producer(x)
    if operator == "rmsnorm" and wide is not None and wide.is_("Cast"):
        inside = {n.index for n in members}
        if all(c.index in inside for c in graph.consumers(x)):  # computed in float32, stored narrower
            members, x = [wide, *members], wide.inputs[0]
    shape = shape_of(graph, x)
    cols = math.prod(shape[axes[0] :])
    fields = {"operator": operator, "dtype": dtype, "rows": math.prod(shape) // cols, "cols": cols}
    return members, fields, ""


def _normalise(graph: OnnxGraph, sqrt: OnnxNode, centred: str) -> list[OnnxNode] | None:
    """``centred / sqrt``, directly or by way of the reciprocal."""
    node = graph.sole_consumer(sqrt.outputs[0])
    if node is None:
        return None
    if node.is_("Div") and node.inputs == (centred, sqrt.outputs[0]):
        return [node]
    if node.is_("Reciprocal") or (node.is_("Div") and _near(graph.scalar(node.inputs[0]), 1.0)):
        product = graph.sole_consumer(node.outputs[0])
        if product is not None and product.is_("Mul") and centred in product.inputs:
            return [node, product]
    return None


def _norm_affine(graph: OnnxGraph, members: list[OnnxNode], operator: str) -> tuple[list[OnnxNode], str]:
    """Take in the casts, the weight and, for a layer norm, the bias that follow."""
    wanted = ["Mul", "Add"] if operator == "layernorm" else ["Mul"]
    while True:
        node = graph.sole_consumer(members[-1].outputs[0])
        if node is None:
            break
        if node.is_("Cast") and graph.dtype(node.outputs[0]) in ("float32", "float16", "bfloat16"):
            members = [*members, node]
        elif wanted and node.is_(*wanted) and any(graph.is_constant(i) for i in node.inputs):
            if graph.shape(node.outputs[0]) != graph.shape(members[-1].outputs[0]):
                break
            wanted = wanted[wanted.index(node.op) + 1 :]
            members = [*members, node]
        else:
            break
    return members, dtype_of(graph, members[-1].outputs[0])


# -- linear with bias -------------------------------------------------------------------------


def _linear_bias(graph: OnnxGraph, matmul: OnnxNode) -> Found | None:
    """A MatMul with a matrix, followed only by the addition of a constant vector."""
    a, b, out = matmul.inputs[0], matmul.inputs[1], matmul.outputs[0]
    add = graph.sole_consumer(out)
    if len(shape_of(graph, b)) != 2 or len(shape_of(graph, a)) < 2 or add is None or not add.is_("Add"):
        return None
    bias = add.inputs[1] if add.inputs[0] == out else add.inputs[0]
    if not graph.is_constant(bias) or not is_bias(graph, bias, add):
        return None
    return [matmul, add], {**matmul_fields(graph, a, b, out), "bias": True}, ""


_MATCHERS: Matchers = (
    ("Softmax", match_attention),
    ("Attention", match_attention_operator),
    ("Sqrt", _norm),
    ("Erf", _gelu_erf),
    ("Tanh", _gelu_tanh),
    ("Sigmoid", _silu),
)
