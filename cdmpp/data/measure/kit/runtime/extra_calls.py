"""Operators that cdmpp has no specification for yet, as PyTorch calls.

An operator is the dictionary of its fields. ``FIELDS`` lists the fields of each operator; all are integers but
``dtype``, and ``of`` of ``backward``: the fields of the operator whose backward pass is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as nn

from .call_problems import Fields, call_problem
from .library_calls import Call, CallError, Spec, Tensors, make_call

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
_FLOATS = ("float32", "float16", "bfloat16")
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
    return _MAKERS[fields["operator"]](Spec(**fields), tensors)


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


_MAKERS: Mapping[str, Callable[[Spec, Tensors], Call]] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_POOLS, _pool),
    "group_norm": _group_norm,
    "batch_norm_training": _batch_norm_training,
    **dict.fromkeys(_MODULES, _recurrent),
    "cross_entropy": _cross_entropy,
    "log_softmax": _log_softmax,
    **dict.fromkeys(_REDUCTIONS, _reduction),
}
