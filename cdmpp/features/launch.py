"""Launches of a GPU program: threads, memory of a block and a thread, and the requests of a warp.

The index expressions of each statement are evaluated for the 32 lanes of warps at points of the other loops, so the
counts hold for any index: sectors of 32 bytes in global memory, words of one bank in shared memory, active lanes.
Buffers of a scheduled program are declared with the size of the whole tensor. What a thread or a block holds follows
from the ranges of the indices below its allocation, as in TVM's ``CompactBufferAllocation``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cdmpp.errors import InvalidProgramError
from cdmpp.features.affine import AffineRange
from cdmpp.features.ast import OPERATIONS, Access, Buffer, Leaf
from cdmpp.features.expressions import INTEGER, Expressions
from cdmpp.features.leaf import element_bytes
from cdmpp.features.walk import Walker
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.tvm_json import HINT, Nodes, load

Array = np.ndarray[Any, np.dtype[Any]]

WARP, SECTOR_BYTES, BANKS, WORD_BYTES = 32, 32, 32, 4
#: Points of the other loops at which a warp is evaluated; all of them where there are no more.
POINTS = 2048
#: Outer points at which the range of a buffer's indices is looked at.
_CORNERS = 3
_THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
_OPERANDS = ("a", "b", "value", "condition", "true_value", "false_value", "base", "stride")
_BLOCKS = ("blockIdx.x", "blockIdx.y", "blockIdx.z")


def launch_summary(program: TensorProgram, *, points: int = POINTS) -> list[dict[str, Any]]:
    """What each kernel of a GPU program launches and requests.

    Parameters
    ----------
    program : TensorProgram
        TIR with thread bindings, scheduled or lowered.
    points : int
        Points of blocks, warps and loops at which the addresses of a statement are evaluated.

    Returns
    -------
    list of dict, one per kernel in launch order
        ``blocks``, ``threads`` (of a block), ``vthreads``; ``shared_bytes`` of a block; ``local_words``: 32-bit words
        of a thread with all its virtual threads; ``main_store_trips``: runs per thread of the store with most
        arithmetic; ``global_load_sectors``, ``global_store_sectors``: sectors of 32 bytes of a warp over all trips;
        ``shared_load_cycles``, ``shared_store_cycles``: cycles of a warp over all trips; ``active_lanes``: share of
        lanes whose predicates hold, weighted by trips. Empty for a program without thread bindings.

    Raises
    ------
    InvalidProgramError
        As :func:`cdmpp.features.walk.build_ast`; also for an operator, which has no schedule.
    """
    if program.operator is not None:
        raise InvalidProgramError(
            f"{program.name} is an operator, which has no schedule", hint="pass a TVM program: TVM JSON or TVMScript"
        )
    return [kernel.summary(points) for kernel in kernels(*load(program.tvm_json or ""), program.function)]


def kernels(nodes: Nodes, root: int, function: str | None = None) -> list[Kernel]:
    """Kernels of a PrimFunc in launch order; arguments and errors as of :func:`cdmpp.features.walk.build_ast`."""
    recorder = _Recorder(nodes, {})
    recorder.build(root, function)
    return [Kernel(recorder, [s for s in recorder.statements if s.kernel == n]) for n in range(recorder.kernels)]


class _Load(NamedTuple):
    access: Access
    indices: list[int]  # nodes
    conditions: tuple[tuple[int, bool], ...]


@dataclass
class _Statement:
    """A store with the nodes of its indices, its loads, and the conditions around it."""

    leaf: Leaf
    path: tuple[int, ...]
    indices: list[int]
    loads: list[_Load]
    conditions: tuple[tuple[int, bool], ...]
    kernel: int
    vthreads: frozenset[int] = frozenset()

    def accesses(self) -> Iterable[tuple[Access, list[int], bool]]:
        """Each access, the nodes of its indices, and whether it reads."""
        yield self.leaf.store, self.indices, False
        for read in self.loads:
            yield read.access, read.indices, True


class _Recorder(Walker):
    """A walk that keeps the nodes of indices and conditions beside the compact AST."""

    def __init__(self, nodes: Nodes, bindings: dict[str, Any]) -> None:
        super().__init__(nodes, bindings)
        self.statements: list[_Statement] = []
        self.kernels = 0
        #: Variable -> (loop, start, step), or the node of its value.
        self.loop_of: dict[int, tuple[int, Any, Any]] = {}
        self.value_of: dict[int, int] = {}
        self._conditions: tuple[tuple[int, bool], ...] = ()
        self._inside = 0

    def loop(
        self, var: int, name: str, extent: Any, kind: str, body: int, unroll: int = 0, start: Any = 0, step: Any = 1
    ) -> None:
        """Enter a loop; the first one of blocks or threads begins a kernel."""
        known = self._thread_loops.get(kind)
        self.loop_of[var] = (len(self.ast.loops) if known is None else known, start, step)
        bound = kind in _THREADS or kind in _BLOCKS
        if bound and not self._inside:
            self.kernels += 1
        self._inside += bound
        super().loop(var, name, extent, kind, body, unroll, start, step)
        self._inside -= bound

    def block_realize(self, data: dict[str, Any]) -> None:
        """SBlockRealize: its variables have the nodes of their values; its predicate is a condition."""
        before = self._conditions
        variables = self.array(self.data(data["block"])["iter_vars"])
        for variable, value in zip(variables, self.array(data["iter_values"]), strict=True):
            self.value_of[self.data(variable)["var"]] = value
        self._conditions = (*before, (data["predicate"], True))
        super().block_realize(data)
        self._conditions = before

    def if_then_else(self, data: dict[str, Any]) -> None:
        """IfThenElse: a condition around one case, and its opposite around the other."""
        before = self._conditions
        held = self.predicates
        self.predicates = held + (1 - self.holds(data["condition"]))
        for case, holds in (("then_case", True), ("else_case", False)):
            if not self._is_none(data[case]):
                self._conditions = (*before, (data["condition"], holds))
                self.statement(data[case])
        self.predicates, self._conditions = held, before

    def bind(self, data: dict[str, Any]) -> None:
        """Bind, LetStmt."""
        self.value_of[data["var"]] = data["value"]
        super().bind(data)

    def store(self, data: dict[str, Any]) -> None:
        """BufferStore."""
        super().store(data)
        loads: list[_Load] = []
        self._collect(data["value"], self._conditions, loads)
        path, inner = tuple(self._path), self.ast.leaves[-1]
        if inner.is_init:
            path = tuple(p for p in path if not self.ast.loops[p].reduces)
        kernel = self.kernels - 1 if self._inside else -1
        self.statements.append(_Statement(inner, path, self.array(data["indices"]), loads, self._conditions, kernel))

    def _collect(self, index: int, conditions: tuple[tuple[int, bool], ...], loads: list[_Load]) -> None:
        """Loads of a stored value, each address once, under the conditions of ``if_then_else``."""
        stack = [(index, conditions)]
        seen: set[tuple[int, ...]] = set()
        while stack:
            item, held = stack.pop()
            self.spend(1)
            node = self.nodes[item]
            kind, data = node["type"].rpartition(".")[2], node.get("data")
            if kind == "TensorLoad":
                indices = self.array(data["indices"])
                key = (data["source"], *indices)
                if key not in seen:
                    seen.add(key)
                    access = Access(self.buffer(data["source"]), [self.expression(i) for i in indices])
                    loads.append(_Load(access, indices, held))
            elif kind == "Call":
                arguments = self.array(data["args"])
                if self.call_name(data).endswith("if_then_else"):
                    condition, yes, no = arguments
                    stack += [(yes, (*held, (condition, True))), (no, (*held, (condition, False)))]
                else:
                    stack += [(a, held) for a in arguments]
            elif kind == "Var" and item in self.values:
                stack.append((self.values[item], held))
            else:
                stack += [(child, held) for child in _children(self, item)]


    def loops_of(self, index: int) -> frozenset[int]:
        """Loops whose variables an expression has."""
        found: set[int] = set()
        stack, seen = [index], set[int]()
        while stack:
            item = stack.pop()
            if item in seen:
                continue
            seen.add(item)
            if item in self.loop_of:
                found.add(self.loop_of[item][0])
            elif item in self.value_of:
                stack.append(self.value_of[item])
            else:
                stack += _children(self, item)
        return frozenset(found)


def _children(expressions: Expressions, index: int) -> list[int]:
    """Nodes of the operands of an expression."""
    data = expressions.nodes[index].get("data")
    if type(data) is not dict:
        return []
    operands = [data[k] for k in _OPERANDS if k in data]
    for name in ("args", "indices"):
        operands += expressions.array(data[name]) if name in data else []
    return [i for i in operands if type(i) is int]


class Kernel:
    """One launch.

    Parameters
    ----------
    recorder : _Recorder
    statements : list of _Statement
        Those of this launch, in order.
    """

    def __init__(self, recorder: _Recorder, statements: list[_Statement]) -> None:
        self._recorder, self.statements = recorder, statements
        loops = recorder.ast.loops
        self.loops = loops
        used = {p for s in statements for p in s.path}
        extents: dict[str, int] = {}
        for p in used:
            extents[loops[p].kind] = max(extents.get(loops[p].kind, 1), int(loops[p].extent))
        self.shape = [extents.get(tag, 1) for tag in _THREADS]
        self.blocks = math.prod(extents.get(tag, 1) for tag in _BLOCKS)
        self.threads = math.prod(self.shape)
        self._vthreads = frozenset(p for p in used if loops[p].kind.startswith("vthread"))
        self.vthreads = math.prod(int(loops[p].extent) for p in self._vthreads)
        self._held = self._moved_buffers()
        self.sizes = self._compact_sizes()

    def summary(self, points: int) -> dict[str, Any]:
        """The figures of :func:`launch_summary`."""
        sums = dict.fromkeys(
            ("global_load_sectors", "global_store_sectors", "shared_load_cycles", "shared_store_cycles"), 0.0
        )
        trips_of_all = active = 0.0
        for statement in self.statements:
            lanes = _Lanes(self, statement, points)
            trips = self.trips(statement)
            trips_of_all += trips
            active += trips * lanes.active_share()
            for access, indices, conditions, read in (
                (statement.leaf.store, statement.indices, statement.conditions, False),
                *((load.access, load.indices, load.conditions, True) for load in statement.loads),
            ):
                scope = access.buffer.scope
                if scope in ("global", "shared"):
                    name = f"{scope}_{'load' if read else 'store'}_{'sectors' if scope == 'global' else 'cycles'}"
                    sums[name] += lanes.requests(access, indices, conditions, read)
        shared = sum(
            math.prod(shape) * element_bytes(buffer.dtype)
            for buffer, shape in self.sizes
            if buffer.scope == "shared"
        )
        local = sum(
            math.ceil(math.prod(shape) * element_bytes(buffer.dtype) / WORD_BYTES) * self._copies(buffer)
            for buffer, shape in self.sizes
            if buffer.scope == "local"
        )
        return {
            "blocks": self.blocks,
            "threads": self.threads,
            "vthreads": self.vthreads,
            "shared_bytes": int(shared),
            "local_words": int(local),
            "main_store_trips": self.trips(max(self.statements, key=self._arithmetic)),
            **sums,
            "active_lanes": active / trips_of_all if trips_of_all else 1.0,
        }

    def own(self, statement: _Statement) -> list[int]:
        """Loops that a thread runs for a statement, outermost first; of virtual threads those that it depends on."""
        return [
            p
            for p in statement.path
            if self.loops[p].kind not in _THREADS
            and self.loops[p].kind not in _BLOCKS
            and (p not in self._vthreads or p in statement.vthreads)
        ]

    def shared_loops(self, access: Access, statement: _Statement, read: bool) -> set[int]:
        """Loops of a statement in which another one writes what an access reads, or uses what it writes."""
        loops: set[int] = set()
        for other in self.statements:
            if other is not statement and any(
                a.buffer is access.buffer and not (read and reads) for a, _, reads in other.accesses()
            ):
                loops.update(set(other.path).intersection(statement.path))
        return loops

    def trips(self, statement: _Statement) -> int:
        """Runs of a statement per thread."""
        return math.prod(int(self.loops[p].extent) for p in self.own(statement))

    def _arithmetic(self, statement: _Statement) -> tuple[float, int]:
        operations = sum(statement.leaf.counts[: OPERATIONS.index("select")])
        return operations * self.trips(statement), self.trips(statement)

    # -- virtual threads ----------------------------------------------------------------------------------
    def _moved_buffers(self) -> dict[int, frozenset[int]]:
        """Virtual threads that each buffer has a copy for; sets those of the statements too.

        A statement depends on a virtual thread by its indices and conditions, or by a buffer that has copies.
        """
        held: dict[int, frozenset[int]] = {}
        changed = bool(self._vthreads)
        while changed:
            changed = False
            for statement in self.statements:
                moved = frozenset(p for a, _, _ in statement.accesses() for i in a.indices for p in i.steps)
                moved |= frozenset(p for c, _ in statement.conditions for p in self._recorder.loops_of(c))
                for access, _, _ in statement.accesses():
                    moved |= held.get(id(access.buffer), frozenset())
                vthreads = moved & self._vthreads & frozenset(statement.path)
                target = statement.leaf.store.buffer
                if vthreads != statement.vthreads:
                    statement.vthreads, changed = vthreads, True
                if target.scope == "local" and not vthreads <= held.get(id(target), frozenset()):
                    held[id(target)] = held.get(id(target), frozenset()) | vthreads
                    changed = True
        return held

    def _copies(self, buffer: Buffer) -> int:
        return math.prod(int(self.loops[p].extent) for p in self._held.get(id(buffer), frozenset()))

    # -- what a thread or a block holds ---------------------------------------------------------------------
    def _compact_sizes(self) -> list[tuple[Buffer, list[int]]]:
        """Shape that a thread (local) or a block (shared) holds of each buffer."""
        accesses: dict[int, list[tuple[_Statement, Access, list[int], bool]]] = {}
        for statement in self.statements:
            for access, indices, reads in statement.accesses():
                if access.buffer.scope in ("local", "shared"):
                    accesses.setdefault(id(access.buffer), []).append((statement, access, indices, reads))
        return [(of[0][1].buffer, self._compact(of)) for of in accesses.values()]

    def _compact(self, accesses: list[tuple[_Statement, Access, list[int], bool]]) -> list[int]:
        buffer = accesses[0][1].buffer
        common = accesses[0][0].path
        for statement, *_ in accesses:
            common = tuple(a for a, b in zip(common, statement.path, strict=False) if a == b)
        spread = _THREADS if buffer.scope == "shared" else ()
        fixed = [
            p
            for p in common
            if self.loops[p].kind not in spread and not (buffer.scope == "shared" and p in self._vthreads)
        ]
        # What is only written is not needed: a copy is made of what is read.
        reads = [access for access in accesses if access[3]] or accesses
        sizes = [1] * len(buffer.shape)
        for corner in range(_CORNERS):
            lows: list[Any] = [math.inf] * len(sizes)
            highs: list[Any] = [-math.inf] * len(sizes)
            at = {p: (int(self.loops[p].extent) - 1) * corner // (_CORNERS - 1) for p in fixed}
            ranges = _Ranges(self._recorder, at)
            for _, access, indices, _ in reads:
                for d, index in enumerate(indices):
                    value = ranges.expression(index)
                    lows[d], highs[d] = min(lows[d], value.low), max(highs[d], value.high)
            sizes = [
                max(size, min(int(high - low) + 1, int(whole)))
                for size, low, high, whole in zip(sizes, lows, highs, buffer.shape, strict=True)
            ]
        return sizes


class _Ranges(Expressions):
    """Ranges of indices where some loops are fixed and the others run.

    Parameters
    ----------
    recorder : _Recorder
    at : dict of int to int
        Iteration of each fixed loop.
    """

    def __init__(self, recorder: _Recorder, at: dict[int, int]) -> None:
        super().__init__(recorder.nodes, recorder.bindings)
        self._recorder, self._at = recorder, at

    def expression(self, index: int) -> AffineRange:
        """Range of an index."""
        if index not in self.env:
            known = self._recorder.loop_of.get(index)
            if known is not None:
                loop, start, step = known
                extent = int(self._recorder.ast.loops[loop].extent)
                if loop in self._at:
                    value = start + step * self._at[loop]
                    self.env[index] = AffineRange(value, value)
                else:
                    self.env[index] = AffineRange(start, start + step * (extent - 1), {loop: step})
            elif index in self._recorder.value_of:
                self.env[index] = self.expression(self._recorder.value_of[index])
        return super().expression(index)


class _Lanes:
    """Values of a statement's expressions in the lanes of warps.

    Arrays have the axes (points, lanes, elements of a vector), each of which may be 1.

    Parameters
    ----------
    kernel : Kernel
    statement : _Statement
    points : int
        At most so many combinations of block, warp and iterations.
    """

    def __init__(self, kernel: Kernel, statement: _Statement, points: int) -> None:
        self._kernel, self._statement = kernel, statement
        recorder = self._recorder = kernel._recorder
        loops = kernel.loops
        own = kernel.own(statement)
        self._vector = next((p for p in reversed(own) if loops[p].kind == "vectorized"), None)
        moving = [p for p in statement.path if loops[p].kind not in _THREADS and p != self._vector]
        sizes = [int(loops[p].extent) for p in moving]
        warps = math.ceil(kernel.threads / WARP)
        at = _points([warps, *sizes], points)
        lane = np.arange(min(WARP, kernel.threads))
        thread = at[0][:, None] * WARP + lane[None, :]
        self._exists = (thread < kernel.threads)[:, :, None]
        x, y, _ = kernel.shape
        coordinates = {"threadIdx.x": thread % x, "threadIdx.y": thread // x % y, "threadIdx.z": thread // (x * y)}
        self._iteration: dict[int, Array] = dict(zip(moving, (a[:, None, None] for a in at[1:]), strict=True))
        for p in statement.path:
            if loops[p].kind in _THREADS:
                self._iteration[p] = coordinates[loops[p].kind][:, :, None]
        if self._vector is not None:
            self._iteration[self._vector] = np.arange(int(loops[self._vector].extent))[None, None, :]
        self._shape = self._exists.shape
        self._values: dict[int, Any] = {}
        self._compact = {id(buffer): shape for buffer, shape in kernel.sizes}
        self._recorder = recorder

    def active_share(self) -> float:
        """Share of the lanes in which the conditions of the statement hold."""
        held = self._active(self._statement.conditions)
        return float(held.sum() / np.broadcast_to(self._exists, held.shape).sum())

    def requests(
        self, access: Access, indices: Sequence[int], conditions: Sequence[tuple[int, bool]], read: bool
    ) -> float:
        """Sectors or bank cycles of a warp over all trips of the statement, mean over the points."""
        buffer = access.buffer
        shape = [int(size) for size in self._compact.get(id(buffer), buffer.shape)]
        width = element_bytes(buffer.dtype)
        address = np.zeros((1, 1, 1), dtype=np.int64)
        stride = 1
        for index, size in zip(reversed(indices), reversed(shape), strict=True):
            address = address + np.asarray(self.value(index)) * stride
            stride *= size
        active = self._active(conditions)
        address, active = np.broadcast_arrays(address * width, active & self._exists)
        instructions = self._instructions(access, read)
        lanes = address.shape[2]
        if lanes > 1 and not bool((np.diff(address, axis=2) == width).all()):
            # Each element of a vector that is not contiguous is a request.
            address, active = (np.moveaxis(a, 2, 1).reshape(-1, a.shape[1]) for a in (address, active))
            instructions *= lanes
        else:
            address, active = (a.reshape(len(a), -1) for a in (address, active))
        count = _sectors(address, active, width) if buffer.scope == "global" else _cycles(address, active, width)
        return float(count.mean()) * instructions

    def _instructions(self, access: Access, read: bool) -> float:
        """Requests of a thread: a register keeps what the innermost loops neither move nor write."""
        loops = self._kernel.loops
        own = [p for p in self._kernel.own(self._statement) if p != self._vector and int(loops[p].extent) > 1]
        moved = {p for index in access.indices for p in index.steps}
        moved |= self._kernel.shared_loops(access, self._statement, read)
        last = max((n for n, p in enumerate(own) if p in moved), default=-1)
        return float(math.prod(int(loops[p].extent) for p in own[: last + 1]))

    def _active(self, conditions: Sequence[tuple[int, bool]]) -> Array:
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
        kind, data = node["type"].rpartition(".")[2], node.get("data")
        if kind == "int":
            return int(data)
        if kind == "IntImm":
            return int(recorder.data(data["value"]))
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
            lanes = np.arange(int(self.value(data["lanes"])))[None, None, :]
            return self.value(data["base"]) + self.value(data["stride"]) * lanes
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


_FUNCTIONS = {
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
_CALLS = {
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}


def _points(sizes: Sequence[int], most: int) -> list[Array]:
    """Coordinates of all points of a box; of so many random ones where there are more."""
    if math.prod(sizes) <= most:
        return [np.asarray(a) for a in np.unravel_index(np.arange(math.prod(sizes)), sizes)]
    random = np.random.default_rng(0)
    return [random.integers(0, size, most) for size in sizes]


def _distinct(values: Array, active: Array) -> tuple[Array, Array]:
    """Values of each row in order, and where one differs from the one before; inactive ones are left out."""
    ordered = np.sort(np.where(active, values, np.iinfo(np.int64).max), axis=1)
    first = np.ones(ordered.shape, dtype=bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return ordered, first & (ordered != np.iinfo(np.int64).max)


def _sectors(address: Array, active: Array, width: float) -> Array:
    """Distinct sectors of each row of addresses in bytes."""
    return _distinct(np.floor_divide(address, SECTOR_BYTES).astype(np.int64), active)[1].sum(axis=1)


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
