"""The compact AST of a tensor program (CDMPP section 4.1): one leaf per computation, with its loop path.

Inner nodes (loops) are folded into the leaves below them; what remains of the tree is each leaf's depth
and pre-order rank. :mod:`cdmpp.features.walk` builds it, :mod:`cdmpp.features.leaf` makes vectors of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cdmpp.features.affine import AffineRange, Num

#: Kinds of arithmetic that are counted, per evaluation of the stored expression.
OPERATIONS = (
    *("float_add", "float_mul", "float_fma", "float_div", "float_compare", "float_math", "float_cast"),
    *("int_add", "int_mul", "int_div", "int_compare", "int_other", "select", "other_call"),
)


@dataclass(slots=True)
class Loop:
    """One loop on the path to a leaf."""

    name: str
    extent: Num
    kind: str  # serial, parallel, vectorized, unrolled, or a thread tag such as blockIdx.x
    unroll_step: int = 0
    reduces: bool = False  # feeds a reduction variable of a block


@dataclass(slots=True)
class Buffer:
    """One tensor of the program."""

    name: str
    dtype: str
    scope: str
    shape: list[Num]
    is_parameter: bool
    #: Dynamic shared memory; at least two copies in a software pipeline; (axis, factor, offset) of padded rows.
    dynamic: bool = False
    double: bool = False
    padding: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Access:
    """A read or write of a buffer: one ``AffineRange`` per dimension."""

    buffer: Buffer
    indices: list[AffineRange]
    also_read: bool = False
    #: Sizes of the box that a warp accesses at once, with its lowest corner in ``indices``; empty: one element.
    box: tuple[int, ...] = ()


@dataclass(slots=True)
class Leaf:
    """One computation: its loops (outermost first), store, reads and arithmetic."""

    name: str
    path: tuple[int, ...]
    store: Access
    reads: list[Access]
    counts: list[int]
    compute_dtype: str
    rank: int
    depth: int
    is_init: bool = False
    predicated: Num = False
    intrinsic: str = ""
    reduce_loops: frozenset[int] = frozenset()
    #: Calls of a mathematical library per evaluation, in units of an exponential.
    library_calls: float = 0.0
    #: Reads in the arguments of each call of a mathematical library that every evaluation makes.
    call_reads: list[list[Access]] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Place in the depth-first sequence that marks both entry and exit: 2 * rank - depth."""
        return 2 * self.rank - self.depth


@dataclass(slots=True)
class CompactAST:
    """Leaves in pre-order, with the loops they refer to by index."""

    leaves: list[Leaf] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    #: (rank, depth, loop index or None, leaf index or None) of every inner node and leaf, for printing.
    outline: list[tuple[int, int, int | None, int | None]] = field(default_factory=list)
    #: Columns of a program with thread bindings (:mod:`cdmpp.features.launch_columns`), where its walk recorded them.
    launches: np.ndarray[Any, np.dtype[np.float32]] | None = None
