"""Named arrays and metadata as safetensors bytes; everything that is read is validated."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from cdmpp.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]

#: A header names a dozen tensors and some devices; a longer one is something else.
MAX_HEADER_BYTES = 4 * 2**20
_HINT = "GET /openapi.json and docs/server.md describe the tensors"
_NAMES = {"f32": "F32", "f64": "F64", "i32": "I32", "i8": "I8"}
_DTYPES = {"f32": "<f4", "f64": "<f8", "i32": "<i4", "i8": "|i1"}
#: What a tensor must be: its type ("f32", "f64", "i32", "i8") and its dimensions. A number is an exact
#: length; equal names are equal lengths.
Layout = Mapping[str, tuple[str, tuple[str | int, ...]]]


def write(tensors: Mapping[str, Array], layout: Layout, metadata: Mapping[str, str]) -> bytes:
    """Arrays as safetensors bytes, each of the type that the layout gives it."""
    cast = {name: np.ascontiguousarray(tensors[name], dtype=_DTYPES[kind]) for name, (kind, _) in layout.items()}
    return bytes(save(cast, dict(metadata)))


def read(
    body: bytes | bytearray | memoryview, layout: Layout, optional: Collection[str] = ()
) -> tuple[dict[str, Array], dict[str, str]]:
    """Read what :func:`write` wrote.

    ``layout``: exactly the tensors that must be there.
    ``optional``: names of those that may be missing.
    Returns the tensors and the metadata. The arrays may share the memory of ``body`` and are not written to.
    Raises DataError: not safetensors, or a tensor is missing, unknown, of another type or shape.
    """
    body = bytes(body)
    metadata = _metadata(body)
    try:
        arrays = dict(deserialize(body))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise DataError(f"the tensors cannot be read ({str(error)[:200]})", hint=_HINT) from None
    layout = {name: form for name, form in layout.items() if name in arrays or name not in optional}
    if set(arrays) != set(layout):
        missing, unknown = sorted(set(layout) - set(arrays)), sorted(set(arrays) - set(layout))
        problems = [f"missing: {', '.join(missing)}"] if missing else []
        problems += [f"unknown: {', '.join(name[:60] for name in unknown[:8])}"] if unknown else []
        raise DataError(f"unexpected tensors ({'; '.join(problems)})", hint=_HINT)
    lengths: dict[str, int] = {}
    tensors = {}
    for name, (kind, wanted) in layout.items():
        shape = tuple(arrays[name]["shape"])
        if arrays[name]["dtype"] != _NAMES[kind] or len(shape) != len(wanted):
            raise DataError(
                f"tensor {name!r} is {arrays[name]['dtype']} with {len(shape)} dimensions; it should be "
                f"{_NAMES[kind]} with {len(wanted)}",
                hint=_HINT,
            )
        for length, axis in zip(shape, wanted, strict=True):
            expected = axis if isinstance(axis, int) else lengths.setdefault(axis, length)
            if length != expected:
                raise DataError(f"tensor {name!r}: {axis} is {length}, not {expected}", hint=_HINT)
        tensors[name] = np.frombuffer(arrays[name]["data"], dtype=_DTYPES[kind]).reshape(shape)
    return tensors, metadata


def _metadata(body: bytes) -> dict[str, str]:
    """The header's texts: the library reads them from files only."""
    size = int.from_bytes(body[:8], "little")
    if len(body) < 8 or not 2 <= size <= min(len(body) - 8, MAX_HEADER_BYTES):
        raise DataError("this is not safetensors: its header has no sensible length", hint=_HINT)
    try:
        metadata = json.loads(body[8 : 8 + size]).get("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise DataError("this is not safetensors: its header is not an object of texts", hint=_HINT) from None
    return dict(metadata)


def texts(metadata: Mapping[str, str], name: str) -> Any:
    """A value that stands as JSON in the metadata."""
    try:
        return json.loads(metadata[name])
    except KeyError:
        raise DataError(f"the metadata have no {name!r}", hint=_HINT) from None
    except (ValueError, RecursionError):
        raise DataError(f"metadata {name!r} is not JSON", hint=_HINT) from None


def within(name: str, values: Array, low: float, high: float) -> None:
    """Raise :class:`DataError` unless all values are."""
    # Written so that NaN fails too.
    if values.size and not (values.min() >= low and values.max() <= high):
        raise DataError(f"{name}: a value is not between {low:g} and {high:g}")


def expect_format(metadata: Mapping[str, str], wanted: str) -> None:
    """Raise :class:`DataError` unless the metadata say so."""
    if metadata.get("format") != wanted:
        raise DataError(f"the metadata do not say format {wanted!r}", hint="docs/server.md describes it")


def numbers(value: Any) -> tuple[float, ...]:
    """Levels of quantiles as the metadata have them."""
    if not isinstance(value, list) or not all(type(level) in (int, float) for level in value):
        raise DataError("metadata: the levels of the quantiles are not a list of numbers")
    return tuple(map(float, value))
