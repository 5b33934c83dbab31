"""Hardware intrinsics, expanded into the loop nests that they replaced.

A tensorised block holds one call in place of its inner loops; what it reads and writes stands in the
block's regions. Loops of the kind ``tensorized`` are put in their place, so that a tensor-core tile of
16 x 16 x 16 counts the same arithmetic and bytes as the loops would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cdmpp.features.affine import AffineRange, Num
from cdmpp.features.ast import Access, Buffer, Loop

KIND = "tensorized"
#: Marks in the name of an intrinsic that multiplies two tensors.
_CONTRACTS = ("mma", "dp4a", "dot")


@dataclass
class Region:
    """A box of a buffer: lowest corner (over the loops) and extents."""

    buffer: Buffer
    corner: list[AffineRange]
    extents: list[Num]

    @property
    def elements(self) -> int:
        """Elements of the box."""
        return math.prod(int(e) for e in self.extents)


@dataclass
class Nest:
    """The loops of an intrinsic and its accesses, numbered from ``first_loop``."""

    store: Access
    reads: list[Access]
    loops: list[Loop] = field(default_factory=list)
    contracts: bool = False


def loop_nest(name: str, write: Region, reads: list[Region], first_loop: int) -> Nest:
    """Loops and accesses of one evaluation of an intrinsic.

    Parameters
    ----------
    name : str
        Of the intrinsic: whether it multiplies.
    write : Region
        What it writes.
    reads : list of Region
        What it reads; the written buffer among them where it accumulates.
    first_loop : int
        Number of the program's loops so far: the new ones count on from here.
    """
    others = [r for r in reads if r.buffer is not write.buffer]
    if any(mark in name for mark in _CONTRACTS) and len(others) >= 2:
        sizes = contraction_sizes(write.elements, others[0].elements, others[1].elements)
        m, n, k = range(first_loop, first_loop + 3)
        loops = [Loop(f"{KIND}_{axis}", size, KIND) for axis, size in zip("mnk", sizes, strict=True)]
        loops[2].reduces = True
        numbered = dict(zip((m, n, k), sizes, strict=True))
        axes = [(others[0], (m, k)), (others[1], (k, n)), *((other, (m, n)) for other in others[2:])]
        accesses = [_access(region, {p: numbered[p] for p in own}) for region, own in axes]
        store = _access(write, {m: sizes[0], n: sizes[1]})
        if len(others) < len(reads):
            accesses.append(store)
        return Nest(store, accesses, loops, contracts=True)
    wide = [int(e) for e in write.extents if int(e) > 1]
    loops = [Loop(f"{KIND}_{i}", size, KIND) for i, size in enumerate(wide)]
    numbered = {first_loop + i: size for i, size in enumerate(wide)}
    return Nest(_access(write, numbered), [_access(r, numbered) for r in reads], loops)


def contraction_sizes(out: int, left: int, right: int) -> tuple[int, int, int]:
    """m, n, k of ``out[m, n] += left[m, k] * right[k, n]`` from the numbers of elements.

    Thread layouts (32 lanes of 8 registers) hide the shape but not the counts. Where they fit no
    contraction, m and k keep the amount of arithmetic.
    """
    m, n = math.isqrt(out * left // right), math.isqrt(out * right // left)
    k = math.isqrt(left * right // out)
    if (m * n, m * k, k * n) == (out, left, right):
        return m, n, k
    return out, 1, max(1, math.isqrt(left * right // out))


def _access(region: Region, loops: dict[int, int]) -> Access:
    """The region as an access that the loops sweep: one loop to a dimension where the sizes say so."""
    wide = [d for d, extent in enumerate(region.extents) if int(extent) > 1]
    matched = _match([int(region.extents[d]) for d in wide], loops)
    indices = []
    for d, (corner, extent) in enumerate(zip(region.corner, region.extents, strict=True)):
        steps: dict[int, Num] = dict(corner.steps)
        if d in wide:
            steps |= dict.fromkeys([matched[wide.index(d)]] if matched else loops, 1)
        indices.append(AffineRange(corner.low, corner.high + extent - 1, steps, corner.indirect))
    return Access(region.buffer, indices)


def _match(extents: list[int], loops: dict[int, int]) -> list[int] | None:
    for order in (list(loops), list(reversed(loops))):
        if [loops[p] for p in order] == extents:
            return order
    return None
