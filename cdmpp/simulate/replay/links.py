"""Transfer times: links by latency and rate or by a measured table, and collectives over links."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.simulate.replay.graph import Floats

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]
Algorithm = Literal["ring", "tree", "measured"]
_MOST_LOG_S = math.log(1e9)
COLLECTIVES: tuple[str, ...] = get_args(Collective)


@dataclass(frozen=True)
class Link:
    """A connection between devices.

    Between two rows of a table the time is linear in log(bytes) and log(seconds), as dPRO fits it. A smaller
    message than the first row takes as long as that one; a larger one than the last goes on at the last
    pair's slope, or at its time where that falls.
    """

    alpha_s: float = 0.0  # seconds of an empty message
    beta_s_per_byte: float = 0.0  # seconds per byte
    table: tuple[tuple[float, float], ...] = ()  # measured times instead, at least two, bytes rising from above 0

    def __post_init__(self) -> None:
        if not self.table:
            return
        sizes = [size for size, _ in self.table]
        logs = [math.log(size) for size in sizes if size > 0]
        if len(sizes) < 2 or len(logs) < len(sizes) or any(a >= b for a, b in pairwise(logs)):
            raise FieldError(
                "a table needs two rows at least, with rising bytes above 0", hint="[[1024, 2e-5], [1048576, 3e-4]]"
            )
        if any(seconds <= 0 for _, seconds in self.table):
            raise FieldError("a table's seconds are above 0", hint="[[1024, 2e-5], [1048576, 3e-4]]")

    def seconds(self, size: float) -> float:
        """Seconds of one message of ``size`` bytes.

        Raises FieldError: so far beyond the table that it would take more than 1e9 s.
        """
        if not self.table:
            return self.alpha_s + self.beta_s_per_byte * size
        if size <= self.table[0][0]:
            return self.table[0][1]
        upper = min(bisect_right([row for row, _ in self.table], size), len(self.table) - 1)
        (x0, y0), (x1, y1) = self.table[upper - 1], self.table[upper]
        if size in (x0, x1):
            return y0 if size == x0 else y1
        slope = (math.log(y1) - math.log(y0)) / (math.log(x1) - math.log(x0))
        if size > x1:
            # Where a table falls at its end, by noise, its extension is constant.
            return _from_log(math.log(y1) + max(slope, 0.0) * (math.log(size) - math.log(x1)))
        return _from_log(math.log(y0) + slope * (math.log(size) - math.log(x0)))

    def seconds_of(self, sizes: Floats) -> Floats:
        """:meth:`seconds` of several sizes, without its error."""
        if not self.table:
            return self.alpha_s + self.beta_s_per_byte * sizes
        x, y = np.log(np.array(self.table)).T
        at = np.log(np.maximum(sizes, self.table[0][0]))
        beyond = max((y[-1] - y[-2]) / (x[-1] - x[-2]), 0.0) * np.maximum(at - x[-1], 0.0)
        return np.asarray(np.exp(np.interp(at, x, y) + beyond))

    def measured(self, size: float) -> bool:
        """Whether a message of this size is within the table; True without a table."""
        return not self.table or self.table[0][0] <= size <= self.table[-1][0]


def _from_log(log_s: float) -> float:
    if log_s > _MOST_LOG_S:
        raise FieldError("a transfer beyond the table would take more than 1e9 s", hint="measure a row of such a size")
    return math.exp(log_s)


def collective_steps(op: Collective, ranks: int, size: float, algorithm: Algorithm) -> tuple[int, float]:
    """Number of consecutive messages of a collective, and the bytes of each.

    ``size``: bytes of the whole buffer: the data of each rank before an all-reduce, reduce-scatter or all-to-all, and
    after an all-gather. With the algorithm "measured" the link's figures are of the whole operation, not of a message.

    With p ranks and n bytes: ring all-reduce 2 (p - 1) messages of n / p; tree all-reduce 2 ceil(log2 p) of n;
    reduce-scatter, all-gather and all-to-all p - 1 of n / p; send 1 of n. (Thakur, Rabenseifner, Gropp: Optimization of
    Collective Communication Operations in MPICH, 2005, without the cost of adding.)
    Raises FieldError: a send between other than two ranks, or an algorithm that the operation does not have.
    """
    if op == "send" and ranks != 2:
        raise FieldError(f"a send has two ranks, not {ranks}", hint="ranks: [from, to]")
    if algorithm == "measured":
        return 1, size
    if ranks == 1:
        return 0, 0.0
    if op == "send":
        return 1, size
    if algorithm == "tree":
        if op != "all_reduce":
            raise FieldError(f"{op} has no tree algorithm here", hint="use ring")
        return 2 * math.ceil(math.log2(ranks)), size
    return (2 if op == "all_reduce" else 1) * (ranks - 1), size / ranks


def collective_s(op: Collective, ranks: int, size: float, link: Link, algorithm: Algorithm = "ring") -> float:
    """Seconds of a collective over equal links: see :func:`collective_steps`.

    Examples
    --------
    >>> collective_s("all_reduce", 4, 4e6, Link(alpha_s=1e-5, beta_s_per_byte=1e-9))
    0.00606
    """
    steps, bytes_per_step = collective_steps(op, ranks, size, algorithm)
    return steps * link.seconds(bytes_per_step) if steps else 0.0
