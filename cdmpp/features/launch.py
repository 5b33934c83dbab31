"""Launches of a GPU program: threads, memory of a block and a thread, and the requests of a warp.

The index expressions of each statement are evaluated for the 32 lanes of warps at points of the other loops, so the
counts hold for any index: sectors of 32 bytes in global memory, words of one bank in shared memory, active lanes.
Buffers of a scheduled program are declared with the size of the whole tensor. What a thread or a block holds follows
from the ranges of the indices below its allocation, as in TVM's ``CompactBufferAllocation``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cdmpp.errors import InvalidProgramError
from cdmpp.features.affine import AffineRange
from cdmpp.features.ast import OPERATIONS, Access, Buffer
from cdmpp.features.expressions import Expressions
from cdmpp.features.gpu_schedule import WORD_BYTES
from cdmpp.features.lanes import Lanes
from cdmpp.features.leaf import element_bytes
from cdmpp.features.statements import BLOCKS, THREADS, Recorder, Statement
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.tvm_json import Nodes, load

#: Points of the other loops at which a warp is evaluated; all of them where there are no more.
POINTS = 2048
#: Outer points at which the range of a buffer's indices is looked at.
_CORNERS = 3


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
    recorder = Recorder(nodes, {})
    recorder.build(root, function)
    return kernels_of(recorder)


def kernels_of(recorder: Recorder) -> list[Kernel]:
    """Kernels of a walked program in launch order."""
    return [Kernel(recorder, [s for s in recorder.statements if s.kernel == n]) for n in range(recorder.kernels)]


class Request(NamedTuple):
    """What a statement asks of memory by one access, over all its trips."""

    scope: str
    read: bool
    instructions: float  # of a thread
    transactions: float  # sectors (global) or cycles (shared) of a warp
    bytes: float  # of one instruction of a thread
    terms: int  # loops that move the address


class Kernel:
    """One launch.

    Parameters
    ----------
    recorder : Recorder
    statements : list of Statement
        Those of this launch, in order.
    """

    def __init__(self, recorder: Recorder, statements: list[Statement]) -> None:
        self._recorder, self.statements = recorder, statements
        loops = recorder.ast.loops
        self.loops = loops
        used = {p for s in statements for p in s.path}
        extents: dict[str, int] = {}
        for p in used:
            extents[loops[p].kind] = max(extents.get(loops[p].kind, 1), int(loops[p].extent))
        self.shape = [extents.get(tag, 1) for tag in THREADS]
        self.blocks = math.prod(extents.get(tag, 1) for tag in BLOCKS)
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
            trips, share, requests = self.requests(statement, points)
            trips_of_all += trips
            active += trips * share
            for request in requests:
                unit = "sectors" if request.scope == "global" else "cycles"
                sums[f"{request.scope}_{'load' if request.read else 'store'}_{unit}"] += request.transactions
        local, shared = self.held_bytes()
        return {
            "blocks": self.blocks,
            "threads": self.threads,
            "vthreads": self.vthreads,
            "shared_bytes": shared,
            "local_words": local,
            "main_store_trips": self.trips(max(self.statements, key=self._arithmetic)),
            **sums,
            "active_lanes": active / trips_of_all if trips_of_all else 1.0,
        }

    def requests(self, statement: Statement, points: int) -> tuple[int, float, list[Request]]:
        """Trips per thread, share of active lanes, and requests to global and shared memory of a statement."""
        lanes = Lanes(self._recorder, statement, self.shape, self.own(statement), points)
        store = statement.leaf.store, statement.indices, statement.conditions
        found = []
        for read, (access, indices, conditions) in ((False, store), *((True, item) for item in statement.loads)):
            buffer = access.buffer
            if buffer.scope not in ("global", "shared"):
                continue
            shape = self.sizes.get(id(buffer), (buffer, [int(size) for size in buffer.shape]))[1]
            count, width, vectors = lanes.transactions(buffer, shape, indices, conditions)
            runs = self.repeats(access, statement, read)
            terms = sum(len(index.steps) for index in access.indices)
            found.append(Request(buffer.scope, read, runs * vectors, runs * count, width, terms))
        return self.trips(statement), lanes.active_share(), found

    def held_bytes(self) -> tuple[int, int]:
        """32-bit words of a thread with all its virtual threads, and shared bytes of a block."""
        buffers = [buffer for buffer, _ in self.sizes.values()]
        shared = sum(
            math.prod(self.sizes[id(buffer)][1]) * element_bytes(buffer.dtype)
            for buffer in buffers
            if buffer.scope == "shared"
        )
        return int(sum(self.words(buffer) for buffer in buffers if buffer.scope == "local")), int(shared)

    def words(self, buffer: Buffer) -> int:
        """32-bit words that a thread holds of a local buffer, with all its virtual threads."""
        size = math.prod(self.sizes[id(buffer)][1]) * element_bytes(buffer.dtype)
        return math.ceil(size / WORD_BYTES) * self._copies(buffer)

    def own(self, statement: Statement) -> list[int]:
        """Loops that a thread runs for a statement, outermost first; of virtual threads those that it depends on."""
        return [
            p
            for p in statement.path
            if self.loops[p].kind not in THREADS
            and self.loops[p].kind not in BLOCKS
            and (p not in self._vthreads or p in statement.vthreads)
        ]

    def repeats(self, access: Access, statement: Statement, read: bool) -> float:
        """Runs of an access per thread: a register keeps what the innermost loops neither move nor write."""
        loops = self.loops
        own = [p for p in self.own(statement) if loops[p].kind != "vectorized" and int(loops[p].extent) > 1]
        moved = {p for index in access.indices for p in index.steps} | self.shared_loops(access, statement, read)
        last = max((n for n, p in enumerate(own) if p in moved), default=-1)
        return float(math.prod(int(loops[p].extent) for p in own[: last + 1]))

    def shared_loops(self, access: Access, statement: Statement, read: bool) -> set[int]:
        """Loops of a statement in which another one writes what an access reads, or uses what it writes."""
        loops: set[int] = set()
        for other in self.statements:
            if other is not statement and any(
                a.buffer is access.buffer and not (read and reads) for a, _, reads in other.accesses()
            ):
                loops.update(set(other.path).intersection(statement.path))
        return loops

    def trips(self, statement: Statement) -> int:
        """Runs of a statement per thread."""
        return math.prod(int(self.loops[p].extent) for p in self.own(statement))

    def _arithmetic(self, statement: Statement) -> tuple[float, int]:
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
    def _compact_sizes(self) -> dict[int, tuple[Buffer, list[int]]]:
        """Shape that a thread (local) or a block (shared) holds of each buffer, by the buffer's identity."""
        accesses: dict[int, list[tuple[Statement, Access, list[int], bool]]] = {}
        for statement in self.statements:
            for access, indices, reads in statement.accesses():
                if access.buffer.scope in ("local", "shared"):
                    accesses.setdefault(id(access.buffer), []).append((statement, access, indices, reads))
        return {key: (of[0][1].buffer, self._compact(of)) for key, of in accesses.items()}

    def _compact(self, accesses: list[tuple[Statement, Access, list[int], bool]]) -> list[int]:
        buffer = accesses[0][1].buffer
        common = accesses[0][0].path
        for statement, *_ in accesses:
            common = tuple(a for a, b in zip(common, statement.path, strict=False) if a == b)
        spread = THREADS if buffer.scope == "shared" else ()
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
            for _, _, indices, _ in reads:
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
    recorder : Recorder
    at : dict of int to int
        Iteration of each fixed loop.
    """

    def __init__(self, recorder: Recorder, at: dict[int, int]) -> None:
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
