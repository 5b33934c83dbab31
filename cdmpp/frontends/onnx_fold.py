"""Evaluate the small constant parts of an ONNX graph: shapes, axes, scales, masks.

Only what decides sizes and patterns is evaluated, with numpy, under a limit on the number of
elements. Weights are never read: their shape is all that a latency depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Attributes = Mapping[str, Any]

#: Largest constant that is evaluated: a causal mask of 2048 x 2048.
MAX_ELEMENTS = 1 << 22

#: TensorProto.DataType -> numpy name, for the types that constants are computed in.
NUMPY_TYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "float32",  # numpy has no bfloat16; float32 holds its values exactly
}


class NotFoldable(Exception):  # noqa: N818 - an outcome, not an error
    """The node cannot be, or is too large to be, evaluated here."""


def fold(op: str, inputs: Sequence[Array | None], attrs: Attributes, outputs: int = 1) -> list[Array]:
    """Evaluate one node on constant inputs.

    Raises
    ------
    NotFoldable
        For an operator without a rule, or a result beyond :data:`MAX_ELEMENTS`.
    """
    if op == "Split":
        return _split(_present(inputs), inputs, attrs, outputs)
    rule = _RULES.get(op)
    if rule is None:
        raise NotFoldable(op)
    try:
        with np.errstate(all="ignore"):
            value = np.asarray(rule(inputs, attrs))
    except NotFoldable:
        raise
    except Exception as error:  # a malformed constant part is reported where its value is needed
        raise NotFoldable(f"{op}: {error}") from error
    if value.size > MAX_ELEMENTS:
        raise NotFoldable(op)
    return [value]


def _limit(elements: int) -> None:
    if not 0 <= elements <= MAX_ELEMENTS:
        raise NotFoldable("too large")


def _present(inputs: Sequence[Array | None]) -> Array:
    if not inputs or inputs[0] is None:
        raise NotFoldable("missing input")
    return inputs[0]


def _ints(value: Any) -> list[int]:
    return [int(v) for v in np.asarray(value).reshape(-1)]


def _optional(inputs: Sequence[Array | None], index: int) -> Array | None:
    return inputs[index] if index < len(inputs) else None


def _elementwise(
    function: Callable[..., Any], arity: int | None = None
) -> Callable[[Sequence[Array | None], Attributes], Any]:
    def rule(inputs: Sequence[Array | None], attrs: Attributes) -> Any:
        arrays = [a for a in inputs if a is not None]
        if not arrays or (arity is not None and len(arrays) != arity):
            raise NotFoldable("arity")
        _limit(math.prod(np.broadcast_shapes(*(a.shape for a in arrays))))
        result = arrays[0] if len(arrays) > 1 and arity is None else function(*arrays)
        for array in arrays[1:] if arity is None else ():
            result = function(result, array)
        return result

    return rule


def _divide(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.integer):  # ONNX divides integers towards zero
        quotient: Array = np.trunc(a / np.where(b == 0, 1, b)).astype(a.dtype)
        return quotient
    return np.asarray(a / b)


def _cast(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    name = NUMPY_TYPES.get(int(attrs.get("to", 0)))
    if name is None:
        raise NotFoldable("type")
    return _present(inputs).astype(name)


def _axes(inputs: Sequence[Array | None], attrs: Attributes) -> list[int] | None:
    given = _optional(inputs, 1)
    if given is not None:
        return _ints(given)
    return _ints(attrs["axes"]) if "axes" in attrs else None


def _unsqueeze(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    return np.expand_dims(_present(inputs), tuple(_axes(inputs, attrs) or ()))


def _squeeze(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    axes = _axes(inputs, attrs)
    return np.squeeze(_present(inputs), None if axes is None else tuple(axes))


def _reshape(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    data, shape = _present(inputs), _optional(inputs, 1)
    wanted = _ints(shape) if shape is not None else _ints(attrs["shape"])
    if not attrs.get("allowzero"):
        wanted = [data.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    return data.reshape(wanted)


def _slice(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    data = _present(inputs)
    starts = _ints(inputs[1] if len(inputs) > 1 else attrs["starts"])
    ends = _ints(inputs[2] if len(inputs) > 2 else attrs["ends"])
    given_axes, given_steps = _optional(inputs, 3), _optional(inputs, 4)
    axes = _ints(given_axes if given_axes is not None else attrs.get("axes", range(len(starts))))
    steps = _ints(given_steps) if given_steps is not None else [1] * len(starts)
    index = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # An end below -size means "past the first element" when walking backwards.
        past_first = step < 0 and end < -data.shape[axis]
        index[axis] = slice(start, None if past_first else end, step)
    return data[tuple(index)]


def _range(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    bounds = [a for a in inputs if a is not None]
    start, limit, delta = (a.reshape(-1)[0] for a in bounds)
    _limit(int(max(0, math.ceil((float(limit) - float(start)) / float(delta)))))
    return np.arange(start, limit, delta, dtype=bounds[0].dtype)


def _constant_of_shape(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    shape = _ints(_present(inputs))
    _limit(math.prod(shape))
    value = attrs.get("value")
    filler = np.float32(0) if value is None else np.asarray(value).reshape(-1)[0]
    return np.full(shape, filler)


def _expand(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    data, shape = _present(inputs), _ints(inputs[1])
    full = np.broadcast_shapes(data.shape, tuple(shape))
    _limit(math.prod(full))
    return np.broadcast_to(data, full)


def _tile(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    data, repeats = _present(inputs), _ints(inputs[1])
    _limit(data.size * math.prod(repeats))
    return np.tile(data, repeats)


def _where(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    arrays = [a for a in inputs if a is not None]
    _limit(math.prod(np.broadcast_shapes(*(a.shape for a in arrays))))
    return np.where(*arrays)


def _concat(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    arrays = [a for a in inputs if a is not None]
    _limit(sum(a.size for a in arrays))
    return np.concatenate(arrays, axis=int(attrs["axis"]))


def _gather(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    data, indices, axis = _present(inputs), inputs[1], int(attrs.get("axis", 0))
    assert indices is not None
    _limit(data.size // max(data.shape[axis], 1) * indices.size)
    return np.take(data, indices, axis=axis)


def _trilu(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    offset = _optional(inputs, 1)
    k = 0 if offset is None else _ints(offset)[0]
    keep = np.triu if attrs.get("upper", 1) else np.tril
    return keep(_present(inputs), k)


def _transpose(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    return np.transpose(_present(inputs), attrs.get("perm"))


def _flatten(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    data, axis = _present(inputs), int(attrs.get("axis", 1))
    return data.reshape(math.prod(data.shape[:axis]), -1)


def _reduce(function: Callable[..., Any]) -> Callable[[Sequence[Array | None], Attributes], Any]:
    def rule(inputs: Sequence[Array | None], attrs: Attributes) -> Any:
        axes = _axes(inputs, attrs)
        keep = bool(attrs.get("keepdims", 1))
        return function(_present(inputs), axis=None if axes is None else tuple(axes), keepdims=keep)

    return rule


def _cumsum(inputs: Sequence[Array | None], attrs: Attributes) -> Array:
    if attrs.get("exclusive") or attrs.get("reverse"):
        raise NotFoldable("CumSum")
    return np.cumsum(_present(inputs), axis=_ints(inputs[1])[0])


def _split(data: Array, inputs: Sequence[Array | None], attrs: Attributes, outputs: int) -> list[Array]:
    axis, given = int(attrs.get("axis", 0)), _optional(inputs, 1)
    sizes = _ints(given) if given is not None else attrs.get("split")
    try:
        if sizes is None:
            return list(np.array_split(data, outputs, axis=axis))
        return list(np.split(data, np.cumsum(sizes)[:-1], axis=axis))
    except (ValueError, IndexError) as error:
        raise NotFoldable("Split") from error


_RULES: dict[str, Callable[[Sequence[Array | None], Attributes], Any]] = {
    "Identity": lambda inputs, attrs: _present(inputs),
    "Dropout": lambda inputs, attrs: _present(inputs),
    "Size": lambda inputs, attrs: np.int64(_present(inputs).size),
    "Cast": _cast,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Slice": _slice,
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Tile": _tile,
    "Where": _where,
    "Concat": _concat,
    "Gather": _gather,
    "Trilu": _trilu,
    "Transpose": _transpose,
    "CumSum": _cumsum,
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "ReduceMin": _reduce(np.min),
    "ReduceMax": _reduce(np.max),
    "Add": _elementwise(np.add, 2),
    "Sub": _elementwise(np.subtract, 2),
    "Mul": _elementwise(np.multiply, 2),
    "Div": _elementwise(_divide, 2),
    "Pow": _elementwise(np.power, 2),
    "Mod": _elementwise(np.mod, 2),
    "Max": _elementwise(np.maximum),
    "Min": _elementwise(np.minimum),
    "Sqrt": _elementwise(np.sqrt, 1),
    "Reciprocal": _elementwise(np.reciprocal, 1),
    "Neg": _elementwise(np.negative, 1),
    "Abs": _elementwise(np.abs, 1),
    "Floor": _elementwise(np.floor, 1),
    "Ceil": _elementwise(np.ceil, 1),
    "Exp": _elementwise(np.exp, 1),
    "Log": _elementwise(np.log, 1),
    "Not": _elementwise(np.logical_not, 1),
    "And": _elementwise(np.logical_and, 2),
    "Or": _elementwise(np.logical_or, 2),
    "Equal": _elementwise(np.equal, 2),
    "Less": _elementwise(np.less, 2),
    "LessOrEqual": _elementwise(np.less_equal, 2),
    "Greater": _elementwise(np.greater, 2),
    "GreaterOrEqual": _elementwise(np.greater_equal, 2),
}
