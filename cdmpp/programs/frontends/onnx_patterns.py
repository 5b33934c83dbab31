"""Groups of ONNX nodes that a framework launches as one kernel: activations, norms, attention, linear with bias.

A matcher starts at the one node that gives its pattern away and returns the nodes of a group, or None.
Every value inside a group is read by the group alone, so that the group can stand for its nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_nodes import map_node
from cdmpp.programs.frontends.onnx_quantised import quantised_groups
from cdmpp.programs.frontends.onnx_rules import (
    Fields,
    NodeGroup,
    NodeLaunch,
    attention_fields,
    dtype_of,
    is_bias,
    is_closed,
    match_at,
    matmul_fields,
    over,
    rowwise,
    shape_of,
)

_TOLERANCE = 1e-2  # constants are often stored as float16


Found = tuple[list[OnnxNode], Fields, str]
Matchers = tuple[tuple[str, Callable[[OnnxGraph, OnnxNode], Found | None]], ...]


def find_groups(graph: OnnxGraph) -> list[NodeGroup]:
    """All groups of a graph, without overlap; the larger patterns go first."""
    groups: list[NodeGroup] = []
    claimed: set[int] = set()
    _find(graph, _MATCHERS, groups, claimed)
    quantised = quantised_groups(graph, claimed)
    groups += quantised
    claimed.update(node.index for group in quantised for node in (*group.members, *group.absorbed))
    _find(graph, (("MatMul", _linear_bias),), groups, claimed)
    return groups


def _find(graph: OnnxGraph, matchers: Matchers, groups: list[NodeGroup], claimed: set[int]) -> None:
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
                groups.append(NodeGroup(tuple(members), fields, remark))


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
    added = _scaled(graph, add, "Add")
    if add is None or added is None or not _near(added[1], 1.0):
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
    return members, rowwise(operator, dtype, shape, cols), ""


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


#: What an additive mask holds where a key must not be seen: at most this.
MASKED_AT_MOST = -1e3

_VIEWS = ("Reshape", "Unsqueeze", "Squeeze", "Identity", "Flatten")


def match_attention(graph: OnnxGraph, softmax: OnnxNode) -> Found | None:
    """The nodes and the specification of an attention, given its softmax.

    Taken in besides the two products: scales, masks, casts, and the transpositions of q, k, v and of
    the result, which fused kernels do by reading and writing with strides. Key heads repeated by
    Expand make it grouped attention.
    """
    shape = shape_of(graph, softmax.inputs[0])
    axis = int(softmax.attrs.get("axis", -1 if softmax.opset >= 13 else 1))
    if len(shape) < 2 or axis not in (-1, len(shape) - 1):
        return None
    after = _forward(graph, softmax)
    scores = _backward(graph, softmax.inputs[0], shape, depth=0)
    if after is None or scores is None or scores.matmul is None:
        return None
    q, keys, v = scores.matmul.inputs[0], scores.matmul.inputs[1], after[-1].inputs[1]
    members = [*scores.members, scores.matmul, softmax, *after]
    q_shape, k_shape, v_shape = (shape_of(graph, value) for value in (q, keys, v))
    if min(len(q_shape), len(k_shape), len(v_shape)) < 2 or v_shape[-1] != q_shape[-1]:
        return None  # a fused kernel has one head size
    q_len, k_len, head_dim = q_shape[-2], k_shape[-1], q_shape[-1]
    lead = shape_of(graph, scores.matmul.outputs[0])[:-2]
    batch, heads = math.prod(lead[:-1]), lead[-1] if lead else 1
    groups = []
    for value, repeats in ((q, False), (keys, True), (v, True)):
        absorbed, factor = _operand(graph, value, repeats)
        members += absorbed
        groups.append(factor)
    kv_heads = heads // groups[1] if groups[1] == groups[2] and heads % groups[1] == 0 else heads
    members += _output(graph, after[-1])
    causal, remark = _causal(graph, scores.masks, q_len, k_len)
    dtype = dtype_of(graph, q)
    if k_len < q_len:
        return None
    fields = attention_fields(dtype, batch, q_len, k_len, heads, kv_heads, head_dim, causal)
    return members, fields, remark


def match_attention_operator(graph: OnnxGraph, node: OnnxNode) -> Found | None:
    """ONNX's own Attention with what its kernel does on the side: transpositions, repeated key heads."""
    outcome = map_node(graph, node)
    if not isinstance(outcome, NodeLaunch) or len(shape_of(graph, node.inputs[0])) != 4:
        return None
    members, factors = [node], []
    for value, repeats in zip(node.inputs[:3], (False, True, True), strict=True):
        absorbed, factor = _operand(graph, value, repeats)
        members += absorbed
        factors.append(factor)
    members += _output(graph, node)
    fields = dict(outcome.fields)
    if factors[1] == factors[2] and fields["kv_heads"] % factors[1] == 0:
        fields["kv_heads"] //= factors[1]
    return (members, fields, outcome.remark) if len(members) > 1 else None


@dataclass
class _AttentionScores:
    """The way from the softmax back to the product of queries and keys."""

    members: list[OnnxNode] = field(default_factory=list)
    #: (value, kept where true): additive masks, and conditions of Where.
    masks: list[tuple[str, bool | None]] = field(default_factory=list)
    matmul: OnnxNode | None = None


def _backward(graph: OnnxGraph, value: str, shape: tuple[int, ...], depth: int) -> _AttentionScores | None:
    node = graph.producer(value)
    if node is None or node.domain or depth > 8:
        return None
    if node.op == "MatMul":
        return _AttentionScores(matmul=node) if graph.shape(value) is not None else None
    candidates: list[tuple[str, tuple[str, bool | None] | None]] = []
    if node.op in ("Mul", "Div", "Max"):
        scalar = graph.scalar(node.inputs[1])
        if scalar is not None:
            candidates.append((node.inputs[0], None))
        elif node.op != "Div" and graph.scalar(node.inputs[0]) is not None:
            candidates.append((node.inputs[1], None))
    elif node.op == "Add":
        a, b = node.inputs
        candidates = [(a, (b, None)), (b, (a, None))]
    elif node.op == "Where":
        condition, yes, no = node.inputs
        candidates = [(yes, (condition, True)), (no, (condition, False))]
    elif node.op in ("Cast", *_VIEWS) and (graph.shape(node.inputs[0]) or ())[-2:] == shape[-2:]:
        candidates = [(node.inputs[0], None)]
    for inner, mask in candidates:
        steps = _backward(graph, inner, shape, depth + 1)
        if steps is not None:
            steps.members.append(node)
            if mask is not None:
                steps.masks.append(mask)
            return steps
    return None


def _forward(graph: OnnxGraph, softmax: OnnxNode) -> list[OnnxNode] | None:
    """Nodes from the softmax to the product with the values, which is the last."""
    members: list[OnnxNode] = []
    value = softmax.outputs[0]
    for _ in range(6):
        guard = _nan_guard(graph, value)
        if guard is not None:
            members += guard
            value = guard[-1].outputs[0]
            continue
        node = graph.sole_consumer(value)
        if node is None:
            return None
        members.append(node)
        if node.is_("MatMul"):
            return members if node.inputs[0] == value else None
        if not node.is_("Dropout", "Cast", *_VIEWS):
            return None
        value = node.outputs[0]
    return None


def _nan_guard(graph: OnnxGraph, value: str) -> list[OnnxNode] | None:
    """``Where(IsNaN(x), 0, x)``: what torch exports for rows that are masked altogether."""
    readers = graph.consumers(value)
    test = next((n for n in readers if n.is_("IsNaN")), None)
    choice = next((n for n in readers if n.is_("Where")), None)
    if len(readers) != 2 or test is None or choice is None or choice.inputs[0] != test.outputs[0]:
        return None
    return [test, choice]


def _operand(graph: OnnxGraph, value: str, repeats: bool) -> tuple[list[OnnxNode], int]:
    """Scales, transpositions and, for keys and values, repetitions of heads before a product."""
    taken: list[OnnxNode] = []
    pending: list[OnnxNode] = []
    factor = 1
    while (node := graph.producer(value)) is not None and graph.sole_consumer(value) is not None:
        if node.domain:
            break
        if node.op in ("Mul", "Div") and graph.scalar(node.inputs[1]) is not None:
            pass
        elif node.op == "Expand" and repeats:
            before, after = graph.shape(node.inputs[0]), graph.shape(value)
            if not before or not after or len(before) != len(after):
                break
            factor *= math.prod(after) // max(math.prod(before), 1)
        elif node.op in _VIEWS:
            pending.append(node)
            value = node.inputs[0]
            continue
        elif node.op != "Transpose":
            break
        # Views are part of the group only when something beyond them is.
        taken += [*pending, node]
        pending = []
        value = node.inputs[0]
    return taken, factor


def _output(graph: OnnxGraph, matmul: OnnxNode) -> list[OnnxNode]:
    """The transposition that puts the heads beside each other again."""
    members: list[OnnxNode] = []
    value = matmul.outputs[0]
    while (node := graph.sole_consumer(value)) is not None and node.is_("Transpose", *_VIEWS):
        members.append(node)
        if node.op == "Transpose":
            return members
        value = node.outputs[0]
    return []


def _causal(graph: OnnxGraph, masks: list[tuple[str, bool | None]], q_len: int, k_len: int) -> tuple[bool, str]:
    """Whether a constant mask lets each query see the keys up to its own position only."""
    remark = ""
    for name, kept in masks:
        value = graph.value(name)
        if value is None:
            remark = "its mask is not constant: taken as not causal"
            continue
        visible = value > MASKED_AT_MOST if kept is None else value.astype(bool) if kept else ~value.astype(bool)
        if visible.size != q_len * k_len or visible.shape[-2:] != (q_len, k_len):
            continue
        seen = np.tril(np.ones((q_len, k_len), dtype=bool), k_len - q_len)
        if q_len > 1 and bool((visible.reshape(q_len, k_len) == seen).all()):
            return True, ""
    return False, remark


_MATCHERS: Matchers = (
    ("Softmax", match_attention),
    ("Attention", match_attention_operator),
    ("Sqrt", _norm),
    ("Erf", _gelu_erf),
    ("Tanh", _gelu_tanh),
    ("Sigmoid", _silu),
)
