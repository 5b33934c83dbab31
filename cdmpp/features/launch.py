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
from cdmpp.features.lanes import Lanes
from cdmpp.features.launch_schema import WARP, WORD_BYTES
from cdmpp.features.leaf import element_bytes
from cdmpp.features.statements import BLOCKS, THREADS, Recorder, Statement
from cdmpp.features.walk import broken_nodes
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.tvm_json import load

#: Points of the other loops at which a warp is evaluated; all of them where there are no more.
POINTS = 2048
#: Memory of a warp, spread over its lanes: fragments of tensor cores.
FRAGMENTS = ("wmma", "m16n8k8", "warp")


def launch_summary(program: TensorProgram, *, points: int = POINTS) -> list[dict[str, Any]]:
    """What each kernel of a GPU program launches and requests.

    ``program``: TIR with thread bindings, scheduled or lowered.
    ``points``: points of blocks, warps and loops at which the addresses of a statement are evaluated.
    Returns for each kernel, in launch order: ``blocks``, ``threads`` (of a block), ``vthreads``; ``shared_bytes`` of a
    block; ``local_words``: 32-bit words of a thread with all its virtual threads; ``main_store_trips``: runs per thread
    of the store with most arithmetic; ``global_load_sectors``, ``global_store_sectors``: sectors of 32 bytes of a warp
    over all trips; ``shared_load_cycles``, ``shared_store_cycles``: cycles of a warp over all trips; ``active_lanes``:
    share of lanes whose predicates hold, weighted by trips; ``tensor_ops``: operations of a block on tensor cores (a
    multiply-add is two); ``async_stages``: tiles that asynchronous copies fill, the one in use among them; 0 without
    such copies. Empty for a program without thread bindings.
    Raises InvalidProgramError: as :func:`cdmpp.features.walk.build_ast`; also for an operator, which has no schedule.
    """
    if program.operator is not None:
        raise InvalidProgramError(
            f"{program.name} is an operator, which has no schedule", hint="pass a TVM program: TVM JSON or TVMScript"
        )
    nodes, root = load(program.tvm_json or "")
    recorder = Recorder(nodes, {})
    recorder.build(root, program.function)
    with broken_nodes():
        return [kernel.summary(points) for kernel in kernels_of(recorder)]


def kernels_of(recorder: Recorder) -> list[Kernel]:
    """Kernels of a walked program in launch order."""
    return [Kernel(recorder, [s for s in recorder.statements if s.kernel == n]) for n in range(recorder.kernels)]


class WarpRequest(NamedTuple):
    """What a statement asks of memory by one access, over all its trips."""

    scope: str
    read: bool
    instructions: float  # of a thread
    transactions: float  # sectors (global) or cycles (shared) of a warp
    bytes: float  # of one instruction of a thread
    terms: int  # loops that move the address


class Kernel:
    """One launch, with its statements in order."""

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
        trips_of_all = active = tensor_ops = 0.0
        for statement in self.statements:
            trips, share, requests = self.requests(statement, points)
            trips_of_all += trips
            active += trips * share
            tensor_ops += trips * share * statement.tensor_ops * self.threads / WARP
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
            "tensor_ops": tensor_ops,
            "async_stages": self.async_stages(),
        }

    def requests(self, statement: Statement, points: int) -> tuple[int, float, list[WarpRequest]]:
        """Trips per thread, share of active lanes, and requests to global and shared memory of a statement."""
        lanes = Lanes(self._recorder, statement, self.shape, self.own(statement), points)
        store = statement.store, statement.indices, statement.conditions
        requests = []
        for read, (access, indices, conditions) in ((False, store), *((True, item) for item in statement.loads)):
            buffer = access.buffer
            if buffer.scope not in ("global", "shared"):
                continue
            shape = self.sizes.get(id(buffer), (buffer, [int(size) for size in buffer.shape]))[1]
            count, width, vectors = lanes.transactions(buffer, shape, indices, conditions, access.box)
            runs = self.repeats(access, statement, read)
            terms = sum(len(index.steps) for index in access.indices)
            requests.append(WarpRequest(buffer.scope, read, runs * vectors, runs * count, width, terms))
        return self.trips(statement), lanes.active_share(), requests

    def held_bytes(self) -> tuple[int, int]:
        """32-bit words of a thread with all its virtual threads, and shared bytes of a block."""
        buffers = [buffer for buffer, _ in self.sizes.values()]
        held = [(b, self._bytes(b)) for b in buffers if b.scope == "shared"]
        shared = sum(size for b, size in held if not b.dynamic) + self._dynamic(held)
        return sum(self.words(b) for b in buffers if b.scope != "shared") + self._staged_words(), int(shared)

    def words(self, buffer: Buffer) -> int:
        """32-bit words that a thread holds of a local buffer or a fragment, with all its virtual threads."""
        size = self._bytes(buffer) / (WARP if buffer.scope in FRAGMENTS else 1)
        return math.ceil(size / WORD_BYTES) * self._copies(buffer)

    def _bytes(self, buffer: Buffer) -> float:
        return math.prod(self.sizes[id(buffer)][1]) * element_bytes(buffer.dtype) * self._versions(buffer)

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
        repeated = [p for p in self.own(statement) if loops[p].kind != "vectorized" and int(loops[p].extent) > 1]
        moved = {p for index in access.indices for p in index.steps} | self.shared_loops(access, statement, read)
        last = max((n for n, p in enumerate(repeated) if p in moved), default=-1)
        return float(math.prod(int(loops[p].extent) for p in repeated[: last + 1]))

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
        operations = sum(statement.leaf.counts[: OPERATIONS.index("select")]) + statement.tensor_ops / WARP
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
                if target.scope in ("local", *FRAGMENTS) and not vthreads <= held.get(id(target), frozenset()):
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
                if access.buffer.scope in ("local", "shared", *FRAGMENTS):
                    accesses.setdefault(id(access.buffer), []).append((statement, access, indices, reads))
        return {key: (of[0][1].buffer, self._compact(of)) for key, of in accesses.items()}

    def _compact(self, accesses: list[tuple[Statement, Access, list[int], bool]]) -> list[int]:
        buffer = accesses[0][1].buffer
        common = accesses[0][0].path
        for statement, *_ in accesses:
            common = tuple(a for a, b in zip(common, statement.path, strict=False) if a == b)
        spread = {"shared": THREADS, "warp": THREADS[:1]}.get(buffer.scope, ())
        bound = {p for s, *_ in accesses for p in s.path if self.loops[p].kind in (*BLOCKS, *THREADS)}
        fixed = [
            p
            for p in bound.union(common)
            if self.loops[p].kind not in spread and not (buffer.scope == "shared" and p in self._vthreads)
        ]
        # What is only written is not needed: a copy is made of what is read.
        reads = [access for access in accesses if access[3]] or accesses
        # In the middle of the loops around it, where no border cuts the range.
        ranges = _Ranges(self._recorder, {p: (int(self.loops[p].extent) - 1) // 2 for p in fixed})
        lows: list[Any] = [math.inf] * len(buffer.shape)
        highs: list[Any] = [-math.inf] * len(buffer.shape)
        for _, access, indices, _ in reads:
            for d, index in enumerate(indices):
                value, more = ranges.expression(index), access.box[d] - 1 if access.box else 0
                lows[d], highs[d] = min(lows[d], value.low), max(highs[d], value.high + more)
        sizes = [
            max(1, min(int(high - low) + 1, int(whole)))
            for low, high, whole in zip(lows, highs, buffer.shape, strict=True)
        ]
        for axis, factor, offset in buffer.padding:
            if 0 <= axis < len(sizes) - 1:
                inner, row = math.prod(sizes[axis + 2 :]), math.prod(sizes[axis + 1 :])
                sizes[axis + 1] = (row + (factor + offset - row % factor) % factor) // inner
        return sizes

    # -- software pipelines -----------------------------------------------------------------------------------
    def _dynamic(self, held: list[tuple[Buffer, float]]) -> float:
        """Bytes of dynamic shared memory: buffers that are never in use together have one address."""
        spans = []
        for buffer, size in held:
            if buffer.dynamic:
                at = [n for n, s in enumerate(self.statements) if any(a.buffer is buffer for a, _, _ in s.accesses())]
                spans.append((at[0], at[-1], size))
        return max((sum(size for a, b, size in spans if a <= n <= b) for n, _, _ in spans), default=0)

    def _staged_words(self) -> int:
        """Registers of a thread in which copies to shared memory wait for their stage."""
        words = 0
        for s in self.statements:
            if s.staged and s.place:
                trips = math.prod(int(self.loops[p].extent) for p in self.own(s) if p > max(s.place))
                words += math.ceil(trips * element_bytes(s.leaf.store.buffer.dtype) / WORD_BYTES)
        return words

    def async_stages(self) -> int:
        """Stages of an asynchronous software pipeline; 0 without one."""
        pipelines = [self._recorder.pipelines[loop] for s in self.statements for loop in s.place]
        behind = max([self._recorder.in_flight, *(max(stages) for stages, _, copies in pipelines if copies)])
        return behind + 1 if behind else 0

    def _versions(self, buffer: Buffer) -> int:
        """Copies of a buffer that a software pipeline keeps, as TVM's ``InjectSoftwarePipeline`` counts them."""
        uses = [(s, reads) for s in self.statements for a, _, reads in s.accesses() if a.buffer is buffer]
        around = set.intersection(*(set(s.place) for s, _ in uses))
        if not around:
            return 1
        stage, order, _ = self._recorder.pipelines[max(around)]
        at = [(n, reads) for s, reads in uses for n in self._places(s, max(around), reads)]
        written, read = ([n for n, reads in at if reads == kind] for kind in (False, True))
        count = 1 + max((stage[n] for n in read), default=0) - min((stage[n] for n in written), default=0)
        count -= not any(order[w] < order[r] and stage[w] < stage[r] for w in written for r in read)
        return max(count, 2 if buffer.double else 1)

    def _places(self, statement: Statement, loop: int, reads: bool) -> list[int]:
        """Places in a software pipeline of a statement's store, or of its loads."""
        first, pipelines = statement.place[loop], self._recorder.pipelines
        inner = min((p for p in statement.place if p > loop and max(pipelines[p][0])), default=None)
        if inner is None:
            return [first + (statement.staged and not reads)]
        stages, last = {pipelines[inner][0][n] for n in self._places(statement, inner, reads)}, max(pipelines[inner][0])
        return [*[first] * (min(stages) < last), first + 1, *[first + 2] * (max(stages) > 0)]


class _Ranges(Expressions):
    """Ranges of indices where some loops are fixed, at the iterations ``at``, and the others run."""

    def __init__(self, recorder: Recorder, at: dict[int, int]) -> None:
        super().__init__(recorder.nodes, recorder.bindings)
        self._recorder, self._at = recorder, at
        self.ast.loops = recorder.ast.loops

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
