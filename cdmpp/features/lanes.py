"""The lanes of a warp: index expressions evaluated at points of the loops, and what a request of a warp costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cdmpp.errors import InvalidProgramError
from cdmpp.features.ast import Buffer
from cdmpp.features.launch_schema import BANKS, SECTOR_BYTES, WARP, WORD_BYTES
from cdmpp.features.leaf import element_bytes
from cdmpp.features.statements import THREADS, Condition, Recorder, Statement

Array = np.ndarray[Any, np.dtype[Any]]

#: Elements of a vector, more than any GPU moves at once; a longer loop is none.
_MOST_LANES = 64


class Lanes:
    """Values of a statement's expressions in the lanes of warps.

    Arrays have the axes (points, lanes, elements of a vector), each of which may be 1. ``threads``: of a block along x,
    y and z. ``own``: loops that a thread runs for the statement. ``points``: at most so many combinations of block,
    warp and iterations.
    """

    def __init__(
        self, recorder: Recorder, statement: Statement, threads: Sequence[int], path: Sequence[int], points: int
    ) -> None:
        self._recorder, self._statement = recorder, statement
        loops = recorder.ast.loops
        vectors = (p for p in reversed(path) if loops[p].kind == "vectorized" and int(loops[p].extent) <= _MOST_LANES)
        vector = next(vectors, None)
        moving = [p for p in statement.path if loops[p].kind not in THREADS and p != vector]
        count = math.prod(threads)
        at = _points([math.ceil(count / WARP), *(int(loops[p].extent) for p in moving)], points)
        thread = at[0][:, None] * WARP + np.arange(min(WARP, count))[None, :]
        self._exists = (thread < count)[:, :, None]
        x, y, _ = threads
        coordinates = dict(zip(THREADS, (thread % x, thread // x % y, thread // (x * y)), strict=True))
        self._iteration: dict[int, Array] = dict(zip(moving, (a[:, None, None] for a in at[1:]), strict=True))
        for p in statement.path:
            if loops[p].kind in THREADS:
                self._iteration[p] = coordinates[loops[p].kind][:, :, None]
        if vector is not None:
            self._iteration[vector] = np.arange(int(loops[vector].extent))[None, None, :]
        self._values: dict[int, Any] = {}

    def active_share(self) -> float:
        """Share of the lanes in which the conditions of the statement hold."""
        held = self._active(self._statement.conditions)
        return float(held.sum() / np.broadcast_to(self._exists, held.shape).sum())

    def transactions(
        self,
        buffer: Buffer,
        shape: Sequence[int],
        indices: Sequence[int],
        conditions: Sequence[Condition],
        box: Sequence[int] = (),
    ) -> tuple[float, float, int]:
        """What a warp requests in one run of the loops: sectors (global) or bank cycles (shared), mean over the points.

        The second figure is the bytes of one instruction of a lane, the third the instructions of a run.

        ``shape``: of the buffer in memory, row-major. ``conditions``: those around the access; a vector that is not
        contiguous is one request per element. ``box``: sizes of the box that the warp accesses at once, with its lowest
        corner at the indices; empty: an element for each lane. In shared memory a request is 8 rows of 16 bytes, as of
        ``ldmatrix``.
        """
        width = element_bytes(buffer.dtype)
        address: Array = np.zeros((1, 1, 1), dtype=np.int64)
        stride = 1
        for index, size in zip(reversed(indices), reversed(shape), strict=True):
            address = address + np.asarray(self.value(index)) * stride
            stride *= size
        address, active = np.broadcast_arrays(address * width, self._active(conditions))
        if box:
            steps = (np.arange(n) * math.prod(shape[d + 1 :]) * width for d, n in enumerate(box))
            inside = np.asarray(sum(np.ix_(*steps))).reshape(-1, box[-1])
            requests = _box(address[:, :1, 0], active[:, :1, 0], inside, buffer.scope == "global", width)
            return requests, inside.size * width / WARP, 1
        lanes, parts = address.shape[2], 1
        if lanes > 1 and not bool((np.diff(address, axis=2) == width).all()):
            address, active = (np.moveaxis(a, 2, 1) for a in (address, active))
            address, active, parts = address.reshape(-1, address.shape[2]), active.reshape(-1, active.shape[2]), lanes
        else:
            address, active = address.reshape(len(address), -1), active.reshape(len(active), -1)
        count = _sectors(address, active) if buffer.scope == "global" else _cycles(address, active, width)
        return float(count.mean()) * parts, width * lanes / parts, parts

    def _active(self, conditions: Sequence[Condition]) -> Array:
        held = self._exists
        for condition, holds in conditions:
            value = np.asarray(self.value(condition), dtype=bool)
            held = held & (value if holds else ~value)
        return held

    def value(self, index: int) -> Any:
        """Value of an integer expression: a number, or an array."""
        known = self._values.get(index)
        if known is None:
            known = self._values[index] = self._compute(index)
        return known

    def _compute(self, index: int) -> Any:
        recorder = self._recorder
        if index in recorder.loop_of:
            loop, start, step = recorder.loop_of[index]
            # A loop around another statement only: its first iteration.
            return start + step * self._iteration.get(loop, np.zeros((1, 1, 1), dtype=np.int64))
        if index in recorder.value_of:
            return self.value(recorder.value_of[index])
        node = recorder.nodes[index]
        data: Any = node.get("data")
        kind = node["type"].rpartition(".")[2]
        if kind == "int":
            return int(data)
        if kind == "IntImm":
            return int(recorder.data(data["value"]))
        if kind == "FloatImm":
            return float(data["value"])
        if kind in _FUNCTIONS:
            return _FUNCTIONS[kind](self.value(data["a"]), self.value(data["b"]))
        if kind == "Not":
            return np.logical_not(self.value(data["a"]))
        if kind == "Cast":
            return self.value(data["value"])
        if kind == "Select":
            return np.where(*(self.value(data[k]) for k in ("condition", "true_value", "false_value")))
        if kind == "Broadcast":
            return self.value(data["value"])
        if kind == "Ramp":
            lanes = int(self.value(data["lanes"]))
            if lanes > _MOST_LANES:
                raise InvalidProgramError(f"a vector has {lanes} elements", hint=f"at most {_MOST_LANES}")
            return self.value(data["base"]) + self.value(data["stride"]) * np.arange(lanes)[None, None, :]
        if kind == "Call":
            name, arguments = recorder.call_name(data).rpartition(".")[2], recorder.array(data["args"])
            if name.endswith("if_then_else"):
                return np.where(*(self.value(a) for a in arguments))
            if name in _CALLS and len(arguments) == 2:
                return _CALLS[name](self.value(arguments[0]), self.value(arguments[1]))
            if name == "likely":
                return self.value(arguments[0])
        # Loaded from memory, or a call: the same in every lane.
        return 0


def _divide(a: Any, b: Any) -> Any:
    return np.floor_divide(a, np.where(np.equal(b, 0), 1, b))


def _remainder(a: Any, b: Any) -> Any:
    return np.mod(a, np.where(np.equal(b, 0), 1, b))


_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": _divide,
    "Div": _divide,
    "FloorMod": _remainder,
    "Mod": _remainder,
    "Min": np.minimum,
    "Max": np.maximum,
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
}
_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}


def _points(sizes: Sequence[int], limit: int) -> list[Array]:
    """Coordinates of all points of a box; of so many random ones where there are more."""
    if math.prod(sizes) <= limit:
        return [np.asarray(a) for a in np.unravel_index(np.arange(math.prod(sizes)), sizes)]
    random = np.random.default_rng(0)
    return [random.integers(0, size, limit) for size in sizes]


def _box(corner: Array, active: Array, inside: Array, sectors: bool, width: float) -> float:
    """Sectors or cycles for the rows and columns of addresses ``inside`` a box at (points, 1) corners, mean."""
    if sectors:
        requests: Array = inside.reshape(1, -1)
    else:
        rows, columns = math.gcd(8, len(inside)), math.gcd(int(16 // width), inside.shape[1])
        parts = inside.reshape(-1, rows, inside.shape[1] // columns, columns).swapaxes(1, 2)
        requests = parts.reshape(-1, rows * columns)
    address = (corner[:, :, None] + requests).reshape(-1, requests.shape[1])
    held = np.broadcast_to(np.repeat(active, len(requests), axis=0), address.shape)
    return float((_sectors(address, held) if sectors else _cycles(address, held, width)).sum() / len(corner))


def _distinct(values: Array, active: Array) -> tuple[Array, Array]:
    """Values of each row in order, and where one differs from the one before; inactive ones are left out."""
    ordered = np.sort(np.where(active, values, np.iinfo(np.int64).max), axis=1)
    first = np.ones(ordered.shape, dtype=bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return ordered, first & (ordered != np.iinfo(np.int64).max)


def _sectors(address: Array, active: Array) -> Array:
    """Distinct sectors of each row of addresses in bytes."""
    return np.asarray(_distinct(np.floor_divide(address, SECTOR_BYTES).astype(np.int64), active)[1].sum(axis=1))


def _cycles(address: Array, active: Array, width: float) -> Array:
    """Largest number of distinct words of one bank in each row of addresses in bytes."""
    words = np.floor_divide(address, WORD_BYTES).astype(np.int64)
    if width > WORD_BYTES:
        more = np.arange(int(width // WORD_BYTES))
        words = (words[:, :, None] + more).reshape(len(words), -1)
        active = np.repeat(active, len(more), axis=1)
    ordered, first = _distinct(words, active)
    place = np.arange(len(ordered))[:, None] * BANKS + ordered % BANKS
    counts = np.bincount(place[first], minlength=len(ordered) * BANKS).reshape(len(ordered), BANKS)
    return np.asarray(counts.max(axis=1))
