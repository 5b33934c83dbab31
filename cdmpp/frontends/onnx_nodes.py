"""Single ONNX nodes as operator specifications: one rule per operator type.

A rule returns the fields of a specification, or says that the node is free, or raises
:class:`Unsupported` with the reason. What several nodes make together is in ``onnx_patterns``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.frontends.onnx_fold import Array
from cdmpp.frontends.onnx_graph import OnnxGraph, OnnxNode

Shape = tuple[int, ...]
Fields = dict[str, Any]

DTYPES = ("float32", "float16", "bfloat16", "int8")


class Unsupported(Exception):  # noqa: N818 - an outcome, not an error
    """The node has no operator specification; the message says why."""


@dataclass(frozen=True)
class Free:
    """The node launches nothing: it only renames or reinterprets memory."""

    reason: str


@dataclass(frozen=True)
class Launch:
    """The node launches ``fields``, then whatever is in ``then`` (each with a suffix for its id)."""

    fields: Fields
    remark: str = ""
    then: tuple[tuple[str, Fields], ...] = field(default=())


Outcome = Launch | Free


def map_node(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """What a framework launches for one node.

    Raises
    ------
    Unsupported
        There is no specification for it.
    """
    if node.domain:
        raise Unsupported(f"operator of the domain {node.domain!r}")
    if node.op in _FREE:
        return Free(_FREE[node.op])
    rule = _RULES.get(node.op)
    if rule is None:
        raise Unsupported("no operator specification for it")
    for value in (*node.inputs, *node.outputs[:1]):
        if not value:
            continue
        shape = graph.shape(value)
        if shape is None:
            raise Unsupported(f"the shape of {value!r} is not static")
        if value == node.outputs[0] and 0 in shape:
            return Free("free: its output is empty")
    return rule(graph, node)


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
        raise Unsupported(f"the shape of {value!r} is not static" if value else "an input is left out")
    return shape


def dtype_of(graph: OnnxGraph, value: str) -> str:
    """Element type of a value, if programs may have it."""
    dtype = graph.dtype(value)
    if dtype not in DTYPES:
        raise Unsupported(f"element type {dtype}")
    return dtype


def rows_cols(shape: Shape) -> Fields:
    """A tensor as rows of its last axis."""
    return {"rows": math.prod(shape[:-1]), "cols": shape[-1] if shape else 1}


def over(graph: OnnxGraph, operator: str, value: str, **more: Any) -> Fields:
    """Fields of an operator on all elements of ``value``."""
    return {
        "operator": operator, "dtype": dtype_of(graph, value), **rows_cols(shape_of(graph, value)), **more
    }  # fmt: skip


def constant_ints(graph: OnnxGraph, node: OnnxNode, index: int, attribute: str) -> list[int] | None:
    """Integers given as an attribute (old operator sets) or as a constant input (newer ones)."""
    if attribute in node.attrs:
        return [int(v) for v in node.attrs[attribute]]
    name = node.input(index)
    if not name:
        return None
    value: Array | None = graph.value(name)
    if value is None:
        raise Unsupported(f"{attribute} is not constant")
    return [int(v) for v in value.reshape(-1)]


# -- matrix products --------------------------------------------------------------------------


def matmul_fields(graph: OnnxGraph, a: str, b: str, out: str) -> Fields:
    """``linear`` when the right side is a matrix, ``bmm`` when both sides have leading axes."""
    left, right = shape_of(graph, a), shape_of(graph, b)
    dtype = dtype_of(graph, out)
    m = left[-2] if len(left) > 1 else 1  # a vector counts as a matrix of one row or column
    n = right[-1] if len(right) > 1 else 1
    if len(right) <= 2:
        return {"operator": "linear", "dtype": dtype, "m": math.prod(left[:-1]), "n": n, "k": left[-1]}
    result = shape_of(graph, out)
    batch = math.prod(result[:-2] if len(left) > 1 else result[:-1])
    return {"operator": "bmm", "dtype": dtype, "batch": batch, "m": m, "n": n, "k": left[-1]}


def _matmul(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    return Launch(matmul_fields(graph, node.inputs[0], node.inputs[1], node.outputs[0]))


def _gemm(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    a, b = shape_of(graph, node.inputs[0]), shape_of(graph, node.inputs[1])
    m, k = reversed(a) if node.attrs.get("transA") else a
    n = b[0] if node.attrs.get("transB") else b[1]
    fields = {
        "operator": "linear", "dtype": dtype_of(graph, node.outputs[0]), "m": m, "n": n, "k": k,
        "bias": False,
    }  # fmt: skip
    remark = ""
    if node.input(2) and node.attrs.get("beta", 1.0) != 0:
        fields["bias"] = True
        if math.prod(shape_of(graph, node.input(2))) > n:
            remark = "its C is a matrix; counted as a bias vector"
    return Launch(fields, remark)


def _einsum(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    equation = str(node.attrs.get("equation", "")).replace(" ", "")
    sides, _, out = equation.partition("->")
    terms = sides.split(",")
    if len(terms) != 2 or not out or "." in equation or any(len(set(t)) != len(t) for t in (*terms, out)):
        raise Unsupported(f"equation {equation!r}")
    size: dict[str, int] = {}
    for term, value in zip(terms, node.inputs, strict=True):
        size.update(zip(term, shape_of(graph, value), strict=True))
    a, b, c = (set(t) for t in (*terms, out))
    if (a | b) - c != (a & b) - c or c - (a | b):  # sums over one side alone are no matrix product
        raise Unsupported(f"equation {equation!r}")
    extent = {
        name: math.prod(size[label] for label in labels)
        for name, labels in (("batch", a & b & c), ("m", a - b), ("n", b - a), ("k", (a & b) - c))
    }
    dtype = dtype_of(graph, node.outputs[0])
    if a & b & c:
        return Launch({"operator": "bmm", "dtype": dtype, **extent})
    del extent["batch"]
    return Launch({"operator": "linear", "dtype": dtype, **extent})


# -- convolution and pooling ------------------------------------------------------------------


def _window(node: OnnxNode, kernel: list[int], spatial: list[int]) -> tuple[list[int], ...]:
    """Kernel, strides, symmetric padding and dilation as (h, w); a 1-D window has height 1."""
    rank = len(spatial)
    if rank not in (1, 2):
        raise Unsupported(f"{rank}-D window")
    strides = [int(v) for v in node.attrs.get("strides", [1] * rank)]
    dilations = [int(v) for v in node.attrs.get("dilations", [1] * rank)]
    pads = [int(v) for v in node.attrs.get("pads", [0] * 2 * rank)]
    auto = node.attrs.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        total = [
            max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            for size, s, k, d in zip(spatial, strides, kernel, dilations, strict=True)
        ]
        pads = [t // 2 for t in total] + [t - t // 2 for t in total]
    elif auto == "VALID":
        pads = [0] * 2 * rank
    if pads[:rank] != pads[rank:]:
        raise Unsupported(f"asymmetric padding {pads}")
    if min(pads) < 0:
        raise Unsupported(f"negative padding {pads}")
    widened = [([1] if rank == 1 else []) + list(v) for v in (kernel, strides)]
    return (*widened, ([0] if rank == 1 else []) + pads[:rank], ([1] if rank == 1 else []) + dilations)


def _nchw(shape: Shape) -> tuple[int, int, int, int]:
    """(n, c, h, w); fewer spatial axes count as height 1, more are merged into the height."""
    n, c, *rest = shape if len(shape) > 1 else (shape[0], 1)
    return n, c, math.prod(rest[:-1]), rest[-1] if rest else 1


def _conv(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    x, weight = shape_of(graph, node.inputs[0]), shape_of(graph, node.inputs[1])
    kernel, strides, pads, dilations = _window(node, list(weight[2:]), list(x[2:]))
    n, c_in, h, w = _nchw(x)
    return Launch(
        {
            "operator": "conv2d", "dtype": dtype_of(graph, node.outputs[0]), "direction": "fwd", "n": n,
            "c_in": c_in, "h": h, "w": w, "c_out": weight[0], "kh": kernel[0], "kw": kernel[1],
            "stride_h": strides[0], "stride_w": strides[1], "pad_h": pads[0], "pad_w": pads[1],
            "dil_h": dilations[0], "dil_w": dilations[1], "groups": int(node.attrs.get("group", 1)),
            "bias": bool(node.input(2)),
        }
    )  # fmt: skip


def _conv_transpose(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    """The gradient of a convolution with respect to its input; a bias is added by a second kernel."""
    if "output_shape" in node.attrs or node.attrs.get("auto_pad", "NOTSET") != "NOTSET":
        raise Unsupported("automatic padding of a transposed convolution")
    x, weight = shape_of(graph, node.inputs[0]), shape_of(graph, node.inputs[1])
    out = shape_of(graph, node.outputs[0])
    kernel, strides, pads, dilations = _window(node, list(weight[2:]), list(out[2:]))
    n, c_in, h, w = _nchw(out)
    forward = [
        (size + 2 * p - (k - 1) * d - 1) // s + 1
        for size, p, k, d, s in zip((h, w), pads, kernel, dilations, strides, strict=True)
    ]
    if tuple(forward) != _nchw(x)[2:]:
        raise Unsupported("output padding beyond the stride")
    dtype = dtype_of(graph, node.outputs[0])
    fields = {
        "operator": "conv2d", "dtype": dtype, "direction": "bwd_data", "n": n, "c_in": c_in, "h": h, "w": w,
        "c_out": weight[0], "kh": kernel[0], "kw": kernel[1], "stride_h": strides[0],
        "stride_w": strides[1], "pad_h": pads[0], "pad_w": pads[1], "dil_h": dilations[0],
        "dil_w": dilations[1], "groups": int(node.attrs.get("group", 1)),
    }  # fmt: skip
    bias = (("bias", over(graph, "add", node.outputs[0])),) if node.input(2) else ()
    return Launch(fields, then=bias)


def _pool(operator: str) -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    def rule(graph: OnnxGraph, node: OnnxNode) -> Outcome:
        x, out = shape_of(graph, node.inputs[0]), shape_of(graph, node.outputs[0])
        window = [int(v) for v in node.attrs["kernel_shape"]]
        kernel, strides, pads, dilations = _window(node, window, list(x[2:]))
        if dilations != [1, 1]:
            raise Unsupported(f"dilated window {dilations}")
        n, c, h, w = _nchw(x)
        floor = [
            (size + 2 * p - k) // s + 1 for size, p, k, s in zip((h, w), pads, kernel, strides, strict=True)
        ]
        if tuple(floor) != _nchw(out)[2:]:
            raise Unsupported("output size rounded up (ceil_mode)")
        return Launch(
            {
                "operator": operator, "dtype": dtype_of(graph, node.outputs[0]), "n": n, "c": c, "h": h,
                "w": w, "kh": kernel[0], "kw": kernel[1], "stride_h": strides[0], "stride_w": strides[1],
                "pad_h": pads[0], "pad_w": pads[1],
            }
        )  # fmt: skip

    return rule


def _global_average(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    shape = shape_of(graph, node.inputs[0])
    dtype = dtype_of(graph, node.outputs[0])
    rows = math.prod(shape[:2])
    return Launch({"operator": "reduce_mean", "dtype": dtype, "rows": rows, "cols": math.prod(shape[2:])})


def _global_max(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    n, c, h, w = _nchw(shape_of(graph, node.inputs[0]))
    fields = {"operator": "max_pool2d", "n": n, "c": c, "h": h, "w": w, "kh": h, "kw": w}
    return Launch({**fields, "dtype": dtype_of(graph, node.outputs[0])})


def _batch_norm(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    if node.attrs.get("training_mode"):
        raise Unsupported("training mode")
    n, c, h, w = _nchw(shape_of(graph, node.inputs[0]))
    dtype = dtype_of(graph, node.outputs[0])
    return Launch({"operator": "batch_norm", "dtype": dtype, "n": n, "c": c, "h": h, "w": w})


# -- element by element -----------------------------------------------------------------------


def _unary(operator: str, remark: str = "") -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    return lambda graph, node: Launch(over(graph, operator, node.outputs[0]), remark)


def _binary(operator: str, scalar: str) -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    """An operator on two tensors, or on one and a constant of one element."""

    def rule(graph: OnnxGraph, node: OnnxNode) -> Outcome:
        out = node.outputs[0]
        for index, name in enumerate(node.inputs[:2]):
            if graph.is_constant(name) and math.prod(shape_of(graph, name)) == 1:
                turned = index == 0 and operator in ("sub", "div", "pow")
                return Launch(over(graph, scalar, out), "the scalar is on the left" if turned else "")
        return Launch(over(graph, operator, out))

    return rule


def _variadic(operator: str, one: str) -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    """Sum, Max and Min of any number of tensors; with a scalar alone it is a clamp (``one``)."""

    def rule(graph: OnnxGraph, node: OnnxNode) -> Outcome:
        tensors = [
            i for i in node.inputs if not (graph.is_constant(i) and math.prod(shape_of(graph, i)) == 1)
        ]
        out = node.outputs[0]
        if len(tensors) == 1:
            if len(node.inputs) == 1:
                return Free("free: one input alone is passed on")
            return Launch(over(graph, one, out), f"with a scalar: timed as {one}, which moves the same bytes")
        if len(tensors) > 4:
            raise Unsupported(f"{len(tensors)} inputs, at most 4")
        return Launch(over(graph, operator, out, inputs=len(tensors)))

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
    fields = {"operator": "softmax", "dtype": dtype, "rows": math.prod(shape) // cols, "cols": cols}
    return Launch(fields, remark)


def _norm(operator: str) -> Callable[[OnnxGraph, OnnxNode], Outcome]:
    def rule(graph: OnnxGraph, node: OnnxNode) -> Outcome:
        shape = shape_of(graph, node.inputs[0])
        cols = math.prod(shape[int(node.attrs.get("axis", -1)) :])
        dtype = dtype_of(graph, node.outputs[0])
        return Launch({"operator": operator, "dtype": dtype, "rows": math.prod(shape) // cols, "cols": cols})

    return rule


def _reduce_mean(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    shape = shape_of(graph, node.inputs[0])
    axes = constant_ints(graph, node, 1, "axes")
    if not axes:
        if node.attrs.get("noop_with_empty_axes"):
            return Free("free: reduces over no axis")
        axes = list(range(len(shape)))
    cols = math.prod(shape[axis] for axis in {a % len(shape) for a in axes})
    dtype = dtype_of(graph, node.outputs[0])
    return Launch({"operator": "reduce_mean", "dtype": dtype, "rows": math.prod(shape) // cols, "cols": cols})


# -- data movement ----------------------------------------------------------------------------


def _copy(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    data, out = node.inputs[0], node.outputs[0]
    tensors = [i for i in node.inputs if 0 not in shape_of(graph, i)] if node.op == "Concat" else [data]
    same = graph.shape(tensors[0]) == graph.shape(out) if tensors else False
    if same and len(tensors) == 1 and not _reverses(graph, node):
        return Free("free: its output is its input")
    return Launch(over(graph, "copy", out))


def _reverses(graph: OnnxGraph, node: OnnxNode) -> bool:
    steps = graph.value(node.input(4)) if node.op == "Slice" and node.input(4) else None
    return steps is not None and bool((steps < 0).any())


def _split(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    if len(node.outputs) == 1:
        return Free("free: its output is its input")
    return Launch(over(graph, "copy", node.inputs[0]))


def _transpose(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    shape = shape_of(graph, node.inputs[0])
    perm = [int(v) for v in node.attrs.get("perm", range(len(shape))[::-1])]
    moved = [axis for axis in perm if shape[axis] != 1]
    if moved == sorted(moved):
        return Free("free: only axes of extent 1 move")
    turned = moved[-1] != max(moved)  # the axis that is contiguous in memory is not the last any more
    return Launch(over(graph, "copy", node.inputs[0], transposed=turned))


def _cast(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    source, target = graph.dtype(node.inputs[0]), graph.dtype(node.outputs[0])
    if source == target:
        return Free("free: same element type")
    return Launch(over(graph, "copy", node.outputs[0]), f"conversion {source} to {target}, timed as a copy")


def _gather(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    data, indices = shape_of(graph, node.inputs[0]), shape_of(graph, node.inputs[1])
    axis = int(node.attrs.get("axis", 0)) % max(len(data), 1)
    if graph.is_constant(node.inputs[1]) and math.prod(indices) == 1:
        return Launch(over(graph, "copy", node.outputs[0]), "selects one slice")
    outer = math.prod(data[:axis])
    return Launch(
        {
            "operator": "embedding", "dtype": dtype_of(graph, node.outputs[0]),
            "rows": outer * math.prod(indices), "cols": math.prod(data[axis + 1 :]),
            "table_rows": outer * data[axis],
        }
    )  # fmt: skip


def _dropout(graph: OnnxGraph, node: OnnxNode) -> Outcome:
    training = node.input(2)
    if training and graph.scalar(training) != 0.0:
        raise Unsupported("dropout in training mode")
    return Free("free: does nothing at inference")


def attention_fields(
    dtype: str, batch: int, q_len: int, k_len: int, heads: int, kv_heads: int, head_dim: int, causal: bool
) -> Fields:
    """Fused attention: decode for one query on a cache, prefill when causal, encoder otherwise."""
    if k_len < q_len:
        raise Unsupported(f"attention of {q_len} queries over only {k_len} keys")
    past = k_len - q_len
    kind = "decode" if q_len == 1 and past else "prefill" if causal else "encoder"
    return {
        "operator": f"attention_{kind}", "dtype": dtype, "batch": batch, "q_len": q_len, "past_len": past,
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip


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
        raise Unsupported(f"values of {v_dim} elements per head beside keys of {dim}")
    if node.input(4):
        k_len += shape_of(graph, node.input(4))[2]
    dtype, causal = dtype_of(graph, node.outputs[0]), bool(node.attrs.get("is_causal"))
    return Launch(attention_fields(dtype, batch, q_len, k_len, heads, kv_heads, dim, causal))


_FREE = {
    "Constant": "constant: part of the model",
    "Reshape": "free: the same memory in another shape",
    "Flatten": "free: the same memory in another shape",
    "Squeeze": "free: the same memory in another shape",
    "Unsqueeze": "free: the same memory in another shape",
    "Identity": "free: the same memory",
    "Shape": "free: sizes are known beforehand",
    "Size": "free: sizes are known beforehand",
}

_RULES: dict[str, Callable[[OnnxGraph, OnnxNode], Outcome]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool("max_pool2d"),
    "AveragePool": _pool("avg_pool2d"),
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "BatchNormalization": _batch_norm,
    "Relu": _unary("relu"),
    "Gelu": _unary("gelu"),
    "Tanh": _unary("tanh"),
    "Sigmoid": _unary("sigmoid"),
    "Swish": _unary("silu"),
    "Exp": _unary("exp"),
    "Sqrt": _unary("sqrt"),
    "Erf": _unary("erf"),
    "Abs": _unary("abs"),
    "Neg": _unary("neg"),
    "Log": _unary("log"),
    "Clip": _unary("relu", "clamp timed as relu, which moves the same bytes"),
    "LeakyRelu": _unary("relu", "timed as relu, which moves the same bytes"),
    "Reciprocal": _unary("div_scalar", "the scalar is on the left"),
    "Add": _binary("add", "add_scalar"),
    "Sub": _binary("sub", "add_scalar"),
    "Mul": _binary("mul", "mul_scalar"),
    "Div": _binary("div", "div_scalar"),
    "Pow": _binary("pow", "pow_scalar"),
    "Sum": _variadic("add", "add_scalar"),
    "Max": _variadic("maximum", "relu"),
    "Min": _variadic("minimum", "relu"),
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "LayerNormalization": _norm("layernorm"),
    "RMSNormalization": _norm("rmsnorm"),
    "ReduceMean": _reduce_mean,
    "Concat": _copy,
    "Slice": _copy,
    "Expand": _copy,
    "Tile": _copy,
    "Pad": _copy,
    "Split": _split,
    "Transpose": _transpose,
    "Cast": _cast,
    "Gather": _gather,
    "Dropout": _dropout,
    "Attention": _attention,
}
