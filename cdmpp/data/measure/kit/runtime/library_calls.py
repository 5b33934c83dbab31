"""Operators as PyTorch calls on tensors.

This file runs in cdmpp and, copied beside ``run.py``, on a machine without cdmpp: it imports torch only. An operator
is the dictionary of its fields (``OperatorSpec.canonical()``): ``{"operator": "linear", "m": 64, ...}``.

One operator is one call and one kernel, with two exceptions of PyTorch: ``silu_and_mul`` and element-wise operators
with three or four inputs are chains of calls, as in an eager framework. Inputs are random and not zero; indices cover
the whole table.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as nn

from .call_problems import Fields, call_problem

#: Runs the operator once and returns its result.
Call = Callable[[], Any]
#: The fields as attributes.
Spec = SimpleNamespace
_Shape = tuple[int, ...]

_TORCH: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "tfloat32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3": torch.float8_e4m3fn,
}
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


class CallError(RuntimeError):
    """PyTorch has no such call, or a device cannot time it."""


class Tensors:
    """Seeded random tensors on one device.

    With ``gradients`` the floats require gradients; ``leaves`` lists them.
    """

    def __init__(self, device: torch.device, seed: int = 0, *, gradients: bool = False) -> None:
        self.device, self.gradients = device, gradients
        self.leaves: list[torch.Tensor] = []
        self._generator = torch.Generator(device).manual_seed(seed)

    def floats(self, shape: _Shape, dtype: str, *, positive: bool = False) -> torch.Tensor:
        """Uniform in [-1, 1), or in [0.5, 1.5); int8: all values."""
        if dtype == "int8":
            return torch.randint(-128, 128, shape, dtype=torch.int8, device=self.device, generator=self._generator)
        if dtype == "float8_e4m3":
            return self.floats(shape, "bfloat16").to(torch.float8_e4m3fn)
        made = torch.empty(shape, dtype=_TORCH[dtype], device=self.device)
        low, high = (0.5, 1.5) if positive else (-1.0, 1.0)
        made.uniform_(low, high, generator=self._generator)
        if self.gradients:
            self.leaves.append(made.requires_grad_())
        return made

    def indices(self, count: int, bound: int) -> torch.Tensor:
        """Indices in [0, bound)."""
        return torch.randint(0, bound, (count,), device=self.device, generator=self._generator)


def make_call(fields: Fields, tensors: Tensors) -> Call:
    """Allocate an operator's inputs and return its call, which runs inside :func:`precision`.

    Raises
    ------
    CallError
        PyTorch has no kernel for this operator, type or sizes.
    """
    if problem := call_problem(fields):
        raise CallError(problem)
    return _MAKERS[fields["operator"]](Spec(**fields), tensors)


@contextmanager
def precision(fields: Fields) -> Iterator[None]:
    """Products of type ``tfloat32`` may use TF32 inside; those of ``float32`` may not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if fields["dtype"] == "tfloat32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _linear(spec: Spec, tensors: Tensors) -> Call:
    x, w = tensors.floats((spec.m, spec.k), spec.dtype), tensors.floats((spec.n, spec.k), spec.dtype)
    transposed = w.t()
    if spec.dtype == "int8":
        return lambda: torch._int_mm(x, transposed)
    if spec.dtype == "float8_e4m3":
        scale = torch.ones((), dtype=torch.float32, device=tensors.device)
        return lambda: torch._scaled_mm(x, transposed, scale, scale, out_dtype=torch.bfloat16)
    bias = tensors.floats((spec.n,), spec.dtype) if spec.bias else None
    return lambda: nn.linear(x, w, bias)


def _bmm(spec: Spec, tensors: Tensors) -> Call:
    a = tensors.floats((spec.batch, spec.m, spec.k), spec.dtype)
    b = tensors.floats((spec.batch, spec.k, spec.n), spec.dtype)
    return lambda: torch.bmm(a, b)


def _conv2d(spec: Spec, tensors: Tensors) -> Call:
    x = tensors.floats((spec.n, spec.c_in, spec.h, spec.w), spec.dtype)
    w = tensors.floats((spec.c_out, spec.c_in // spec.groups, spec.kh, spec.kw), spec.dtype)
    stride, pad = (spec.stride_h, spec.stride_w), (spec.pad_h, spec.pad_w)
    dilation = (spec.dil_h, spec.dil_w)
    if spec.direction == "fwd":
        bias = tensors.floats((spec.c_out,), spec.dtype) if spec.bias else None
        return lambda: nn.conv2d(x, w, bias, stride, pad, dilation, spec.groups)
    gradient = tensors.floats((spec.n, spec.c_out, *output_hw(spec)), spec.dtype)
    wanted = [spec.direction == "bwd_data", spec.direction == "bwd_weight", False]
    backward = torch.ops.aten.convolution_backward
    return lambda: backward(gradient, x, w, None, stride, pad, dilation, False, (0, 0), spec.groups, wanted)


def output_hw(spec: Spec) -> tuple[int, int]:
    """Height and width of the forward output of a convolution."""

    def along(axis: str) -> int:
        size, window, stride, pad, dilation = (
            getattr(spec, name + axis) for name in ("", "k", "stride_", "pad_", "dil_")
        )
        return int((size + 2 * pad - (window - 1) * dilation - 1) // stride + 1)

    return along("h"), along("w")


def _unary(spec: Spec, tensors: Tensors) -> Call:
    x = tensors.floats((spec.rows, spec.cols), spec.dtype, positive=spec.operator in _POSITIVE)
    run = _UNARY[spec.operator]
    return lambda: run(x)


def _binary(spec: Spec, tensors: Tensors) -> Call:
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


def _scalar(spec: Spec, tensors: Tensors) -> Call:
    x = tensors.floats((spec.rows, spec.cols), spec.dtype, positive=spec.operator in _POSITIVE)
    run = _SCALAR[spec.operator]
    # Not 2, 3 or 0.5: PyTorch replaces such powers by multiplications and roots.
    return lambda: run(x, 1.7)


def _row_wise(spec: Spec, tensors: Tensors) -> Call:
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


def _silu_and_mul(spec: Spec, tensors: Tensors) -> Call:
    x = tensors.floats((spec.rows, 2 * spec.cols), spec.dtype)
    gate, up = x[:, : spec.cols], x[:, spec.cols :]
    return lambda: nn.silu(gate).mul_(up)


def _copy(spec: Spec, tensors: Tensors) -> Call:
    x = tensors.floats((spec.rows, spec.cols), spec.dtype)
    if spec.transposed:
        return lambda: x.t().contiguous()
    return x.clone


def _embedding(spec: Spec, tensors: Tensors) -> Call:
    table = tensors.floats((spec.table_rows, spec.cols), spec.dtype)
    picked = tensors.indices(spec.rows, spec.table_rows)
    return lambda: nn.embedding(picked, table)


def _pool(spec: Spec, tensors: Tensors) -> Call:
    x = tensors.floats((spec.n, spec.c, spec.h, spec.w), spec.dtype)
    window, stride, pad = (spec.kh, spec.kw), (spec.stride_h, spec.stride_w), (spec.pad_h, spec.pad_w)
    if spec.operator == "max_pool2d":
        return lambda: nn.max_pool2d(x, window, stride, pad)
    return lambda: nn.avg_pool2d(x, window, stride, pad)


def _batch_norm(spec: Spec, tensors: Tensors) -> Call:
    x = tensors.floats((spec.n, spec.c, spec.h, spec.w), spec.dtype)
    mean, scale, offset = (tensors.floats((spec.c,), spec.dtype) for _ in range(3))
    variance = tensors.floats((spec.c,), spec.dtype, positive=True)
    return lambda: nn.batch_norm(x, mean, variance, scale, offset)


def _attention(spec: Spec, tensors: Tensors) -> Call:
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


_MAKERS: Mapping[str, Callable[[Spec, Tensors], Call]] = {
    "linear": _linear,
    "bmm": _bmm,
    "conv2d": _conv2d,
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_SCALAR, _scalar),
    **dict.fromkeys(("softmax", "layernorm", "rmsnorm", "reduce_mean", "argmax"), _row_wise),
    "silu_and_mul": _silu_and_mul,
    "copy": _copy,
    "embedding": _embedding,
    **dict.fromkeys(("max_pool2d", "avg_pool2d"), _pool),
    "batch_norm": _batch_norm,
    **dict.fromkeys(("attention_prefill", "attention_decode", "attention_encoder"), _attention),
}


#: Runs a call ``number`` times for each of ``repeat`` repeats; seconds per run, one value per repeat.
Evaluate = Callable[[int, int], Sequence[float]]

#: Duration and maximum number of calls of a captured graph, so that the cost of its replay is negligible.
_GRAPH_S, _CALLS_IN_GRAPH = 2e-3, 20
#: Maximum number of traced runs, because each keeps several events in memory.
_MOST_TRACED = 200


def _eager(call: Call, device: torch.device) -> Evaluate:
    if device.type == "cuda":
        return _eager_cuda(call, device)

    def evaluate(number: int, repeat: int) -> Sequence[float]:
        figures = []
        for _ in range(repeat):
            start = time.perf_counter()
            for _ in range(number):
                call()
            figures.append((time.perf_counter() - start) / number)
        return figures

    return evaluate


def _events() -> tuple[Any, Any]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, end


def _eager_cuda(call: Call, device: torch.device) -> Evaluate:
    def once() -> float:
        start, end = _events()
        torch.cuda.synchronize(device)
        start.record()
        call()
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end))

    def evaluate(number: int, repeat: int) -> Sequence[float]:
        with torch.cuda.device(device):
            return [sum(once() for _ in range(number)) / number for _ in range(repeat)]

    return evaluate


def _graph(call: Call, device: torch.device) -> Evaluate:
    once = _eager_cuda(call, device)
    calls = min(_CALLS_IN_GRAPH, max(1, math.ceil(_GRAPH_S / min(once(1, 2)))))
    with torch.cuda.device(device):
        # A backward pass runs on the stream of its forward pass: capture that one where it is not the default.
        stream: Any = torch.cuda.current_stream(device)
        if stream == torch.cuda.default_stream(device):
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # one-time initialisation must not be captured
            for _ in range(3):
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()

    def evaluate(number: int, repeat: int) -> Sequence[float]:
        replays = -(-number // calls)
        figures = []
        with torch.cuda.device(device):
            for _ in range(repeat):
                start, end = _events()
                torch.cuda.synchronize(device)
                start.record()
                for _ in range(replays):
                    graph.replay()
                end.record()
                end.synchronize()
                figures.append(1e-3 * float(start.elapsed_time(end)) / (replays * calls))
        return figures

    return evaluate


def _kernel(call: Call, device: torch.device) -> Evaluate:
    def traced(number: int) -> float:
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(number):
                call()
            torch.cuda.synchronize(device)
        total_us = sum(
            event.self_device_time_total
            for event in trace.key_averages()
            if event.device_type == torch.profiler.DeviceType.CUDA
        )
        if not total_us:
            raise CallError(
                "the profiler recorded no kernel: its tracing interface (CUPTI) may be forbidden here. Use the "
                "protocol graph or eager, or allow users to read the driver's performance counters"
            )
        return 1e-6 * float(total_us) / number

    def evaluate(number: int, repeat: int) -> Sequence[float]:
        with torch.cuda.device(device):
            return [traced(min(number, _MOST_TRACED)) for _ in range(repeat)]

    return evaluate


#: Timer of each protocol.
EVALUATORS: Mapping[str, Callable[[Call, torch.device], Evaluate]] = {
    "eager": _eager,
    "graph": _graph,
    "kernel": _kernel,
}
