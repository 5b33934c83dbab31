"""Counts of what a compiler makes of a scheduled leaf: vector instructions, cache lines, calls, branches.

Estimates for LLVM behind TVM, found by reading measured programs: small inner loops are unrolled; a loop
along which the store is contiguous is vectorised, by the schedule or by the compiler; a loop that neither the
store nor any read depends on is run once where all inside it is unrolled; up to 14 accumulators stay in
registers over the reduction around them, unless they are vectors of an odd length (12, 14, 28 floats), which
are stored in pieces and read back whole, at a stall each time. Counts are of a machine with vectors of 8
floats; a narrower one needs a multiple, which is for a model to learn. All is per leaf and sums over leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from cdmpp.features.addresses import LINE_BYTES, SETS, Moves, Place, moves
from cdmpp.features.ast import OPERATIONS, Buffer, CompactAST, Leaf

#: Floats of a vector, and vectors that accumulators may take.
LANES, REGISTERS = 8, 14
#: Instructions that LLVM unrolls a loop to by itself (its -unroll-threshold is 300, of smaller units); loads
#: beyond which it moves no more of them out of a loop.
UNROLL, MOVED = 150.0, 450.0
#: Caches whose traffic is counted with their sets, and entries of translation buffers.
CACHES = (4096, 32768, 1048576, 16777216)
_EACH = (32768, 1048576)
_ACCESSES = ("store", "read_0", "read_1")
PAGES = (64, 1024)
#: Bytes of an intermediate that TVM puts on the stack.
STACK = 1024

MAGNITUDES = (
    "vector_ops",
    "vector_trips",
    "vector_loads",
    "vector_stores",
    "chained_ops",
    *(f"lines_{c}" for c in CACHES),
    *(f"{a}_lines_{c}" for c in _EACH for a in _ACCESSES),
    *(f"pages_{p}" for p in PAGES),
    "bodies",
    "library_calls",
    "split_indices",
    "branches",
    "all_stores",
    "odd_updates",
    "accumulator_vectors",
    "kept_over",
    "loads_per_op",
    "lanes",
    "body",
    "iterations",
    "hoisted",
    "inside",
    "repeats",
    "repeats_parallel",
    "compact_store_bytes",
    "intermediate_bytes",
    "footprint",
    "footprint_in_sets",
    "task_trips",
    "regions",
)
FLAGS = (
    "vector_by_schedule",
    "vector_by_compiler",
    "contiguous_reads",
    "gathered_reads",
    "store_contiguous",
    "store_scattered",
    "accumulates_in_registers",
    "register_pressure",
    "promoted",
    "imbalance_2",
    "whole_vectors",
    "vector_multiple",
    "odd_rows",
    "conditional",
    "set_conflict",
    "on_stack",
)
_ARITHMETIC = (
    "float_add",
    "float_mul",
    "float_compare",
    "float_div",
    "select",
    "float_cast",
    "int_add",
    "int_mul",
    "int_compare",
)


def contiguous_loops(ast: CompactAST, where: dict[int, Place]) -> set[int]:
    """Loops along which some leaf stores neighbours: what the compiler vectorises."""
    counts: set[int] = set()
    for leaf in ast.leaves:
        store = moves(leaf.store, where, {p: float(ast.loops[p].extent) for p in leaf.path})
        counts |= {loop for loop, step in store.steps.items() if step == store.width}
    return counts


class CompiledLeaf:
    """One leaf, looked at from its innermost loop outwards.

    Parameters
    ----------
    ast : CompactAST
        Of a concrete program.
    leaf : Leaf
    where : dict
        :func:`cdmpp.features.addresses.places` of the program.
    contiguous : set of int
        :func:`contiguous_loops` of the program.
    launched : set of int
        Parallel loops that an earlier leaf of the program has counted; its own is added.
    """

    def __init__(
        self, ast: CompactAST, leaf: Leaf, where: dict[int, Place], contiguous: set[int], launched: set[int]
    ) -> None:
        loops = ast.loops
        self.leaf = leaf
        self.path = [p for p in reversed(leaf.path) if loops[p].extent > 1]
        self.extent = {p: float(loops[p].extent) for p in self.path}
        self.kind = {p: loops[p].kind for p in self.path}
        self.trips = list(accumulate((self.extent[p] for p in self.path), mul, initial=1.0))
        self.step = max((loops[p].unroll_step for p in leaf.path), default=0)
        self.moves = [moves(access, where, self.extent) for access in (leaf.store, *leaf.reads)]
        counts = dict(zip(OPERATIONS, leaf.counts, strict=True))
        #: Arithmetic of one evaluation; a multiplication and the addition of its result are one.
        self.arithmetic = max(float(sum(counts[k] for k in _ARITHMETIC) - counts["float_fma"]), 1.0)
        simple = sum(counts[k] for k in _ARITHMETIC) - counts["float_compare"] - counts["int_compare"]
        #: What the compiler takes one evaluation for when it decides on unrolling.
        self.weight = max(
            len(leaf.reads)
            + simple
            + 3.0 * (counts["float_compare"] + counts["int_compare"])
            + 10.0 * leaf.library_calls
            + (0.0 if leaf.reduce_loops else 1.0)
            + 4.0 * (leaf.predicated > 0),
            1.0,
        )
        #: Loops that the leaf computes something else in; the others repeat.
        self.needed = set(leaf.reduce_loops).union(
            *(index.steps for access in (leaf.store, *leaf.reads) for index in access.indices)
        )
        self.body = self._unrolled()
        self.vector, self.by_schedule = self._vectorised(contiguous)
        #: Iterations of the vectorised loop, 1 without one.
        self.lanes = self.extent[self.vector] if self.vector is not None else 1.0
        self.levels = self._levels()
        self.hoisted, self.inside, self.repeats, self.repeats_parallel = self._repeated()
        outer = next((p for p in reversed(self.path) if self.kind[p] == "parallel"), None)
        self.regions = 0.0
        if outer is not None and outer not in launched:
            launched.add(outer)
            self.regions = float(self.trips[-1] / self.trips[self.path.index(outer) + 1])

    # -- what the compiler does ---------------------------------------------------------------------------
    def _unrolled(self) -> list[int]:
        """The innermost loops that become straight code (vector loops among them)."""
        body, size = [], 1.0
        for loop in self.path:
            kind, extent = self.kind[loop], self.extent[loop]
            if kind == "vectorized":
                body.append(loop)
                continue
            small = size * extent <= max(self.step, UNROLL / self.weight)
            if kind != "unrolled" and not (kind == "serial" and small):
                break
            size *= extent
            body.append(loop)
        return body

    def _vectorised(self, contiguous: set[int]) -> tuple[int | None, bool]:
        """The loop whose iterations share a vector, if any, and whether the schedule vectorises it explicitly."""
        split = set().union(*(m.splits for m in self.moves))
        scheduled = [p for p in self.body if self.kind[p] == "vectorized" and p not in split]
        if scheduled and not self.leaf.predicated > 0:  # a condition in it has TVM write a loop in its place
            return scheduled[-1], True
        candidates = list(self.body)
        after = len(self.body)
        if after < len(self.path) and self.kind[self.path[after]] in ("serial", "unrolled"):
            candidates.append(self.path[after])
        store = self.moves[0]
        scalar = not self.leaf.store.buffer.is_parameter
        counts = [
            p
            for p in candidates
            if p in self.needed
            and p not in self.leaf.reduce_loops
            and p not in split
            and (store.steps.get(p) == store.width or (scalar and p in contiguous and p not in store.steps))
        ]
        return max(counts, key=self.extent.__getitem__, default=None), False

    def _repeated(self) -> tuple[float, float, float, float]:
        """Iterations that compute the same again: how many of them the compiler saves, the iterations
        inside, how many there are in all, and how many in parallel loops that it does not see through."""
        most = min(max(self.step, UNROLL / self.weight), MOVED)
        hoisted = inside = repeats = parallel = 1.0
        for loop in self.path:
            extent = self.extent[loop]
            if loop in self.needed:
                inside *= extent
            elif self.kind[loop] == "parallel" and inside > most:
                parallel *= extent
            else:
                repeats *= extent
                hoisted *= extent if inside <= most else 1.0
        return hoisted, inside, repeats, parallel

    # -- counts -------------------------------------------------------------------------------------------
    def values(self) -> tuple[list[float], list[float]]:
        """The columns :data:`MAGNITUDES` (as they are, not their logarithms) and :data:`FLAGS`."""
        counts = self._work() | self._traffic() | self._loops() | self._layout()
        return [float(counts[name]) for name in MAGNITUDES], [float(counts[name]) for name in FLAGS]

    def _work(self) -> dict[str, float]:
        """Instructions: arithmetic, loads and stores, what waits for what."""
        leaf, total = self.leaf, float(self.trips[-1]) / self.hoisted
        inner = set(self.body) | ({self.vector} if self.vector is not None else set())
        size = _product(self.extent[p] for p in inner)
        bodies = total / size
        store, reads = self.moves[0], self.moves[1:]
        loads = sum(self._instructions(self._distinct(m, inner), m) for m in reads) * bodies
        stored = self._instructions(self._distinct(store, inner), store)
        reduces = bool(leaf.reduce_loops) and not leaf.is_init
        odd = reduces and self.by_schedule and not _is_power_of_two(self.lanes)
        kept = self._kept_over() if reduces and not odd else 1.0
        vectors = self._instructions(size, None) * bodies
        after = self.path[len(self.body)] if len(self.body) < len(self.path) else None
        return {
            "vector_ops": vectors * self.arithmetic,
            "vector_trips": vectors,
            "vector_loads": loads,
            "vector_stores": stored * bodies / (kept if stored <= REGISTERS else 1.0),
            "chained_ops": vectors / max(1.0, min(stored, 16.0)) if reduces else 0.0,
            "bodies": bodies,
            "library_calls": leaf.library_calls * total,
            "branches": (leaf.predicated > 0) * total,
            "all_stores": stored * bodies,
            "odd_updates": stored * bodies if odd else 0.0,
            "accumulator_vectors": stored,
            "kept_over": kept,
            "loads_per_op": loads / max(vectors, 1e-9),
            "accumulates_in_registers": reduces and stored <= REGISTERS,
            "register_pressure": min(stored / 16, 4.0) if reduces else 0.0,
            "promoted": reduces and after is not None and after in leaf.reduce_loops,
        }

    def _traffic(self) -> dict[str, float]:
        """Cache lines and pages, and the memory that all loops touch."""
        lines, pages = self._lines(), self._pages()
        touched = [levels[-1] for levels in self.levels]
        own = [m.bytes for m, a in zip(self.moves, self._accesses(), strict=True) if not a.is_parameter]
        store = self.moves[0].bytes
        stored_inside = not self.leaf.store.buffer.is_parameter
        counts = {f"lines_{c}": sum(lines[c]) for c in CACHES}
        for capacity in _EACH:
            per_access = [*lines[capacity], 0.0, 0.0]
            counts |= {f"{a}_lines_{capacity}": per_access[i] for i, a in enumerate(_ACCESSES)}
        return counts | {
            **{f"pages_{entries}": misses for entries, misses in zip(PAGES, pages, strict=True)},
            "compact_store_bytes": store,
            "intermediate_bytes": sum(own) - (store if stored_inside else 0.0),
            "footprint": sum(t[0] for t in touched) * LINE_BYTES,
            "footprint_in_sets": sum(_in_sets(*t[:2]) for t in touched),
            "set_conflict": math.log2(SETS / touched[0][1]) if touched[0][0] > SETS else 0.0,
            "on_stack": store <= STACK and stored_inside,
        }

    def _loops(self) -> dict[str, float]:
        """Loop sizes: vector lanes, iterations, repeats and tasks."""
        total, straight = float(self.trips[-1]), float(self.trips[len(self.body)])
        parallel = [p for p in self.path if self.kind[p] == "parallel"]
        tasks = self.extent[parallel[0]] if parallel else 1.0
        return {
            "lanes": self.lanes,
            "body": straight,
            "iterations": total / straight,
            "hoisted": self.hoisted,
            "inside": self.inside,
            "repeats": self.repeats,
            "repeats_parallel": self.repeats_parallel,
            "task_trips": float(self.trips[self.path.index(parallel[0])]) if parallel else total,
            "regions": self.regions,
            "imbalance_2": math.ceil(tasks / 2) * 2 / tasks if parallel else 2.0,
        }

    def _layout(self) -> dict[str, float]:
        """Strides of the accesses along the vector."""
        steps = [m.steps.get(self.vector, 0.0) if self.vector is not None else 0.0 for m in self.moves]
        near = [0 < step <= m.width + 1e-6 for m, step in zip(self.moves, steps, strict=True)]
        far = [step > m.width + 1e-6 for m, step in zip(self.moves, steps, strict=True)]
        ends = {*self.path[:1], *(p for p in self.path if self.kind[p] == "vectorized")}
        ends |= {self.vector} if self.vector is not None else set()
        split = sum(1 for m in self.moves if ends & m.splits)
        return {
            "split_indices": split * float(self.trips[-1]) / self.hoisted,
            "vector_by_schedule": self.by_schedule,
            "vector_by_compiler": self.vector is not None and not self.by_schedule,
            "contiguous_reads": sum(near[1:]),
            "gathered_reads": sum(far[1:]),
            "store_contiguous": near[0],
            "store_scattered": far[0],
            "whole_vectors": _is_power_of_two(self.lanes),
            "vector_multiple": (self.lanes % 4 == 0) + (self.lanes % 8 == 0),
            "odd_rows": split,
            "conditional": self.leaf.predicated > 0,
        }

    def _accesses(self) -> list[Buffer]:
        return [self.leaf.store.buffer, *(read.buffer for read in self.leaf.reads)]

    def _instructions(self, values: float, move: Moves | None) -> float:
        """Instructions for so many values of the body: fewer where neighbours share a vector."""
        if self.vector is None:
            return values
        step = move.steps.get(self.vector, 0.0) if move else 0.0
        if move and (not step or step > move.width + 1e-6):
            return values
        return values / self.lanes * max(1.0, _whole(self.lanes) / LANES)

    def _distinct(self, move: Moves, inner: set[int]) -> float:
        """Elements that the loops ``inner`` address."""
        return _product(self.extent[p] for p in inner if p in move.steps)

    def _kept_over(self) -> float:
        """Iterations of the reduction right around the body, over which accumulators can stay."""
        kept = 1.0
        for loop in self.path[len(self.body) :]:
            if loop in self.leaf.reduce_loops:
                kept *= self.extent[loop]
            elif loop != self.vector:
                break
        return kept

    def _levels(self) -> list[list[tuple[float, float, float]]]:
        """Per access what the innermost 0, 1, ... all loops touch."""
        counts = []
        for move in self.moves:
            levels = [move.touched(set(), self.extent)]
            for i, loop in enumerate(self.path):
                levels.append(move.touched(set(self.path[: i + 1]), self.extent) if loop in move.steps else levels[-1])
            counts.append(levels)
        return counts

    def _lines(self) -> dict[int, list[float]]:
        """Lines that each access brings into caches of the capacities, conflicts in their sets counted."""
        count = len(self.path)
        crowded = [[_in_sets(*level[:2]) for level in levels] for levels in self.levels]
        total = [_total([levels[i][0] for levels in self.levels]) * LINE_BYTES for i in range(count + 1)]
        counts = {}
        for capacity in CACHES:
            # The longest run of inner loops whose data fit; the loop around it finds them again.
            fits = last_within(total, capacity)
            per_access = []
            for levels, sets in zip(self.levels, crowded, strict=True):
                level = min(fits, last_within(sets, capacity)) + 1
                level = min(level, count)
                per_access.append(levels[level][0] * self.trips[-1] / self.trips[level])
            counts[capacity] = per_access
        return counts

    def _pages(self) -> list[float]:
        """Pages that a buffer of so many translations misses; none while all of a leaf's pages fit."""
        count, misses_by_size = len(self.path), []
        total = [_total([levels[i][2] for levels in self.levels]) for i in range(count + 1)]
        for entries in PAGES:
            level = min(last_within(total, entries) + 1, count)
            rate = self.trips[-1], self.trips[level]
            misses = _total([levels[level][2] * rate[0] / rate[1] for levels in self.levels])
            misses_by_size.append(misses if total[-1] > entries else 0.0)
        return misses_by_size


def last_within(values: Sequence[float], bound: float) -> int:
    """Index of the last value that is not above a bound, 0 where all are."""
    for index in range(len(values) - 1, 0, -1):
        if values[index] <= bound:
            return index
    return 0


def _total(values: Sequence[float]) -> float:
    """Sum. A leaf has some accesses and loops: for lists this short arrays take longer than what they add."""
    return float(sum(values))


def _in_sets(lines: float, sets: float) -> float:
    """Bytes of a cache that lines need when they fall in so many of its sets."""
    return lines * LINE_BYTES * (max(1.0, SETS / sets) if lines > 2 else 1.0)


def _is_power_of_two(extent: float) -> bool:
    return _whole(extent) == extent


def _whole(extent: float) -> float:
    """The next power of two: what a vector of an odd length is widened to."""
    return float(2.0 ** math.ceil(math.log2(extent))) if extent > 1 else 1.0


def _product(values: Any) -> float:
    return float(math.prod(values))
