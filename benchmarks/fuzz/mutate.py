"""Changing valid input a little: JSON by its structure, text by its tokens, bytes as they come.

Every function takes the random generator that decides, so a case is named by its seed.
"""

from __future__ import annotations

import json
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.numpy

_NUMBERS = (0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**40)
_ODD_TEXTS = ("", " ", "0", "null", "NaN", "\x00", "é" * 3, "\ufffe", "💥", "x" * 300)
_HOSTILE_TEXTS = ("../../etc/passwd", "'; DROP TABLE observations; --", "%s%n", "${jndi:x}", "<script>", "__class__")
#: Values that may replace a field: other types, edges of numbers, hostile text, names that are valid elsewhere.
SCALARS: tuple[Any, ...] = (None, True, False, *_NUMBERS, *_ODD_TEXTS, *_HOSTILE_TEXTS, "float32", "t4", "linear")
_RAW_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"00", b"1.", b".5", b"0x10", b"1e", b"9" * 400)
_RAW_TEXTS = (b"0." + b"1" * 400, b"tru", b"'a'", b'"\\ud800"', b'"\\u0000"', b'"\xff"', b"{}", b"[]")
#: Raw text that may replace a part of JSON text, some of it not JSON.
RAW = (*_RAW_NUMBERS, *_RAW_TEXTS, b"/**/", b",", b":", b"[" * 5000, b'{"a":' * 2000, b"\xef\xbb\xbf", b"\x00")


def scalar(rng: random.Random) -> Any:
    """A value from :data:`SCALARS`, or a number of any size."""
    if rng.random() < 0.6:
        return rng.choice(SCALARS)
    size = rng.choice((4, 16, 31, 40, 62, 70))
    return rng.choice((1, 1, 1, -1)) * rng.getrandbits(size)


def value(rng: random.Random) -> Any:
    """A scalar, or a small structure where none is expected."""
    kind = rng.random()
    if kind < 0.75:
        return scalar(rng)
    if kind < 0.85:
        return [scalar(rng) for _ in range(rng.randrange(4))]
    if kind < 0.95:
        return {str(scalar(rng)): scalar(rng) for _ in range(rng.randrange(4))}
    deep: Any = scalar(rng)
    for _ in range(rng.choice((10, 150, 400))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return deep


def json_value(rng: random.Random, document: Any, changes: int | None = None) -> Any:
    """A copy of a JSON value with a few places changed: replaced, removed, doubled, renamed, swapped."""
    root = {"": _copy(document)}
    for _ in range(changes or rng.choice((1, 1, 1, 2, 3, 6))):
        container, key = _place(rng, root)
        if container is root:  # the document as a whole: replaced, and rarely
            root[""] = value(rng) if rng.random() < 0.2 else root[""]
        else:
            _change(rng, root, container, key)
    return root[""]


def _copy(document: Any) -> Any:
    return pickle.loads(pickle.dumps(document))  # own values: several times faster than copy.deepcopy


def _place(rng: random.Random, root: Any) -> tuple[Any, Any]:
    """(container, key) of some value: down from the root, ending anywhere but more often at a leaf."""
    here, key = root, ""
    while isinstance(here[key], dict | list) and here[key] and rng.random() < 0.85:
        here = here[key]
        key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
    return here, key


def _change(rng: random.Random, root: Any, container: Any, key: Any) -> None:
    kind = rng.random()
    if kind < 0.6:
        container[key] = value(rng)
    elif kind < 0.7:
        del container[key]
    elif kind < 0.8 and isinstance(container, dict):
        container[str(scalar(rng))] = container.pop(key)
    elif kind < 0.9:
        other, other_key = _place(rng, root)
        container[key] = _copy(other[other_key])
    elif isinstance(container, list):
        container[key:key] = [_copy(container[key])] * rng.choice((1, 2, 50))
    else:
        container[str(scalar(rng))] = value(rng)


def dumps(rng: random.Random, document: Any) -> bytes:
    """JSON text, sometimes spaced, escaped or with a key given twice."""
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5)
    data = text.encode("utf-8", "replace")
    if rng.random() < 0.03:
        data = rng.choice((b"\xef\xbb\xbf", b" \r\n\t", b"")) + data + rng.choice((b" ", b"\x00", b"{}", b","))
    return data


def tokens(rng: random.Random, data: bytes) -> bytes:
    """JSON text with a token replaced by raw text."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(RAW) + data[at + rng.choice((0, 1, 4)) :]


def octets(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, doubled, moved or overwritten, in a few places."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not out:
            out += rng.randbytes(8)
        at = rng.randrange(len(out))
        _OCTETS[rng.randrange(len(_OCTETS))](rng, out, at)
    return bytes(out)


def _flip(rng: random.Random, out: bytearray, at: int) -> None:
    out[at] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, out: bytearray, at: int) -> None:
    out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _cut(rng: random.Random, out: bytearray, at: int) -> None:
    del out[at : at + rng.choice((1, 2, 4, 64, len(out)))]


def _double(rng: random.Random, out: bytearray, at: int) -> None:
    piece = out[at : at + rng.choice((1, 4, 16, 256))]
    out[at:at] = piece * rng.choice((1, 2, 20))


def _move(rng: random.Random, out: bytearray, at: int) -> None:
    other = rng.randrange(len(out))
    length = rng.choice((1, 4, 32))
    out[at : at + length] = out[other : other + length]


def _number(rng: random.Random, out: bytearray, at: int) -> None:
    width = rng.choice((4, 8))
    number = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1))
    out[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, rng.choice(("little", "big")))


def _varint(rng: random.Random, out: bytearray, at: int) -> None:
    out[at : at + 1] = b"\xff" * rng.choice((1, 4, 9)) + b"\x01"


_Change = Callable[[random.Random, bytearray, int], None]
_OCTETS: tuple[_Change, ...] = (_flip, _flip, _set, _set, _cut, _double, _move, _number, _varint)


def tensors(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with figures of any value, other shapes, other words in its metadata."""
    arrays = dict(safetensors.numpy.load(data))
    length = int.from_bytes(data[:8], "little")
    words = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice(list(arrays))
        kind = rng.random()
        if kind < 0.5:
            flat = arrays[name].reshape(-1).copy()
            if flat.size:
                flat[rng.randrange(flat.size)] = _figure(rng, flat.dtype)
            arrays[name] = flat.reshape(arrays[name].shape)
        elif kind < 0.6:
            arrays[name] = np.full_like(arrays[name], _figure(rng, arrays[name].dtype))
        elif kind < 0.7:
            wanted = rng.choice(("float32", "float64", "int8", "int32", "int64", "bool"))
            with np.errstate(all="ignore"):
                arrays[name] = arrays[name].astype(wanted)
        elif kind < 0.8:
            axis = rng.randrange(arrays[name].ndim)
            arrays[name] = np.repeat(arrays[name], rng.choice((0, 2, 3, 40)), axis=axis)
        elif kind < 0.85 and len(arrays) > 1:
            del arrays[name]
        else:
            key = rng.choice(list(words) or ["x"])
            old = words.get(key, "null")
            words[key] = rng.choice(
                (str(scalar(rng)), json.dumps(value(rng)), octets(rng, old.encode()).decode("utf-8", "replace"))
            )
    made = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return bytes(safetensors.numpy.save(made, words))


def _figure(rng: random.Random, dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "f":
        return rng.choice((math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-40, 1099.0, 3e38, rng.random() * 100))
    if dtype.kind == "b":
        return rng.random() < 0.5
    limits = np.iinfo(dtype)
    return rng.choice((0, 1, -1, 2, 5, limits.max, limits.min, rng.randrange(-3, 100)))


def lines(rng: random.Random, text: str, hostile: tuple[str, ...]) -> str:
    """Program text with words, numbers and lines changed, or a hostile line put in."""
    parts = text.split("\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(parts))
        kind = rng.random()
        if kind < 0.35:
            words = parts[at].split(" ")
            place = rng.randrange(len(words))
            words[place] = rng.choice((str(scalar(rng)), rng.choice(text.split()), words[place] * 2, ""))
            parts[at] = " ".join(words)
        elif kind < 0.5:
            parts[at] = "".join(
                str(rng.choice((0, -1, 2**31, 2**63, 10**30))) if c.isdigit() and rng.random() < 0.4 else c
                for c in parts[at]
            )
        elif kind < 0.6:
            parts[at : at + 1] = [parts[at]] * rng.choice((0, 2, 40))
        elif kind < 0.85:
            indent = parts[at][: len(parts[at]) - len(parts[at].lstrip())]
            parts.insert(at, indent + rng.choice(hostile))
        else:
            place = rng.randrange(len(parts[at]) + 1)
            odd = chr(rng.choice((9, 34, 40, 41, 58, 91, 92, 960, 0x10FFFF)))
            parts[at] = parts[at][:place] + odd + parts[at][place:]
    return "\n".join(parts)
