"""Norms, rotary embeddings, activations, softmax and cross entropy as eager modules of networks write them.

Each is a chain of PyTorch calls. Run as it is, it is the implementation "composed"; through ``torch.compile`` it is
"compiled". An operator is the dictionary of its fields, as in ``library_calls``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as nn

from .call_problems import FLOAT8_MULTIPLE, Fields
from .library_calls import CallError, Spec, Tensors

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


_MAKERS: Mapping[str, Callable[[Spec, Tensors], Composed]] = {
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
_FLOATS = ("float32", "float16", "bfloat16")


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
    if operator not in _MAKERS:
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
    return _MAKERS[fields["operator"]](Spec(**fields), tensors)
