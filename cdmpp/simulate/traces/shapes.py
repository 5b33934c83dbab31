"""Recorded operators (``record_shapes=True``) as operators that can be predicted.

The rules are those of eager modules (:mod:`cdmpp.programs.frontends.eager_rules`). A trace has the inputs of a call and
not its results: their shapes follow from the inputs, for the calls whose rules need them.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cdmpp.errors import CdmppError
from cdmpp.programs.frontends.eager_rules import FREE, RULES, AtenCall, Fields, attention_kernel, outcome
from cdmpp.programs.frontends.graph import NoRuleError
from cdmpp.programs.operators import OperatorSpec, make_operator
from cdmpp.simulate.traces.records import Arguments, TraceEvent, dtype_bytes, dtype_name

#: Calls of fused attention, and the position of ``is_causal`` among their inputs.
_ATTENTION = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
}


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor of which shape and type are known."""

    shape: tuple[int, ...]
    dtype: str

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of an element."""
        return dtype_bytes(self.dtype)


def is_free(event: TraceEvent) -> bool:
    """Whether an operator only allocates, renames or describes memory."""
    return event.name.startswith("aten::") and event.name.removeprefix("aten::") in FREE


@lru_cache(maxsize=4096)
def computes(name: str) -> bool:
    """Whether an operator of this name has a known computation; its shapes may be missing."""
    if not name.startswith("aten::"):
        return False
    name = name.removeprefix("aten::")
    plain = name if name in RULES else name.removesuffix("_")
    return name not in FREE and (plain in RULES or name.removesuffix("_backward") in _ATTENTION)


@lru_cache(maxsize=65536)
def operators_of(name: str, arguments: Arguments) -> tuple[tuple[OperatorSpec, ...], str]:
    """Operators that a recorded call such as ``"aten::addmm"`` runs, and the reason where none is known."""
    plain = name.removeprefix("aten::")
    try:
        values = [_value(arguments, i) for i in range(len(arguments.dims))]
        if plain.removesuffix("_backward") in _ATTENTION:
            fields: tuple[Fields, ...] = (_attention(plain, values),)
        else:
            call = AtenCall(plain, values, {}, None)
            fields = outcome(AtenCall(plain, _completed(plain, values), {}, _results(plain, call))).launches
        return tuple(make_operator(each) for each in fields), ""
    except NoRuleError as error:
        return (), str(error)
    except CdmppError as error:
        return (), error.message
    except (TypeError, ValueError, IndexError, AttributeError, KeyError, ZeroDivisionError):
        return (), "its recorded inputs are not complete"


def _value(arguments: Arguments, i: int) -> Any:
    dims = arguments.dims[i]
    type_ = arguments.types[i] if i < len(arguments.types) else ""
    text = arguments.concrete[i] if i < len(arguments.concrete) else ""
    if isinstance(dims, tuple) and dims and isinstance(dims[0], tuple):
        # Lists of tensors do not state a type; the rules for them copy, so that the size decides.
        return [RecordedTensor(shape, "float32") for shape in dims if _is_shape(shape)]
    dtype = dtype_name(type_)
    if dtype and _is_shape(dims):
        return RecordedTensor(dims, dtype)  # type: ignore[arg-type]
    if not text:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {"true": True, "false": False}.get(text.casefold())


def _is_shape(dims: Any) -> bool:
    return isinstance(dims, tuple) and all(isinstance(extent, int) for extent in dims)


def _completed(name: str, values: list[Any]) -> list[Any]:
    """Inputs that old traces lack and that nearly always have one value."""
    if name in ("native_layer_norm", "_fused_rms_norm") and len(values) > 1 and values[1] is None:
        return [values[0], list(values[0].shape[-1:]), *values[2:]]
    if name in ("_softmax", "_log_softmax", "_safe_softmax") and len(values) > 1 and values[1] is None:
        return [values[0], -1, *values[2:]]
    return values


def _results(name: str, call: AtenCall) -> Any:
    """Tensors that a call returns."""
    tensors = call.tensors
    if not tensors:
        return None
    first = tensors[0]
    if name in ("sum", "mean", "amax", "amin", "var_mean"):
        return RecordedTensor(_reduced(first.shape, call.arg(1)), first.dtype)
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        a, b = tensors[-2:]
        return RecordedTensor((*a.shape[:-1], b.shape[-1]), a.dtype)
    if name in ("cat", "stack") and isinstance(call.arg(0), list):
        return RecordedTensor((sum(t.numel() for t in call.arg(0)),), first.dtype)
    if name == "embedding_dense_backward" and isinstance(call.arg(2), int):
        return RecordedTensor((call.arg(2), first.shape[-1]), first.dtype)
    if name == "embedding":
        return RecordedTensor((*tensors[1].shape, first.shape[-1]), first.dtype)
    if name in ("convolution_backward", "convolution"):
        return first
    return RecordedTensor(_broadcast([t.shape for t in tensors[:3]]), first.dtype)


def _reduced(shape: tuple[int, ...], axes: Any) -> tuple[int, ...]:
    if axes is None or isinstance(axes, bool):
        return ()
    kept = {axis % len(shape) for axis in ([axes] if isinstance(axes, int) else axes)} if shape else set()
    return tuple(extent for i, extent in enumerate(shape) if i not in kept)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    longest = max(map(len, shapes))
    padded = [(1,) * (longest - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(max(extents) for extents in zip(*padded, strict=True))


def _attention(name: str, values: list[Any]) -> Fields:
    """The forward kernel; that of the backward pass stands for it in ratios between devices."""
    backward = name.endswith("_backward")
    q, k = values[1:3] if backward else values[0:2]
    flag = None if backward else values[_ATTENTION[name]] if len(values) > _ATTENTION[name] else None
    causal = bool(flag) if not backward else any(value is True for value in values)
    sizes = (q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3])
    return attention_kernel(q.dtype, *sizes, causal)[0]
