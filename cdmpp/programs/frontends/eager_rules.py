"""Rules that map ATen calls to the operators that an eager framework launches on a GPU.

Where a call is an operator of :mod:`cdmpp.programs.operators`, it becomes that. Everything else that only
streams memory (casts, copies, masks, dropout, reductions, gradients of element-wise functions) becomes a ``relu`` of
float32 that moves the same number of bytes: element-wise kernels differ by their traffic and hardly by their
arithmetic or type, and ``relu`` of float32 is in the training data of cost models. ``remark`` names the substitution.
No torch is imported: any object with a shape and a dtype is a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cdmpp.programs.frontends.graph import NoRuleError
from cdmpp.programs.operators import BASIC_DTYPES, DTYPE_BYTES

Fields = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One dispatched call: the ATen name without its overload, arguments, and what it returned."""

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Any

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """A positional argument, or the keyword argument of that name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    @property
    def tensors(self) -> list[Any]:
        """Tensors among the arguments, those in lists included."""
        found = []
        for value in (*self.args, *self.kwargs.values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                if is_tensor(item):
                    found.append(item)
        return found

    @property
    def results(self) -> list[Any]:
        """Tensors that it returned."""
        values = self.out if isinstance(self.out, list | tuple) else (self.out,)
        return [value for value in values if is_tensor(value)]


@dataclass(frozen=True)
class Outcome:
    """Fields of the operators that a call launches, in order; none for a call that launches nothing."""

    launches: tuple[Fields, ...] = ()
    remark: str = ""


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, of whatever library."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "numel")


def dtype_of(tensor: Any) -> str:
    """Element type by its name: ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


def number_type(tensor: Any) -> str:
    """Element type, if operators may have it.

    Raises
    ------
    NoRuleError
        float64, complex or integer arithmetic.
    """
    name = dtype_of(tensor)
    if name not in BASIC_DTYPES:
        raise NoRuleError(f"element type {name}")
    return name


def size_bytes(tensor: Any) -> int:
    """Bytes of a tensor, read or written once; a broadcast axis is not read again and again."""
    stored = 1
    strides = tensor.stride() if callable(getattr(tensor, "stride", None)) else (1,) * len(tensor.shape)
    for extent, stride in zip(tensor.shape, strides, strict=True):
        stored *= extent if stride or extent == 1 else 1
    return stored * int(tensor.element_size())


def rows_cols(tensor: Any) -> Fields:
    """A tensor as rows of its last axis."""
    shape = tuple(tensor.shape)
    return {"rows": max(math.prod(shape[:-1]), 1), "cols": shape[-1] if shape else 1}


def traffic(moved: float, like: Any) -> Fields:
    """An element-wise pass that reads and writes ``moved`` bytes in all, on rows as long as ``like``'s."""
    elements = max(math.ceil(moved / (2 * DTYPE_BYTES["float32"])), 1)
    cols = min(like.shape[-1] if len(like.shape) else 1, elements)
    return {"operator": "relu", "dtype": "float32", "rows": math.ceil(elements / cols), "cols": cols}


def over(operator: str, tensor: Any, **more: Any) -> Fields:
    """Fields of an operator on all elements of a tensor."""
    return {"operator": operator, "dtype": number_type(tensor), **rows_cols(tensor), **more}


def one(fields: Fields, remark: str = "") -> Outcome:
    """An outcome of one launch."""
    return Outcome((fields,), remark)


# --- element by element -------------------------------------------------------------------------------


def streamed(call: Call) -> Outcome:
    """Every tensor argument read, every result written once."""
    # Written in place, the result is the first argument: it is read and written all the same.
    moved = sum(size_bytes(t) for t in (*call.tensors, *call.results))
    largest = max((*call.results, *call.tensors), key=lambda t: t.numel())
    return one(traffic(moved, largest), f"aten.{call.name} as relu: the same bytes moved")


def unary(operator: str) -> Callable[[Call], Outcome]:
    """A function of each element; in 16 bit by its bytes, since large ones were measured in float32 only."""

    def rule(call: Call) -> Outcome:
        result = call.results[0]
        return one(over(operator, result)) if dtype_of(result) == "float32" else streamed(call)

    return rule


def binary(operator: str) -> Callable[[Call], Outcome]:
    """Two tensors of one size, or one and a scalar; a smaller one that is broadcast costs nothing to read.

    Other types than float32 by their bytes, as :func:`unary`.
    """

    def rule(call: Call) -> Outcome:
        result = call.results[0]
        full = [t for t in call.tensors[:2] if 2 * t.numel() > result.numel()]
        if {dtype_of(t) for t in (result, *full)} != {"float32"}:
            return streamed(call)
        if len(full) == 2:
            return one(over(operator, result))
        if operator in ("add", "mul", "div", "pow"):
            return one(over(f"{operator}_scalar", result))
        return streamed(call)

    return rule


def small_or(rule: Callable[[Call], Outcome]) -> Callable[[Call], Outcome]:
    """Nothing for what is computed on the host: scalars wrapped as tensors without a device of their own."""
    return lambda call: Outcome() if all(not t.shape for t in call.tensors) else rule(call)


# --- rows ---------------------------------------------------------------------------------------------


def softmax(call: Call) -> Outcome:
    x, axis = call.tensors[0], call.arg(1)
    cols = x.shape[axis]
    return one({"operator": "softmax", "dtype": number_type(call.results[0]), "rows": x.numel() // cols, "cols": cols})


def layernorm(operator: str) -> Callable[[Call], Outcome]:
    def rule(call: Call) -> Outcome:
        x, cols = call.tensors[0], math.prod(call.arg(1))
        fields = {"operator": operator, "dtype": number_type(x), "rows": x.numel() // cols, "cols": cols}
        return one(fields)

    return rule


def layernorm_backward(call: Call) -> Outcome:
    """The gradient of the input (reads two tensors, writes one), and one more reading for the weights'."""
    gradient = call.tensors[0]
    data = over("mul", gradient)
    weights = traffic(2 * size_bytes(gradient), gradient)
    return Outcome((data, weights), "two passes by their bytes")


def reduce_to(call: Call) -> Outcome:
    """A sum or mean over some axes."""
    x, result = call.tensors[0], call.results[0]
    return one(traffic(size_bytes(x) + size_bytes(result), x), f"aten.{call.name} as relu: the same bytes moved")


def batch_norm(call: Call) -> Outcome:
    """Evaluation: one pass. Training: the same kernel reads for the statistics first."""
    x = call.tensors[0]
    transform = traffic(2 * size_bytes(x), x)
    training = next((value for value in call.args if isinstance(value, bool)), False)
    if not training or call.name.endswith("no_training"):
        return one(transform, "one pass by its bytes")
    return one(traffic(3 * size_bytes(x), x), "one kernel that reads twice, by its bytes")


def batch_norm_backward(call: Call) -> Outcome:
    """One kernel that reads the input and the gradient twice and writes one tensor."""
    gradient = call.tensors[0]
    return one(traffic(5 * size_bytes(gradient), gradient), "one kernel that reads twice, by its bytes")


# --- products -----------------------------------------------------------------------------------------


def mm(call: Call) -> Outcome:
    a, b = call.tensors[:2]
    b_cols = 1 if len(b.shape) == 1 else b.shape[1]
    if len(a.shape) == 1:
        raise NoRuleError("a product of vectors")
    return one({"operator": "linear", "dtype": number_type(a), "m": a.shape[0], "n": b_cols, "k": a.shape[1]})


def addmm(call: Call) -> Outcome:
    bias, a, b = call.tensors[:3]
    fields = {"operator": "linear", "dtype": number_type(a), "m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}
    if len(bias.shape) <= 1:
        return one({**fields, "bias": True})
    return Outcome((fields, over("add", call.results[0])), "the added matrix is a pass of its own")


def bmm(call: Call) -> Outcome:
    a, b = (t for t in call.tensors if len(t.shape) == 3 and t is not None)
    return one(
        {
            "operator": "bmm",
            "dtype": number_type(a),
            "batch": a.shape[0],
            "m": a.shape[1],
            "n": b.shape[2],
            "k": a.shape[2],
        }
    )


def _conv_fields(
    x: Any, w: Any, stride: Any, pad: Any, dilation: Any, groups: int, direction: str, **more: Any
) -> Fields:
    if len(x.shape) not in (3, 4):
        raise NoRuleError(f"convolution over {len(x.shape) - 2} axes")

    def two(values: Any) -> tuple[int, int]:
        values = tuple(values)
        if len(x.shape) == 3:  # one axis: an image of one row
            return 1, values[0]
        return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])

    flat = len(x.shape) == 3
    pads = tuple(pad)
    pad_h, pad_w = (0, pads[0]) if flat else (pads[0], pads[-1])
    (stride_h, stride_w), (dil_h, dil_w) = two(stride), two(dilation)
    return {
        "operator": "conv2d",
        "direction": direction,
        "dtype": number_type(x),
        "n": x.shape[0],
        "c_in": x.shape[1],
        "h": 1 if flat else x.shape[2],
        "w": x.shape[-1],
        "c_out": w.shape[0],
        "kh": 1 if flat else w.shape[2],
        "kw": w.shape[-1],
        "stride_h": stride_h,
        "stride_w": stride_w,
        "pad_h": pad_h,
        "pad_w": pad_w,
        "dil_h": dil_h,
        "dil_w": dil_w,
        "groups": groups,
        **more,
    }


def convolution(call: Call) -> Outcome:
    x, w, bias, stride, pad, dilation, transposed, _, groups = (call.arg(i) for i in range(9))
    if transposed:  # computed as the gradient of the convolution that goes the other way
        return one(_conv_fields(call.results[0], w, stride, pad, dilation, groups, "bwd_data"))
    return one(_conv_fields(x, w, stride, pad, dilation, groups, "fwd", bias=bias is not None))


def convolution_backward(call: Call) -> Outcome:
    gradient, x, w, _, stride, pad, dilation, transposed, _, groups, wanted = (call.arg(i) for i in range(11))
    launches = []
    if wanted[0]:
        if transposed:
            launches.append(_conv_fields(gradient, w, stride, pad, dilation, groups, "fwd"))
        else:
            launches.append(_conv_fields(x, w, stride, pad, dilation, groups, "bwd_data"))
    if wanted[1]:
        inner = gradient if transposed else x
        launches.append(_conv_fields(inner, w, stride, pad, dilation, groups, "bwd_weight"))
    if wanted[2]:
        launches.append(traffic(size_bytes(gradient), gradient))
    return Outcome(tuple(launches))


# --- the rest -----------------------------------------------------------------------------------------


def embedding(call: Call) -> Outcome:
    table, indices = call.tensors[:2]
    return one(
        {
            "operator": "embedding",
            "dtype": number_type(table),
            "rows": indices.numel(),
            "cols": table.shape[1],
            "table_rows": table.shape[0],
        }
    )


def embedding_backward(call: Call) -> Outcome:
    """A table of zeros is written, then the rows are added to it."""
    gradient, table = call.tensors[0], call.results[0]
    return Outcome((traffic(size_bytes(table), table), over("add", gradient)), "zeros and added rows, by their bytes")


def pool(operator: str) -> Callable[[Call], Outcome]:
    def rule(call: Call) -> Outcome:
        x, window = call.tensors[0], call.arg(1)
        stride, pad = call.arg(2, "stride") or window, call.arg(3, "padding", [0, 0])
        if len(x.shape) != 4:
            raise NoRuleError("pooling over other than two axes")
        (kh, kw), (stride_h, stride_w), (pad_h, pad_w) = ((v[0], v[-1]) for v in (window, stride, pad))
        n, c, h, w = x.shape
        return one(
            {
                "operator": operator,
                "dtype": number_type(x),
                "n": n,
                "c": c,
                "h": h,
                "w": w,
                "kh": kh,
                "kw": kw,
                "stride_h": stride_h,
                "stride_w": stride_w,
                "pad_h": pad_h,
                "pad_w": pad_w,
            }
        )

    return rule


def copied(call: Call) -> Outcome:
    """Copies without arithmetic: a clone, a cast, a concatenation, the copy of a permutation."""
    result = call.results[0]
    sources = call.tensors[1:] if call.name == "copy" else call.tensors
    moved = size_bytes(result) + sum(size_bytes(t) for t in sources)
    return one(traffic(moved, result), f"aten.{call.name} as relu: the same bytes moved")


def written(call: Call) -> Outcome:
    """A tensor that is filled without reading one."""
    result = call.results[0]
    return one(traffic(size_bytes(result), result), f"aten.{call.name} as relu: the same bytes moved")


def gradient_of_view(call: Call) -> Outcome:
    """Zeros of the whole tensor, and the piece copied into them."""
    whole, piece = call.results[0], call.tensors[0]
    return one(
        traffic(size_bytes(whole) + 2 * size_bytes(piece), whole), f"aten.{call.name} as relu: the same bytes moved"
    )


#: Calls that allocate, rename or describe memory.
FREE = frozenset(
    [
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "is_same_size",
        "lift_fresh",
        "narrow",
        "new_empty",
        "new_empty_strided",
        "permute",
        "reshape",
        "select",
        "set_",
        "slice",
        "split",
        "split_with_sizes",
        "chunk",
        "squeeze",
        "sym_numel",
        "sym_size",
        "sym_stride",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "view_as",
        "_reshape_alias",
        "_unsafe_view",
        "unsafe_split",
        "_local_scalar_dense",
        "_conj",
        "resize_",
        "is_pinned",
        "_to_cpu",
    ]
)

_UNARY = ("relu", "gelu", "tanh", "sigmoid", "silu", "exp", "sqrt", "erf", "abs", "neg", "log")
_BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")
_STREAMED = [
    "where",
    "masked_fill",
    "clamp",
    "clamp_min",
    "clamp_max",
    "hardtanh",
    "hardtanh_backward",
    "hardswish",
    "hardswish_backward",
    "hardsigmoid",
    "hardsigmoid_backward",
    "leaky_relu",
    "leaky_relu_backward",
    "elu",
    "rsqrt",
    "reciprocal",
    "sin",
    "cos",
    "square",
    "sign",
    "erfinv",
    "threshold_backward",
    "gelu_backward",
    "tanh_backward",
    "sigmoid_backward",
    "silu_backward",
    "native_dropout",
    "native_dropout_backward",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "bitwise_not",
    "logical_not",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "tril",
    "triu",
    "rsub",
    "addcmul",
    "addcdiv",
    "lerp",
    "nll_loss_forward",
    "nll_loss_backward",
    "max_pool2d_with_indices_backward",
    "avg_pool2d_backward",
    "_adaptive_avg_pool2d_backward",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "gather",
    "index_select",
    "channel_shuffle",
    "roll",
    "flip",
]
_WRITTEN = [
    "zeros",
    "zeros_like",
    "ones",
    "ones_like",
    "full",
    "full_like",
    "fill",
    "zero",
    "new_zeros",
    "new_ones",
    "new_full",
    "arange",
    "bernoulli",
    "randn",
    "rand",
    "randn_like",
    "rand_like",
    "scalar_tensor",
]

#: ATen name, without the overload and without the underscore of in-place forms -> rule.
RULES: dict[str, Callable[[Call], Outcome]] = {
    **{name: unary(name) for name in _UNARY},
    **{name: small_or(binary(name)) for name in _BINARY},
    **dict.fromkeys(_STREAMED, small_or(streamed)),
    **dict.fromkeys(_WRITTEN, written),
    **dict.fromkeys(("clone", "contiguous", "cat", "stack", "copy", "_to_copy", "repeat"), copied),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), softmax),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "_adaptive_avg_pool2d", "var_mean"), reduce_to),
    **dict.fromkeys(("slice_backward", "select_backward", "constant_pad_nd", "pad"), gradient_of_view),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"),
        batch_norm,
    ),
    "native_layer_norm": layernorm("layernorm"),
    "_fused_rms_norm": layernorm("rmsnorm"),
    "native_layer_norm_backward": layernorm_backward,
    "native_batch_norm_backward": batch_norm_backward,
    "mm": mm,
    "mv": mm,
    "addmm": addmm,
    "bmm": bmm,
    "baddbmm": bmm,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "embedding": embedding,
    "embedding_dense_backward": embedding_backward,
    "max_pool2d_with_indices": pool("max_pool2d"),
    "avg_pool2d": pool("avg_pool2d"),
}


def outcome(call: Call) -> Outcome:
    """Operators that a call launches.

    Raises
    ------
    NoRuleError
        No rule exists for the call.
    """
    if call.name in FREE:
        return Outcome()
    name = call.name if call.name in RULES else call.name.removesuffix("_")
    if name in FREE or not call.results or not any(t.numel() for t in call.results):
        return Outcome()
    if name not in RULES:
        raise NoRuleError("no rule for this call")
    return RULES[name](Call(name, call.args, call.kwargs, call.out))
