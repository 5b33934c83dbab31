"""Memory addresses of a scheduled program's accesses: byte strides of loops, cache lines, cache sets, pages.

Capacity is not all there is to a cache. Rows whose distance is a power of two share a few of its sets: a
column of a 1024 x 1024 matrix, 64 KB of lines, does not fit a cache of 2 MB twice over. So the lines of an
access are counted together with the sets that they fall in. Intermediate tensors lie as TVM's
CompactBufferAllocation leaves them: as large as one iteration of the loops around producer and consumers
needs, and at the same place in every iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cdmpp.features.ast import Access, Buffer, CompactAST
from cdmpp.features.leaf import element_bytes

LINE_BYTES = 64
PAGE_BYTES = 4096
#: First-level caches have as many sets as a page has lines; of larger ones a page spreads over as many.
SETS = PAGE_BYTES // LINE_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """Memory layout of a buffer.

    Attributes
    ----------
    shape : tuple of float
        Elements per dimension, after compaction.
    fixed : frozenset of int
        Loops around all of its accesses: each iteration finds it at the same place.
    """

    shape: tuple[float, ...]
    fixed: frozenset[int] = frozenset()


def places(ast: CompactAST) -> dict[int, Place]:
    """Place of every intermediate buffer, by the buffer's ``id``; arguments have their declared layout."""
    shared: dict[int, tuple[int, ...]] = {}
    uses: dict[int, list[Access]] = {}
    for leaf in ast.leaves:
        for access in (leaf.store, *leaf.reads):
            if access.buffer.is_parameter:
                continue
            key = id(access.buffer)
            uses.setdefault(key, []).append(access)
            shared[key] = _common(shared[key], leaf.path) if key in shared else leaf.path
    moves = {}
    for key, accesses in uses.items():
        fixed = frozenset(shared[key])
        spans = [_spans(ast, access, fixed) for access in accesses]
        moves[key] = Place(tuple(max(sizes) for sizes in zip(*spans, strict=False)), fixed)
    return moves


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return a[:same]


def _spans(ast: CompactAST, access: Access, fixed: frozenset[int]) -> list[float]:
    """Elements per dimension that an access sweeps while the ``fixed`` loops stand still."""
    spans = []
    for index, size in zip(access.indices, access.buffer.shape, strict=False):
        span = 1.0
        for loop, step in index.steps.items():
            if loop not in fixed:
                span += abs(float(step)) * (ast.loops[loop].extent - 1)
        spans.append(float(size) if index.indirect else min(span, float(size)))
    return spans


@dataclass(slots=True)
class Moves:
    """Byte strides of one access along the loops of its leaf.

    Attributes
    ----------
    width : float
        Bytes of an element.
    dims : list of (bytes between neighbours, size, steps of the loops in elements)
        Dimensions that move, the last one first.
    steps : dict of loop to float
        Bytes that one iteration moves the address, forwards or back.
    bytes : float
        Of the whole buffer.
    splits : set of int
        Loops that cross the rows of the buffer at odd places: their index needs a division per element.
    """

    width: float
    dims: list[tuple[float, float, dict[int, float]]] = field(default_factory=list)
    steps: dict[int, float] = field(default_factory=dict)
    bytes: float = 0.0
    splits: set[int] = field(default_factory=set)

    def touched(self, inner: set[int], extents: dict[int, float]) -> tuple[float, float, float]:
        """Cache lines, sets of :data:`SETS` among them, and pages that the loops ``inner`` touch."""
        rows: list[tuple[float, float]] = []
        for pitch, size, steps in self.dims:
            span, values, smallest = 1.0, 1.0, math.inf
            for loop, step in steps.items():
                if loop in inner:
                    span += step * (extents[loop] - 1)
                    values *= extents[loop]
                    smallest = min(smallest, step)
            count = min(span, values, size)
            if count > 1:
                rows.append((pitch * max(smallest, 1.0) if values <= span else pitch, count))
        run, runs, sets, span = self.width, 1.0, 1.0, self.width
        pages = 1.0
        for distance, count in sorted(rows):
            span += distance * (count - 1)
            if runs == 1.0 and (distance <= run or distance < LINE_BYTES):
                run += distance * (count - 1)
                continue
            runs *= count
            sets *= min(count, PAGE_BYTES / math.gcd(round(distance), PAGE_BYTES))
            if distance >= PAGE_BYTES:
                pages *= count
        of_run = max(1.0, run / LINE_BYTES)
        lines = runs * of_run
        if pages == 1.0:
            pages = max(min(span / PAGE_BYTES, lines), 1.0)
        return lines, min(SETS, sets * of_run, lines), min(pages, lines)


def moves(access: Access, where: dict[int, Place], extents: dict[int, float]) -> Moves:
    """Moves of an access whose leaf has loops of these extents (a loop of one iteration moves nothing)."""
    found = Moves(element_bytes(access.buffer.dtype))
    shape, fixed = _place(access.buffer, where, len(access.indices))
    pitch = found.width
    straight = _straight(access, shape, fixed)
    for index, size in zip(reversed(access.indices), reversed(shape), strict=False):
        steps = {}
        for loop, step in index.steps.items():
            if loop in fixed or not step or extents.get(loop, 1.0) <= 1:
                continue
            steps[loop] = abs(float(step))
            if steps[loop] % 1 and loop not in straight and not _within(loop, steps, extents[loop]):
                found.splits.add(loop)
        if size > 1 and steps:
            found.dims.append((pitch, size, steps))
            for loop, step in steps.items():
                before = found.steps.get(loop, 0.0)
                found.steps[loop] = max(before, step * pitch) if loop in straight else before + step * pitch
        pitch *= size
    found.bytes = pitch
    return found


def _straight(access: Access, shape: list[float], fixed: frozenset[int]) -> set[int]:
    """Loops that move the address evenly through several dimensions: a fused loop, taken apart again just as
    the buffer is laid out. No division is left of it."""
    by_loop: dict[int, list[float]] = {}
    pitch = 1.0
    for index, size in zip(reversed(access.indices), reversed(shape), strict=False):
        for loop, step in index.steps.items():
            if step and size > 1 and loop not in fixed:
                by_loop.setdefault(loop, []).append(abs(float(step)) * pitch)
        pitch *= size
    return {loop for loop, parts in by_loop.items() if len(parts) > 1 and max(parts) - min(parts) <= 1e-6 * max(parts)}


def _within(loop: int, steps: dict[int, float], extent: float) -> bool:
    """Whether a fused loop stays in one row: 64 of 256 elements do, 64 of 160 do not. If so it does not move
    this dimension."""
    if steps[loop] * extent > 1 + 1e-9:
        return False
    each_row = 1 / steps[loop] / extent
    if abs(each_row - round(each_row)) > 1e-3:
        return False
    del steps[loop]
    return True


def _place(buffer: Buffer, where: dict[int, Place], dimensions: int) -> tuple[list[float], frozenset[int]]:
    place = where.get(id(buffer))
    shape = list(place.shape) if place else [float(size) for size in buffer.shape]
    shape += [1.0] * (dimensions - len(shape))
    return shape, place.fixed if place else frozenset()
