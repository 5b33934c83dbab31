"""Shared parts of the rules for ONNX nodes, and the rules of matrix products, convolutions and poolings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.programs.frontends.graph import NoRuleError
from cdmpp.programs.frontends.onnx_graph import Array, OnnxGraph, OnnxNode

Shape = tuple[int, ...]
Fields = dict[str, Any]

DTYPES = ("float32", "float16", "bfloat16", "int8")


@dataclass(frozen=True)
class Free:
    """The node launches nothing: it only renames or reinterprets memory."""

    reason: str


@dataclass(frozen=True)
class NodeLaunch:
    """The node launches ``fields``, then whatever is in ``then`` (each with a suffix for its id)."""

    fields: Fields
    remark: str = ""
    then: tuple[tuple[str, Fields], ...] = field(default=())


Outcome = NodeLaunch | Free


#: What a rule runs into when shapes or attributes break the operator's definition past shape inference.
MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError)


def malformed(graph: OnnxGraph, node: OnnxNode, error: Exception) -> InvalidProgramError:
    """The error to raise for one of :data:`MALFORMED`."""
    return InvalidProgramError(
        f"{graph.name}: node {node.id!r} ({node.label}) is malformed: {error}",
        hint="check the model with onnx.checker.check_model(path, full_check=True)",
    )


# -- helpers ----------------------------------------------------------------------------------


def shape_of(graph: OnnxGraph, value: str) -> Shape:
    """Shape of a value that must have one."""
    shape = graph.shape(value)
    if shape is None:
        raise NoRuleError(f"the shape of {value!r} is not static" if value else "an input is left out")
    return shape


def dtype_of(graph: OnnxGraph, value: str) -> str:
    """Element type of a value, if programs may have it."""
    dtype = graph.dtype(value)
    if dtype not in DTYPES:
        raise NoRuleError(f"element type {dtype}")
    return dtype


def rows_cols(shape: Shape) -> Fields:
    """A tensor as rows of its last axis."""
    return {"rows": math.prod(shape[:-1]), "cols": shape[-1] if shape else 1}


def rowwise(operator: str, dtype: str, shape: Shape, cols: int) -> Fields:
    """Fields of an operator along rows of ``cols`` elements of a tensor."""
    return {"operator": operator, "dtype": dtype, "rows": math.prod(shape) // cols, "cols": cols}


def over(graph: OnnxGraph, operator: str, value: str, **more: Any) -> Fields:
    """Fields of an operator on all elements of ``value``."""
    return {"operator": operator, "dtype": dtype_of(graph, value), **rows_cols(shape_of(graph, value)), **more}


def constant_ints(graph: OnnxGraph, node: OnnxNode, index: int, attribute: str) -> list[int] | None:
    """Integers given as an attribute (old operator sets) or as a constant input (newer ones)."""
    if attribute in node.attrs:
        return [int(v) for v in node.attrs[attribute]]
    name = node.input(index)
    if not name:
        return None
    value: Array | None = graph.value(name)
    if value is None:
        raise NoRuleError(f"{attribute} is not constant")
    return [int(v) for v in value.reshape(-1)]


M = TypeVar("M")


@dataclass(frozen=True)
class NodeGroup:
    """Nodes launched as one program, in topological order; the last one writes the result.

    ``absorbed`` nodes run inside the program too, but several programs may read them: the quantisation of a tensor
    that three products read is part of each.
    """

    members: tuple[OnnxNode, ...]
    fields: Fields
    remark: str = ""
    absorbed: tuple[OnnxNode, ...] = ()

    @property
    def label(self) -> str:
        """The operator types of the members, joined."""
        return "+".join(dict.fromkeys(node.label for node in self.members))


def match_at(graph: OnnxGraph, node: OnnxNode, matcher: Callable[[OnnxGraph, OnnxNode], M | None]) -> M | None:
    """The group that a matcher finds at a node; None where there is none, and its nodes are taken one by one.

    Raises InvalidProgramError: the node is malformed.
    """
    if not node.outputs or graph.is_constant(node.outputs[0]):
        return None
    try:
        return matcher(graph, node)
    except NoRuleError:
        return None
    except CdmppError:
        raise
    except MALFORMED as error:
        raise malformed(graph, node, error) from None


def is_closed(graph: OnnxGraph, members: Iterable[OnnxNode]) -> bool:
    """Whether only the last member's result is read outside the group."""
    members = list(members)
    inside = {n.index for n in members}
    for node in members[:-1]:
        for value in node.outputs:
            if value in graph.outputs or any(c.index not in inside for c in graph.consumers(value)):
                return False
    return True


# -- matrix products --------------------------------------------------------------------------


def matmul_fields(graph: OnnxGraph, a: str, b: str, out: str, dtype: str = "") -> Fields:
    """:func:`product_fields` of two values; ``dtype`` is the element type, by default that of the result."""
    return product_fields(shape_of(graph, a), shape_of(graph, b), shape_of(graph, out), dtype or dtype_of(graph, out))


def product_fields(left: Shape, right: Shape, result: Shape, dtype: str) -> Fields:
    """``linear`` when the right side is a matrix, ``bmm`` when both sides have leading axes."""
    m = left[-2] if len(left) > 1 else 1  # a vector counts as a matrix of one row or column
    n = right[-1] if len(right) > 1 else 1
    if len(right) <= 2:
        return {"operator": "linear", "dtype": dtype, "m": math.prod(left[:-1]), "n": n, "k": left[-1]}
    batch = math.prod(result[:-2] if len(left) > 1 else result[:-1])
    return {"operator": "bmm", "dtype": dtype, "batch": batch, "m": m, "n": n, "k": left[-1]}


def _matmul(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    return NodeLaunch(matmul_fields(graph, node.inputs[0], node.inputs[1], node.outputs[0]))


def is_bias(graph: OnnxGraph, value: str, add: OnnxNode) -> bool:
    """Whether an Add adds a vector over the last axis, without widening the other operand."""
    shape, out = shape_of(graph, value), shape_of(graph, add.outputs[0])
    other = add.inputs[0] if add.inputs[1] == value else add.inputs[1]
    return bool(shape) and math.prod(shape) == shape[-1] == out[-1] and graph.shape(other) == out


def gemm_launch(graph: OnnxGraph, node: OnnxNode, dtype: str = "") -> NodeLaunch:
    """A Gemm as ``linear``; ``dtype`` as in :func:`matmul_fields`."""
    a, b = shape_of(graph, node.inputs[0]), shape_of(graph, node.inputs[1])
    m, k = reversed(a) if node.attrs.get("transA") else a
    n = b[0] if node.attrs.get("transB") else b[1]
    dtype = dtype or dtype_of(graph, node.outputs[0])
    fields: Fields = {"operator": "linear", "dtype": dtype, "m": m, "n": n, "k": k, "bias": False}
    remark = ""
    if node.input(2) and node.attrs.get("beta", 1.0) != 0:
        fields["bias"] = True
        if math.prod(shape_of(graph, node.input(2))) > n:
            remark = "its C is a matrix; counted as a bias vector"
    return NodeLaunch(fields, remark)


def _einsum(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    equation = str(node.attrs.get("equation", "")).replace(" ", "")
    sides, _, out = equation.partition("->")
    terms = sides.split(",")
    if len(terms) != 2 or not out or "." in equation or any(len(set(t)) != len(t) for t in (*terms, out)):
        raise NoRuleError(f"equation {equation!r}")
    size: dict[str, int] = {}
    for term, value in zip(terms, node.inputs, strict=True):
        size.update(zip(term, shape_of(graph, value), strict=True))
    a, b, c = (set(t) for t in (*terms, out))
    if (a | b) - c != (a & b) - c or c - (a | b):  # sums over one side alone are no matrix product
        raise NoRuleError(f"equation {equation!r}")
    extent = {
        name: math.prod(size[label] for label in labels)
        for name, labels in (("batch", a & b & c), ("m", a - b), ("n", b - a), ("k", (a & b) - c))
    }
    dtype = dtype_of(graph, node.outputs[0])
    if a & b & c:
        return NodeLaunch({"operator": "bmm", "dtype": dtype, **extent})
    del extent["batch"]
    return NodeLaunch({"operator": "linear", "dtype": dtype, **extent})


def attention_fields(
    dtype: str, batch: int, q_len: int, k_len: int, heads: int, kv_heads: int, head_dim: int, causal: bool
) -> Fields:
    """Fused attention: decode for one query on a cache, prefill when causal, encoder otherwise."""
    if k_len < q_len:
        raise NoRuleError(f"attention of {q_len} queries over only {k_len} keys")
    past = k_len - q_len
    kind = "decode" if q_len == 1 and past else "prefill" if causal else "encoder"
    sizes = {"batch": batch, "q_len": q_len, "past_len": past}
    return {
        **{"operator": f"attention_{kind}", "dtype": dtype, **sizes},
        **{"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
    }


# -- convolution and pooling ------------------------------------------------------------------


def _window(node: OnnxNode, kernel: list[int], spatial: list[int]) -> tuple[list[int], ...]:
    """Kernel, strides, padding, dilation and pixels beside the image, as (h, w); a 1-D window has height 1.

    Padding is symmetric. Where one side has more, the larger padding counts if the result keeps its size, else the
    difference is pixels of the image.
    """
    rank = len(spatial)
    if rank not in (1, 2):
        raise NoRuleError(f"{rank}-D window")
    strides = [int(v) for v in node.attrs.get("strides", [1] * rank)]
    dilations = [int(v) for v in node.attrs.get("dilations", [1] * rank)]
    pads = [int(v) for v in node.attrs.get("pads", [0] * 2 * rank)]
    auto = node.attrs.get("auto_pad", "NOTSET")
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        sizes = zip(spatial, strides, spans, strict=True)
        total = [max((-(-size // s) - 1) * s + span - size, 0) for size, s, span in sizes]
        pads = [t // 2 for t in total] + [t - t // 2 for t in total]
    elif auto == "VALID":
        pads = [0] * 2 * rank
    if min(pads) < 0:
        raise NoRuleError(f"negative padding {pads}")
    padding, beside = [], []
    for size, s, span, begin, end in zip(spatial, strides, spans, pads[:rank], pads[rank:], strict=True):
        same = (size + 2 * max(begin, end) - span) // s == (size + begin + end - span) // s
        padding.append(max(begin, end) if same else min(begin, end))
        beside.append(0 if same else abs(begin - end))
    fill = [[1], [1], [0], [1], [0]] if rank == 1 else [[]] * 5
    return tuple(f + list(v) for f, v in zip(fill, (kernel, strides, padding, dilations, beside), strict=True))


def _nchw(shape: Shape) -> tuple[int, int, int, int]:
    """(n, c, h, w); fewer spatial axes count as height 1, more are merged into the height."""
    n, c, *rest = shape if len(shape) > 1 else (shape[0], 1)
    return n, c, math.prod(rest[:-1]), rest[-1] if rest else 1


def conv_launch(graph: OnnxGraph, node: OnnxNode, dtype: str = "") -> NodeLaunch:
    """A Conv as ``conv2d``; ``dtype`` as in :func:`matmul_fields`."""
    inputs = (node.inputs[0], node.inputs[1], node.input(2))
    return _conv(graph, node, inputs, dtype or dtype_of(graph, node.outputs[0]))


def _conv_int8(graph: OnnxGraph, node: OnnxNode) -> NodeLaunch:
    """ConvInteger, and QLinearConv with its scales among the inputs."""
    if node.op == "ConvInteger":
        return _conv(graph, node, (node.inputs[0], node.inputs[1], ""), "int8")
    return _conv(graph, node, (node.inputs[0], node.inputs[3], node.input(8)), "int8")


def _conv(graph: OnnxGraph, node: OnnxNode, inputs: tuple[str, str, str], dtype: str) -> NodeLaunch:
    fields, _ = _conv_fields(node, shape_of(graph, inputs[0]), shape_of(graph, inputs[1]))
    return NodeLaunch({**fields, "dtype": dtype, "direction": "fwd", "bias": bool(inputs[2])})


def _conv_fields(node: OnnxNode, image: Shape, weight: Shape) -> tuple[Fields, tuple[int, ...]]:
    """Sizes of a forward convolution of ``image``, and the height and width of its result."""
    kernel, strides, pads, dilations, beside = _window(node, list(weight[2:]), list(image[2:]))
    n, c_in, h, w = _nchw(image)
    h, w = h + beside[0], w + beside[1]
    fields = {
        **{"operator": "conv2d", "n": n, "c_in": c_in, "h": h, "w": w, "c_out": weight[0]},
        **_by_axis("k", kernel),
        **_by_axis("stride_", strides),
        **_by_axis("pad_", pads),
        **_by_axis("dil_", dilations),
        "groups": int(node.attrs.get("group", 1)),
    }
    sizes = zip((h, w), pads, kernel, dilations, strides, strict=True)
    return fields, tuple((size + 2 * p - (k - 1) * d - 1) // s + 1 for size, p, k, d, s in sizes)


def conv_shape(node: OnnxNode, image: Shape, weight: Shape) -> Shape:
    """Shape of the result of a forward convolution."""
    _, result = _conv_fields(node, image, weight)
    return (image[0], weight[0], *result[-(len(image) - 2) :])


def _by_axis(name: str, values: list[int]) -> Fields:
    """Fields of a height and a width, such as ``kh`` and ``kw``."""
    return {f"{name}{axis}": value for axis, value in zip("hw", values, strict=True)}


def _conv_transpose(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """The gradient of a convolution with respect to its input; a bias is added by a second kernel."""
    if "output_shape" in node.attrs:
        raise NoRuleError("a transposed convolution with output_shape")
    fields, result = _conv_fields(node, shape_of(graph, node.outputs[0]), shape_of(graph, node.inputs[1]))
    if result != _nchw(shape_of(graph, node.inputs[0]))[2:]:
        raise NoRuleError("output padding beyond the stride")
    fields |= {"dtype": dtype_of(graph, node.outputs[0]), "direction": "bwd_data"}
    bias = (("bias", over(graph, "add", node.outputs[0])),) if node.input(2) else ()
    return NodeLaunch(fields, then=bias)


def _pool(operator: str) -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    def rule(graph: OnnxGraph, node: OnnxNode) -> Outcome:
        x, out = shape_of(graph, node.inputs[0]), shape_of(graph, node.outputs[0])
        window = [int(v) for v in node.attrs["kernel_shape"]]
        kernel, strides, pads, dilations, beside = _window(node, window, list(x[2:]))
        if dilations != [1, 1]:
            raise NoRuleError(f"dilated window {dilations}")
        n, c, h, w = _nchw(x)
        h, w = h + beside[0], w + beside[1]
        floor = [(size + 2 * p - k) // s + 1 for size, p, k, s in zip((h, w), pads, kernel, strides, strict=True)]
        if tuple(floor) != _nchw(out)[2:]:
            raise NoRuleError("output size rounded up (ceil_mode)")
        sizes = {"operator": operator, "dtype": dtype_of(graph, node.outputs[0]), "n": n, "c": c, "h": h, "w": w}
        windows = {**_by_axis("k", kernel), **_by_axis("stride_", strides), **_by_axis("pad_", pads)}
        return NodeLaunch({**sizes, **windows})

    return rule


def _global_average(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    shape = shape_of(graph, node.inputs[0])
    dtype = dtype_of(graph, node.outputs[0])
    rows = math.prod(shape[:2])
    return NodeLaunch({"operator": "reduce_mean", "dtype": dtype, "rows": rows, "cols": math.prod(shape[2:])})


def _global_max(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    n, c, h, w = _nchw(shape_of(graph, node.inputs[0]))
    fields = {"operator": "max_pool2d", "n": n, "c": c, "h": h, "w": w, "kh": h, "kw": w}
    return NodeLaunch({**fields, "dtype": dtype_of(graph, node.outputs[0])})


def _batch_norm(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    if node.attrs.get("training_mode"):
        raise NoRuleError("training mode")
    n, c, h, w = _nchw(shape_of(graph, node.inputs[0]))
    dtype = dtype_of(graph, node.outputs[0])
    return NodeLaunch({"operator": "batch_norm", "dtype": dtype, "n": n, "c": c, "h": h, "w": w})


PRODUCT_RULES: dict[str, Callable[[OnnxGraph, OnnxNode], Outcome]] = {
    "MatMul": _matmul,
    "Gemm": gemm_launch,
    "Einsum": _einsum,
    "Conv": conv_launch,
    "ConvInteger": _conv_int8,
    "QLinearConv": _conv_int8,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool("max_pool2d"),
    "AveragePool": _pool("avg_pool2d"),
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "BatchNormalization": _batch_norm,
}
