"""Operators as PyTorch calls on tensors.

One specification is one call and one kernel, with two exceptions of PyTorch: ``silu_and_mul`` and
element-wise operators with three or four inputs are chains of calls, as in an eager framework. Inputs are
random and not zero; indices cover the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as nn

from cdmpp.data.measure.library_support import TORCH_DTYPES, missing_call
from cdmpp.errors import MeasurementError
from cdmpp.programs.operators import (
    Attention,
    BatchMatmul,
    BatchNorm,
    Binary,
    Conv2d,
    Copy,
    Embedding,
    Linear,
    OperatorSpec,
    Pool2d,
    RowWise,
    Scalar,
    SiluAndMul,
    Unary,
)

#: Runs the operator once and returns its result.
Call = Callable[[], Any]
_Shape = tuple[int, ...]

_TORCH: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in TORCH_DTYPES}
_UNARY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": nn.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": nn.silu,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "erf": torch.erf,
    "abs": torch.abs,
    "neg": torch.neg,
    "log": torch.log,
}
_BINARY: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
_SCALAR: Mapping[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "add_scalar": torch.add,
    "mul_scalar": torch.mul,
    "div_scalar": torch.div,
    "pow_scalar": torch.pow,
}
#: Operators with positive inputs: some kernels treat negative ones in another branch.
_POSITIVE = ("sqrt", "log", "pow", "div", "pow_scalar")
_HINT = "choose other programs, or measure it with another tool and enter the latency into the CSV file"


class Tensors:
    """Seeded random tensors on one device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def floats(self, shape: _Shape, dtype: str, *, positive: bool = False) -> torch.Tensor:
        """Uniform in [-1, 1), or in [0.5, 1.5); int8: all values."""
        if dtype == "int8":
            return torch.randint(-128, 128, shape, dtype=torch.int8, device=self.device, generator=self._generator)
        made = torch.empty(shape, dtype=_TORCH[dtype], device=self.device)
        low, high = (0.5, 1.5) if positive else (-1.0, 1.0)
        return made.uniform_(low, high, generator=self._generator)

    def indices(self, count: int, bound: int) -> torch.Tensor:
        """Indices in [0, bound)."""
        return torch.randint(0, bound, (count,), device=self.device, generator=self._generator)


def make_call(spec: OperatorSpec, tensors: Tensors) -> Call:
    """Allocate an operator's inputs and return its call.

    Raises
    ------
    MeasurementError
        PyTorch has no kernel for this operator, type or sizes.
    """
    if missing := missing_call(spec):
        raise MeasurementError(missing, hint=_HINT)
    make = next(make for kind, make in _MAKERS if isinstance(spec, kind))
    return make(spec, tensors)


def _linear(spec: Linear, tensors: Tensors) -> Call:
    x, w = tensors.floats((spec.m, spec.k), spec.dtype), tensors.floats((spec.n, spec.k), spec.dtype)
    if spec.dtype == "int8":
        transposed = w.t()
        return lambda: torch._int_mm(x, transposed)
    bias = tensors.floats((spec.n,), spec.dtype) if spec.bias else None
    return lambda: nn.linear(x, w, bias)


def _bmm(spec: BatchMatmul, tensors: Tensors) -> Call:
    a = tensors.floats((spec.batch, spec.m, spec.k), spec.dtype)
    b = tensors.floats((spec.batch, spec.k, spec.n), spec.dtype)
    return lambda: torch.bmm(a, b)


def _conv2d(spec: Conv2d, tensors: Tensors) -> Call:
    x = tensors.floats((spec.n, spec.c_in, spec.h, spec.w), spec.dtype)
    w = tensors.floats((spec.c_out, spec.c_in // spec.groups, spec.kh, spec.kw), spec.dtype)
    stride, pad = (spec.stride_h, spec.stride_w), (spec.pad_h, spec.pad_w)
    dilation = (spec.dil_h, spec.dil_w)
    if spec.direction == "fwd":
        bias = tensors.floats((spec.c_out,), spec.dtype) if spec.bias else None
        return lambda: nn.conv2d(x, w, bias, stride, pad, dilation, spec.groups)
    gradient = tensors.floats((spec.n, spec.c_out, *spec.output_hw()), spec.dtype)
    wanted = [spec.direction == "bwd_data", spec.direction == "bwd_weight", False]
    backward = torch.ops.aten.convolution_backward
    return lambda: backward(gradient, x, w, None, stride, pad, dilation, False, (0, 0), spec.groups, wanted)


def _unary(spec: Unary, tensors: Tensors) -> Call:
    x = tensors.floats((spec.rows, spec.cols), spec.dtype, positive=spec.operator in _POSITIVE)
    run = _UNARY[spec.operator]
    return lambda: run(x)


def _binary(spec: Binary, tensors: Tensors) -> Call:
    shape, positive = (spec.rows, spec.cols), spec.operator in _POSITIVE
    first, *others = (tensors.floats(shape, spec.dtype, positive=positive) for _ in range(spec.inputs))
    run = _BINARY[spec.operator]
    if len(others) == 1:
        return lambda: run(first, others[0])

    def chain() -> torch.Tensor:
        result = first
        for other in others:
            result = run(result, other)
        return result

    return chain


def _scalar(spec: Scalar, tensors: Tensors) -> Call:
    x = tensors.floats((spec.rows, spec.cols), spec.dtype, positive=spec.operator in _POSITIVE)
    run = _SCALAR[spec.operator]
    # Not 2, 3 or 0.5: PyTorch replaces such powers by multiplications and roots.
    return lambda: run(x, 1.7)


def _row_wise(spec: RowWise, tensors: Tensors) -> Call:
    x = tensors.floats((spec.rows, spec.cols), spec.dtype)
    if spec.operator == "argmax":
        return lambda: torch.argmax(x, -1)
    if spec.operator == "softmax":
        return lambda: torch.softmax(x, -1)
    if spec.operator == "reduce_mean":
        return lambda: x.mean(-1)
    scale = tensors.floats((spec.cols,), spec.dtype)
    if spec.operator == "rmsnorm":
        return lambda: nn.rms_norm(x, (spec.cols,), scale)
    offset = tensors.floats((spec.cols,), spec.dtype)
    return lambda: nn.layer_norm(x, (spec.cols,), scale, offset)


def _silu_and_mul(spec: SiluAndMul, tensors: Tensors) -> Call:
    x = tensors.floats((spec.rows, 2 * spec.cols), spec.dtype)
    gate, up = x[:, : spec.cols], x[:, spec.cols :]
    return lambda: nn.silu(gate).mul_(up)


def _copy(spec: Copy, tensors: Tensors) -> Call:
    x = tensors.floats((spec.rows, spec.cols), spec.dtype)
    if spec.transposed:
        return lambda: x.t().contiguous()
    return x.clone


def _embedding(spec: Embedding, tensors: Tensors) -> Call:
    table = tensors.floats((spec.table_rows, spec.cols), spec.dtype)
    picked = tensors.indices(spec.rows, spec.table_rows)
    return lambda: nn.embedding(picked, table)


def _pool(spec: Pool2d, tensors: Tensors) -> Call:
    x = tensors.floats((spec.n, spec.c, spec.h, spec.w), spec.dtype)
    window, stride, pad = (spec.kh, spec.kw), (spec.stride_h, spec.stride_w), (spec.pad_h, spec.pad_w)
    if spec.operator == "max_pool2d":
        return lambda: nn.max_pool2d(x, window, stride, pad)
    return lambda: nn.avg_pool2d(x, window, stride, pad)


def _batch_norm(spec: BatchNorm, tensors: Tensors) -> Call:
    x = tensors.floats((spec.n, spec.c, spec.h, spec.w), spec.dtype)
    mean, scale, offset = (tensors.floats((spec.c,), spec.dtype) for _ in range(3))
    variance = tensors.floats((spec.c,), spec.dtype, positive=True)
    return lambda: nn.batch_norm(x, mean, variance, scale, offset)


def _attention(spec: Attention, tensors: Tensors) -> Call:
    keys = spec.q_len + spec.past_len
    q = tensors.floats((spec.batch, spec.heads, spec.q_len, spec.head_dim), spec.dtype)
    k, v = (tensors.floats((spec.batch, spec.kv_heads, keys, spec.head_dim), spec.dtype) for _ in range(2))
    shared = spec.kv_heads != spec.heads
    attend = nn.scaled_dot_product_attention
    if spec.operator != "attention_prefill" or spec.q_len == 1:
        return lambda: attend(q, k, v, enable_gqa=shared)
    if spec.past_len == 0:
        return lambda: attend(q, k, v, is_causal=True, enable_gqa=shared)
    from torch.nn.attention.bias import causal_lower_right

    # The last query sees all keys; `is_causal` would align the first query with the first key.
    mask: Any = causal_lower_right(spec.q_len, keys)
    if q.device.type == "cpu":  # a CPU needs a plain mask
        mask = torch.ones(spec.q_len, keys, dtype=torch.bool).tril(keys - spec.q_len)
    return lambda: attend(q, k, v, attn_mask=mask, enable_gqa=shared)


_MAKERS: tuple[tuple[type[OperatorSpec], Callable[[Any, Tensors], Call]], ...] = (
    (Linear, _linear),
    (BatchMatmul, _bmm),
    (Conv2d, _conv2d),
    (Unary, _unary),
    (Binary, _binary),
    (Scalar, _scalar),
    (RowWise, _row_wise),
    (SiluAndMul, _silu_and_mul),
    (Copy, _copy),
    (Embedding, _embedding),
    (Pool2d, _pool),
    (BatchNorm, _batch_norm),
    (Attention, _attention),
)
