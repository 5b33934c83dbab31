"""Columns of a GPU schedule: threads, registers, coalescing, bank conflicts, staging through shared memory.

They depend on the program alone. What depends on the device too (occupancy, waves, rates) is computed where program
and device meet. A program without thread bindings has zeros in every column.

A warp is 32 consecutive threads, threadIdx.x first. Its addresses follow from the steps of the indices: a request to
global memory touches sectors of 32 bytes, a request to shared memory takes as many cycles as different words fall into
one of 32 banks. An index that is loaded from memory is taken to be the same in every thread.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np

from cdmpp.features.affine import AffineRange
from cdmpp.features.ast import OPERATIONS, Access, CompactAST, Leaf
from cdmpp.features.leaf import element_bytes

Array = np.ndarray[Any, np.dtype[np.float32]]

GPU_VERSION = 1
WARP, SECTOR_BYTES, BANKS, WORD_BYTES = 32, 32, 32, 4
#: Values of an index up to which equal ones are found.
MANY_VALUES = 4096
#: Most lanes of a vector, far more than any GPU moves at once.
MOST_LANES = 1024.0

#: Of the whole program, equal in all its leaves.
PROGRAM = ("threads", "blocks", "warps", "local_words", "shared_bytes")
#: Of a leaf, per thread (instructions), per warp (sectors, cycles) or per block (bytes).
LEAF = (
    "trips",
    "float_ops",
    "int_ops",
    "slow_ops",
    "calls",
    "conditional_ops",
    "loop_steps",
    "global_loads",
    "global_load_sectors",
    "global_load_bytes",
    "global_stores",
    "global_store_sectors",
    "shared_loads",
    "shared_load_cycles",
    "shared_stores",
    "shared_store_cycles",
    "staged_bytes",
    "staging_rounds",
    "block_bytes",
    "thread_bytes",
)
#: Of a leaf, the largest counts for the program.
LARGEST = ("accumulators", "unrolled_body", "global_vector_bytes", "shared_vector_bytes", "overhang")
#: Shares from 0 to 1.
GPU_FLAGS = ("lane_use", "load_efficiency", "store_efficiency", "bank_efficiency")
GPU_COLUMNS: tuple[str, ...] = (*PROGRAM, *LEAF, *LARGEST, *GPU_FLAGS)
GPU_WIDTH = len(GPU_COLUMNS)
GPU_HASH = hashlib.sha256(f"{GPU_VERSION}\n{','.join(GPU_COLUMNS)}".encode()).hexdigest()[:16]

_COUNT = {name: i for i, name in enumerate(OPERATIONS)}
_FLOATS = [_COUNT[f"float_{name}"] for name in ("add", "mul", "compare")]
_INTEGERS = [_COUNT[name] for name in ("int_add", "int_mul", "int_compare", "int_other", "select")]
_SLOW = [_COUNT[name] for name in ("float_div", "float_math", "float_cast", "int_div")]


def gpu_columns(ast: CompactAST) -> Array:
    """Columns of a GPU schedule.

    Returns
    -------
    ndarray of float32, (leaves, GPU_WIDTH)
        Magnitudes as log2(1 + x), shares as they are; columns named by :data:`GPU_COLUMNS`.
    """
    launch = _launch(ast)
    out = np.zeros((len(ast.leaves), GPU_WIDTH))
    if launch is None:
        return out.astype(np.float32)
    program = [
        float(launch.threads),
        float(launch.blocks),
        float(math.ceil(launch.threads / WARP)),
        sum(_elements(b.shape) * max(element_bytes(b.dtype) / WORD_BYTES, 1.0) for b in ast.buffers if _is(b, "local")),
        sum(_elements(b.shape) * element_bytes(b.dtype) for b in ast.buffers if _is(b, "shared")),
    ]
    for i, leaf in enumerate(ast.leaves):
        columns = _Leaf(ast, leaf, launch)
        out[i] = [*program, *columns.counts(), *columns.largest(), *columns.shares()]
    magnitudes = GPU_WIDTH - len(GPU_FLAGS)
    out[:, :magnitudes] = np.log2(1 + np.maximum(out[:, :magnitudes], 0))
    return out.astype(np.float32)


class _Launch(NamedTuple):
    """Blocks, threads, and the coordinates of a warp's lanes by tag."""

    blocks: int
    threads: int
    lanes: int
    coordinates: dict[str, Any]


def _launch(ast: CompactAST) -> _Launch | None:
    """The launch of a program with thread bindings; None for any other."""
    extents: dict[str, int] = {}
    for loop in ast.loops:
        if loop.kind.startswith(("blockIdx", "threadIdx")):
            extents[loop.kind] = max(extents.get(loop.kind, 1), int(loop.extent))
    if not extents:
        return None
    threads = [extents.get(f"threadIdx.{axis}", 1) for axis in "xyz"]
    blocks = math.prod(extents.get(f"blockIdx.{axis}", 1) for axis in "xyz")
    lanes = min(WARP, math.prod(threads))
    lane = np.arange(lanes)
    x, rest = lane % threads[0], lane // threads[0]
    coordinates = {"threadIdx.x": x, "threadIdx.y": rest % threads[1], "threadIdx.z": rest // threads[1]}
    return _Launch(blocks, math.prod(threads), lanes, coordinates)


class _Request(NamedTuple):
    """What one access costs."""

    instructions: float  # per thread
    bytes: float  # of one instruction of one thread
    transactions: float  # sectors or cycles of one instruction of a warp
    efficiency: float  # least transactions over transactions


class _Leaf:
    """Counts of one leaf."""

    def __init__(self, ast: CompactAST, leaf: Leaf, launch: _Launch) -> None:
        self.ast, self.leaf, self.launch = ast, leaf, launch
        loops = ast.loops
        # Of a thread, outermost first.
        self.own = [p for p in leaf.path if not loops[p].kind.startswith(("blockIdx", "threadIdx"))]
        self.extent = {p: float(loops[p].extent) for p in leaf.path}
        self.kind = {p: loops[p].kind for p in leaf.path}
        self.unrolled = {p for p in self.own if self.kind[p] in ("unrolled", "vectorized")} | self._by_pragma()
        self.trips = math.prod(self.extent[p] for p in self.own)
        self.reads = [(access, self._request(access)) for access in leaf.reads]
        self.store = self._request(leaf.store)

    def _by_pragma(self) -> set[int]:
        """Serial loops that are unrolled by the maximum step of a loop around them."""
        step = max((self.ast.loops[p].unroll_step for p in self.leaf.path), default=0)
        chosen, size = set[int](), 1.0
        for p in reversed(self.own):
            size *= self.extent[p]
            if size > step:
                break
            chosen.add(p)
        return chosen

    def counts(self) -> list[float]:
        """The columns :data:`LEAF`."""
        operations = self.leaf.counts
        floats, integers, slow = (sum(operations[i] for i in group) for group in (_FLOATS, _INTEGERS, _SLOW))
        # A multiplication and an addition are one instruction.
        floats -= min(operations[_COUNT["float_fma"]], floats)
        loads = {scope: [r for a, r in self.reads if _is(a.buffer, scope)] for scope in ("global", "shared")}
        stored = self.leaf.store.buffer
        stores = {scope: [self.store] if _is(stored, scope) else [] for scope in ("global", "shared")}
        launched = self.launch.threads
        global_bytes = sum(r.instructions * r.bytes for r in loads["global"])
        conditional = float(bool(self.leaf.predicated)) * (floats + integers + slow + 1)
        block_bytes, thread_bytes = (
            sum(self._unique(access, request, threads) for access, request in self._of("global"))
            for threads in (launched, 0)
        )
        return [
            self.trips,
            floats * self.trips,
            integers * self.trips,
            slow * self.trips,
            operations[_COUNT["other_call"]] * self.trips,
            conditional * self.trips,
            self._loop_steps(),
            *_totals(loads["global"]),
            global_bytes,
            *_totals(stores["global"]),
            *_totals(loads["shared"]),
            *_totals(stores["shared"]),
            sum(r.instructions * r.bytes for r in stores["shared"]) * launched,
            self._rounds() if stores["shared"] else 0.0,
            block_bytes,
            thread_bytes,
        ]

    def largest(self) -> list[float]:
        """The columns :data:`LARGEST`."""
        store = self.leaf.store
        reduces = bool(self.leaf.reduce_loops.intersection(self.own)) and not self.leaf.is_init
        elements = _elements(store.buffer.shape) if _is(store.buffer, "local") else 1.0
        body = math.prod(self.extent[p] for p in self.unrolled)
        widths = [
            max((r.bytes for a, r in [*self.reads, (store, self.store)] if _is(a.buffer, scope)), default=0.0)
            for scope in ("global", "shared")
        ]
        written = self.trips * self.launch.threads * self.launch.blocks
        overhang = written / _elements(store.buffer.shape) if store.buffer.is_parameter else 0.0
        return [elements if reduces else 0.0, body, *widths, overhang]

    def shares(self) -> list[float]:
        """The columns :data:`GPU_FLAGS`; 1 where a leaf has no such access."""
        loads = [r for a, r in self.reads if _is(a.buffer, "global")]
        shared = [r for a, r in self.reads if _is(a.buffer, "shared")]
        stored = _is(self.leaf.store.buffer, "global")
        lanes = self.launch.threads / (WARP * math.ceil(self.launch.threads / WARP))
        return [lanes, _mean_efficiency(loads), self.store.efficiency if stored else 1.0, _mean_efficiency(shared)]

    # -- accesses -----------------------------------------------------------------------------------------
    def _of(self, scope: str) -> list[tuple[Access, _Request]]:
        return [(a, r) for a, r in (*self.reads, (self.leaf.store, self.store)) if _is(a.buffer, scope)]

    def _request(self, access: Access) -> _Request:
        """Instructions of a thread and transactions of a warp."""
        strides, width = _strides(access), element_bytes(access.buffer.dtype)
        vector = next((p for p in reversed(self.own) if self.kind[p] == "vectorized"), None)
        moved = _moved_by(access)
        if access is self.leaf.store:
            # What is stored changes with what is read; a sum over a loop is stored after it.
            moved |= set().union(*map(_moved_by, self.leaf.reads)) - self.leaf.reduce_loops
        lanes = 1.0
        if vector is not None:
            step = sum(float(i.steps.get(vector, 0.0)) * s for i, s in zip(access.indices, strides, strict=True))
            lanes = min(self.extent[vector], MOST_LANES) if step == 1.0 else 1.0
        last = max((n for n, p in enumerate(self.own) if p in moved), default=-1)
        # Straight code loads an address once; a loop outside of all that move the address loads it again.
        repeated = (p for n, p in enumerate(self.own) if n <= last and p not in self.unrolled)
        if access is self.leaf.store:
            straight = math.prod(self.extent[p] for p in self.unrolled if p in moved)
        else:
            straight = math.prod(self._values(index) for index in access.indices)
        instructions = math.prod(self.extent[p] for p in repeated) * straight / lanes
        size = width * lanes
        if _is(access.buffer, "local"):
            return _Request(instructions, size, 0.0, 1.0)
        addresses = np.zeros(self.launch.lanes)
        for index, stride in zip(access.indices, strides, strict=True):
            offset = np.zeros(self.launch.lanes)
            for loop, step in index.steps.items():
                where = self.launch.coordinates.get(self.ast.loops[loop].kind)
                if where is not None:
                    offset = offset + float(step) * where
            span = float(index.high) - float(index.low) + 1
            offset = np.floor(offset + 1e-9)
            addresses += (offset % span if offset.max() >= span else offset) * stride * width
        first = np.unique(addresses - addresses.min())
        if _is(access.buffer, "shared"):
            words = np.unique((first[:, None] // WORD_BYTES + np.arange(max(size // WORD_BYTES, 1.0))).astype(np.int64))
            cycles = float(np.bincount(words % BANKS).max())
            return _Request(instructions, size, cycles, math.ceil(len(words) / BANKS) / cycles)
        ends = (first + size - 1) // SECTOR_BYTES
        touched = np.unique(np.concatenate([first // SECTOR_BYTES, ends]))
        inside = np.maximum(ends - first // SECTOR_BYTES - 1, 0).sum()
        sectors = float(len(touched) + inside)
        return _Request(instructions, size, sectors, min(len(first) * size / (sectors * SECTOR_BYTES), 1.0))

    def _values(self, index: AffineRange) -> float:
        """Different values of an index within the unrolled loops."""
        steps = [(float(index.steps[p]), int(self.extent[p])) for p in self.unrolled if index.steps.get(p)]
        every = float(math.prod(extent for _, extent in steps))
        if len(steps) < 2:
            return every
        values = {0.0}
        for step, extent in steps:
            if len(values) * extent > 16 * MANY_VALUES:  # too many sums to compare in memory
                return every
            values = {value + step * i for value in values for i in range(extent)}
            if len(values) > MANY_VALUES:
                return every
        return float(len(values))

    def _unique(self, access: Access, request: _Request, threads: int) -> float:
        """Bytes of different sectors that so many threads (a block; 0: one thread) touch."""
        loops = self.own if not threads else [p for p in self.leaf.path if not self.kind[p].startswith("blockIdx")]
        width, count = element_bytes(access.buffer.dtype), 1.0
        for place, index in enumerate(reversed(access.indices)):
            steps = sorted((abs(float(index.steps[p])), self.extent[p]) for p in loops if index.steps.get(p))
            size = float(access.buffer.shape[len(access.indices) - 1 - place]) if access.buffer.shape else 1.0
            run, runs = 1.0, 1.0
            for step, extent in steps:
                if step <= run:
                    run += step * (extent - 1)
                else:
                    runs *= extent
            if place == 0:
                run = math.ceil(min(run, size) * width / SECTOR_BYTES) * SECTOR_BYTES
                count *= run * runs
            else:
                count *= min(run * runs, size)
        whole = math.ceil(_elements(access.buffer.shape) * width / SECTOR_BYTES) * SECTOR_BYTES
        # Steps of quotients and remainders are means: never more than all instructions touch.
        return min(count, whole, request.instructions * max(request.bytes * max(threads, 1), SECTOR_BYTES))

    # -- loops --------------------------------------------------------------------------------------------
    def _loop_steps(self) -> float:
        """Iterations of loops that are not unrolled."""
        total, outside = 0.0, 1.0
        for p in self.own:
            if p not in self.unrolled:
                outside *= self.extent[p]
                total += outside
        return total

    def _rounds(self) -> float:
        """How often the block waits between filling a shared buffer and reading it."""
        buffer = self.leaf.store.buffer
        readers = [r.path for r in self.ast.leaves if any(a.buffer is buffer for a in r.reads)]
        common = set(self.own).intersection(*map(set, readers)) if readers else set()
        return float(math.prod(self.extent[p] for p in common))


def _moved_by(access: Access) -> set[int]:
    """Loops that the address of an access depends on."""
    return set().union(*(index.steps for index in access.indices))


def _is(buffer: Any, scope: str) -> bool:
    return bool(buffer.scope == scope)


def _elements(shape: list[Any]) -> float:
    return float(math.prod(shape))


def _strides(access: Access) -> list[float]:
    """Elements between neighbours of each dimension, row-major."""
    shape = [float(size) for size in access.buffer.shape[1 : len(access.indices)]]
    strides = [1.0]
    for size in reversed(shape):
        strides.insert(0, strides[0] * size)
    return strides[: len(access.indices)]


def _totals(requests: list[_Request]) -> tuple[float, float]:
    """Instructions of a thread, transactions of a warp."""
    return (sum(r.instructions for r in requests), sum(r.instructions * r.transactions for r in requests))


def _mean_efficiency(requests: list[_Request]) -> float:
    """Mean over transactions; 1 without any."""
    total = sum(r.instructions * r.transactions for r in requests)
    return sum(r.instructions * r.transactions * r.efficiency for r in requests) / total if total else 1.0
