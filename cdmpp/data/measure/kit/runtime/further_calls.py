"""Operators as networks write them, and operators that cdmpp has no specification for yet, as PyTorch calls.

A composed operator is a chain of PyTorch calls: norms, rotary embeddings, activations, softmax and cross entropy as
eager modules of networks have them. Run as it is, it is the implementation "composed"; through ``torch.compile`` it is
"compiled". Operators without a specification are the implementation "extra". ``FIELDS`` lists their fields; all are
integers but ``dtype``, and ``of`` of ``backward``: the fields of the operator whose backward pass is meant. An operator
is the dictionary of its fields, as in ``library_calls``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as nn

from .call_problems import FLOAT8_MULTIPLE, Fields, call_problem
from .library_calls import Call, CallError, Spec, Tensors, make_call

_FLOATS = ("float32", "float16", "bfloat16")
#: A function of tensors, and its arguments.
Composed = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]
#: Largest value of float8_e4m3.
_FLOAT8_MAX = 448.0
_EPSILON = 1e-6


def rms_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Root mean square norm in float32, as language models write it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPSILON)
    return scale * wide.to(x.dtype)


def layer_norm(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Layer norm in float32."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + _EPSILON)
    return scale * normal.to(x.dtype) + offset


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax in float32, with the result in the type of the input."""
    return torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The tanh approximation of GELU, written out as in GPT-2."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``."""
    return x * torch.sigmoid(x)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """The gated activation of language models on two halves of one tensor."""
    gate, up = x.chunk(2, -1)
    return nn.silu(gate) * up


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (tokens, heads, head size), as language models write it."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of float32 logits."""
    return nn.cross_entropy(logits.float(), target)


def quantised_linear(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Float8 product whose rows of activations are quantised first."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(_EPSILON) / _FLOAT8_MAX
    narrow = (x / scale).to(torch.float8_e4m3fn)
    return torch._scaled_mm(narrow, weight, scale, weight_scale, out_dtype=torch.bfloat16)


def _rows(spec: Spec, tensors: Tensors) -> torch.Tensor:
    return tensors.floats((spec.rows, spec.cols), spec.dtype)


def _rotary(spec: Spec, tensors: Tensors) -> Composed:
    heads = spec.cols // spec.head_dim
    x = tensors.floats((spec.rows, heads, spec.head_dim), spec.dtype)
    cos, sin = (tensors.floats((spec.rows, 1, spec.head_dim), spec.dtype) for _ in range(2))
    return rotary, (x, cos, sin)


def _quantised_linear(spec: Spec, tensors: Tensors) -> Composed:
    x = tensors.floats((spec.m, spec.k), "bfloat16")
    weight = tensors.floats((spec.n, spec.k), "float8_e4m3").t()
    return quantised_linear, (x, weight, torch.ones((1, spec.n), dtype=torch.float32, device=tensors.device))


_COMPOSED: Mapping[str, Callable[[Spec, Tensors], Composed]] = {
    "rmsnorm": lambda spec, tensors: (rms_norm, (_rows(spec, tensors), tensors.floats((spec.cols,), spec.dtype))),
    "layernorm": lambda spec, tensors: (
        layer_norm,
        (_rows(spec, tensors), *(tensors.floats((spec.cols,), spec.dtype) for _ in range(2))),
    ),
    "softmax": lambda spec, tensors: (softmax, (_rows(spec, tensors),)),
    "gelu": lambda spec, tensors: (gelu, (_rows(spec, tensors),)),
    "silu": lambda spec, tensors: (silu, (_rows(spec, tensors),)),
    "silu_and_mul": lambda spec, tensors: (silu_and_mul, (tensors.floats((spec.rows, 2 * spec.cols), spec.dtype),)),
    "rotary_embedding": _rotary,
    "cross_entropy": lambda spec, tensors: (
        cross_entropy,
        (_rows(spec, tensors), tensors.indices(spec.rows, spec.cols)),
    ),
    "linear": _quantised_linear,
}


def composed_problem(fields: Fields) -> str:
    """Return why an operator has no composed form, "" if it has one."""
    operator, dtype = fields["operator"], fields["dtype"]
    if operator == "linear":
        expected = {"dtype": "float8_e4m3", "scaling": "channel", "weight_dtype": None, "bias": False}
        if any(fields.get(name) != value for name, value in expected.items()):
            return "only float8 products with scales per channel have a composed form"
        if fields["n"] % FLOAT8_MULTIPLE or fields["k"] % FLOAT8_MULTIPLE:
            return f"PyTorch multiplies float8 with n and k in multiples of {FLOAT8_MULTIPLE} only"
        return ""
    if operator not in _COMPOSED:
        return f"{operator} has no composed form"
    return "" if dtype in _FLOATS else f"{operator} has no composed form in {dtype}"


def make_composed(fields: Fields, tensors: Tensors) -> Composed:
    """Allocate an operator's inputs; return its composed form as a function and its arguments.

    Raises
    ------
    CallError
        The operator has no composed form.
    """
    if problem := composed_problem(fields):
        raise CallError(problem)
    return _COMPOSED[fields["operator"]](Spec(**fields), tensors)


_RECURRENT = ("batch", "steps", "input", "hidden", "layers", "bidirectional")
_REDUCTION = ("rows", "cols", "axis")
#: Fields of each operator besides ``operator`` and ``dtype``.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "conv1d": ("n", "c_in", "length", "c_out", "kernel", "stride", "pad", "groups"),
    "conv3d": ("n", "c_in", "depth", "h", "w", "c_out", "kernel", "stride", "pad", "groups"),
    "conv_transpose2d": ("n", "c_in", "h", "w", "c_out", "kernel", "stride", "pad", "groups"),
    "avg_pool3d": ("n", "c", "depth", "h", "w", "kernel", "stride"),
    "max_pool3d": ("n", "c", "depth", "h", "w", "kernel", "stride"),
    "group_norm": ("n", "c", "h", "w", "groups"),
    "batch_norm_training": ("n", "c", "h", "w"),
    "lstm": _RECURRENT,
    "gru": _RECURRENT,
    "rnn": _RECURRENT,
    "cross_entropy": ("rows", "cols"),
    "log_softmax": ("rows", "cols"),
    "cumsum": _REDUCTION,
    "reduce_sum": _REDUCTION,
    "reduce_max": _REDUCTION,
    "reduce_var": _REDUCTION,
    "backward": ("of",),
}
_CONVOLUTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "conv1d": nn.conv1d,
    "conv3d": nn.conv3d,
    "conv_transpose2d": nn.conv_transpose2d,
}
_POOLS: Mapping[str, Callable[..., torch.Tensor]] = {"avg_pool3d": nn.avg_pool3d, "max_pool3d": nn.max_pool3d}
_MODULES = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}
_REDUCTIONS: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "cumsum": torch.cumsum,
    "reduce_sum": torch.sum,
    "reduce_max": torch.amax,
    "reduce_var": torch.var,
}
_SPATIAL = ("length", "depth", "h", "w")


def extra_problem(fields: Fields) -> str:
    """Return why an operator cannot be run, "" if it can."""
    operator = fields["operator"]
    if operator not in FIELDS:
        return f"the operator {operator} is unknown"
    if operator == "backward":
        forward = fields["of"]
        problem = extra_problem(forward) if forward["operator"] in FIELDS else call_problem(forward)
        return problem or ("" if forward["dtype"] in _FLOATS else f"no gradients in {forward['dtype']}")
    missing = [name for name in ("dtype", *FIELDS[operator]) if name not in fields]
    if missing:
        return f"{operator} lacks the fields {', '.join(missing)}"
    return "" if fields["dtype"] in _FLOATS else f"{operator} is not measured with {fields['dtype']}"


def make_extra(fields: Fields, tensors: Tensors) -> Call:
    """Allocate an operator's inputs and return its call.

    The call of ``backward`` is the backward pass alone. ``tensors`` must make gradients then.

    Raises
    ------
    CallError
        The operator is unknown, or lacks a field.
    """
    if problem := extra_problem(fields):
        raise CallError(problem)
    if fields["operator"] == "backward":
        return _backward(fields["of"], tensors)
    return _EXTRA[fields["operator"]](Spec(**fields), tensors)


def _backward(forward: Fields, tensors: Tensors) -> Call:
    call = make_extra(forward, tensors) if forward["operator"] in FIELDS else make_call(forward, tensors)
    result = call()
    output = result[0] if isinstance(result, tuple) else result
    leaves, gradient = tuple(tensors.leaves), torch.ones_like(output)
    return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)


def _spatial(spec: Spec) -> tuple[int, ...]:
    return tuple(getattr(spec, name) for name in _SPATIAL if hasattr(spec, name))


def _convolution(spec: Spec, tensors: Tensors) -> Call:
    space, run = _spatial(spec), _CONVOLUTIONS[spec.operator]
    x = tensors.floats((spec.n, spec.c_in, *space), spec.dtype)
    window = (spec.kernel,) * len(space)
    if spec.operator == "conv_transpose2d":
        w = tensors.floats((spec.c_in, spec.c_out // spec.groups, *window), spec.dtype)
        return lambda: run(x, w, None, spec.stride, spec.pad, groups=spec.groups)
    w = tensors.floats((spec.c_out, spec.c_in // spec.groups, *window), spec.dtype)
    return lambda: run(x, w, None, spec.stride, spec.pad, groups=spec.groups)


def _pool(spec: Spec, tensors: Tensors) -> Call:
    x, run = tensors.floats((spec.n, spec.c, *_spatial(spec)), spec.dtype), _POOLS[spec.operator]
    return lambda: run(x, spec.kernel, spec.stride)


def _channels(spec: Spec, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """An image, and a scale and an offset per channel."""
    x = tensors.floats((spec.n, spec.c, spec.h, spec.w), spec.dtype)
    return x, tensors.floats((spec.c,), spec.dtype), tensors.floats((spec.c,), spec.dtype)


def _group_norm(spec: Spec, tensors: Tensors) -> Call:
    x, scale, offset = _channels(spec, tensors)
    return lambda: nn.group_norm(x, spec.groups, scale, offset)


def _batch_norm_training(spec: Spec, tensors: Tensors) -> Call:
    x, scale, offset = _channels(spec, tensors)
    mean = torch.zeros(spec.c, dtype=x.dtype, device=tensors.device)
    variance = torch.ones(spec.c, dtype=x.dtype, device=tensors.device)
    return lambda: nn.batch_norm(x, mean, variance, scale, offset, training=True)


def _recurrent(spec: Spec, tensors: Tensors) -> Call:
    x = tensors.floats((spec.steps, spec.batch, spec.input), spec.dtype)
    module = _MODULES[spec.operator](
        spec.input,
        spec.hidden,
        spec.layers,
        bidirectional=bool(spec.bidirectional),
        device=tensors.device,
        dtype=x.dtype,
    )
    module.train(tensors.gradients).requires_grad_(tensors.gradients)
    if tensors.gradients:
        tensors.leaves.extend(module.parameters())
    return lambda: module(x)


def _cross_entropy(spec: Spec, tensors: Tensors) -> Call:
    x, target = tensors.floats((spec.rows, spec.cols), spec.dtype), tensors.indices(spec.rows, spec.cols)
    return lambda: nn.cross_entropy(x, target)


def _log_softmax(spec: Spec, tensors: Tensors) -> Call:
    x = tensors.floats((spec.rows, spec.cols), spec.dtype)
    return lambda: torch.log_softmax(x, -1)


def _reduction(spec: Spec, tensors: Tensors) -> Call:
    x, run = tensors.floats((spec.rows, spec.cols), spec.dtype), _REDUCTIONS[spec.operator]
    return lambda: run(x, spec.axis)


_EXTRA: Mapping[str, Callable[[Spec, Tensors], Call]] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_POOLS, _pool),
    "group_norm": _group_norm,
    "batch_norm_training": _batch_norm_training,
    **dict.fromkeys(_MODULES, _recurrent),
    "cross_entropy": _cross_entropy,
    "log_softmax": _log_softmax,
    **dict.fromkeys(_REDUCTIONS, _reduction),
}
