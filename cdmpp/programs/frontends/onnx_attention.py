"""Recognise attention written out as MatMul, scale, mask, Softmax, MatMul: one fused kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_nodes import attention_fields, map_node
from cdmpp.programs.frontends.onnx_rules import Fields, Launch, dtype_of, shape_of

Found = tuple[list[OnnxNode], Fields, str]

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
    if not isinstance(outcome, Launch) or len(shape_of(graph, node.inputs[0])) != 4:
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
class _Scores:
    """The way from the softmax back to the product of queries and keys."""

    members: list[OnnxNode] = field(default_factory=list)
    #: (value, kept where true): additive masks, and conditions of Where.
    masks: list[tuple[str, bool | None]] = field(default_factory=list)
    matmul: OnnxNode | None = None


def _backward(graph: OnnxGraph, value: str, shape: tuple[int, ...], depth: int) -> _Scores | None:
    node = graph.producer(value)
    if node is None or node.domain or depth > 8:
        return None
    if node.op == "MatMul":
        return _Scores(matmul=node) if graph.shape(value) is not None else None
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
