"""The best contiguous stages, by dynamic programming.

Two goals. ``slowest``: the longest stage as short as can be, which is what a long run of micro-batches waits
for; dynamic programming finds the best (as in PipeDream, SOSP '19, section 3.1, without replication).
``step``: the time of a whole 1F1B step. There dynamic programming finds the split with the least lower bound,
and moving its boundaries under the emulator does the rest; few splits are tried in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from math import comb
from typing import Any, Literal

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.emulator.emulate import Emulator
from cdmpp.emulator.evaluate import Floats
from cdmpp.errors import InfeasibleError
from cdmpp.planning.split.dynamic import best_split, bound, larger, longest
from cdmpp.planning.split.stages import Split, equal_count, greedy, step_bound_s
from cdmpp.planning.split.table import LayerTable, Rank

Goal = Literal["slowest", "step"]
#: Splits up to this number are all simulated, where the goal is the step.
FEW = 2000


@dataclass(frozen=True)
class Found:
    """A split with what is known of it.

    Attributes
    ----------
    split : Split
    value_s, bound_s : float
        What was to be made small, and what no contiguous split can go below.
    steps : int
        Splits that were simulated.
    """

    split: Split
    value_s: float
    bound_s: float
    steps: int = 0


def split(
    table: LayerTable,
    ranks: Sequence[Rank],
    goal: Goal = "slowest",
    *,
    any_order: bool = False,
    watch: SearchControl | None = None,
    max_steps: int | None = None,
    emulator: Emulator | None = None,
    answer: Callable[[Found], dict[str, Any]] | None = None,
) -> Found:
    """Find the best contiguous split; each rank gets a layer at least.

    Parameters
    ----------
    table : LayerTable
        With at least as many layers as there are ranks.
    ranks : sequence of Rank
        In the order of the pipeline.
    goal : {"slowest", "step"}
    any_order : bool
        Whether the ranks may change places.
    watch : SearchControl, optional
    max_steps : int, optional
        Splits to simulate for the goal "step"; the first four are in any case.
    emulator : Emulator, optional
    answer : callable, optional
        Makes JSON values of what was found so far, for those who watch.

    Raises
    ------
    InfeasibleError
        No split fits into the memory; the message says what would.
    """
    watch, emulator = watch or SearchControl(), emulator or Emulator()
    slowest = best_split(table, ranks, any_order, longest)
    if slowest is None:
        raise _too_little(table, ranks, any_order)
    if goal == "slowest":
        return Found(slowest, slowest.slowest_s, slowest.slowest_s)
    least = best_split(table, ranks, any_order, bound)
    assert least is not None  # it fits where `slowest` does
    bound_s = step_bound_s(least)
    # Always all of these: however small the budget, the answer is no worse than the baselines.
    seeds = [one for one in (least, slowest, equal_count(table, ranks), greedy(table, ranks)) if one.fits()]
    values_s = [one.step(emulator).makespan_s for one in seeds]
    best_s, steps = min(values_s), len(seeds)
    best = seeds[values_s.index(best_s)]
    orders = arrangements(ranks) if any_order else [tuple(range(len(ranks)))]
    few = len(orders) * comb(len(table) - 1, len(ranks) - 1) <= FEW
    candidates = every(table, ranks, orders) if few else moved(best)
    while best_s > bound_s and not watch.expired and (max_steps is None or steps < max_steps):
        candidate = next(candidates, None)
        if candidate is None:
            if few:
                bound_s = best_s  # all have been tried
            break
        if not candidate.fits():
            continue
        steps += 1
        value_s = candidate.step(emulator).makespan_s
        if value_s < best_s:
            best, best_s = candidate, value_s
            candidates = candidates if few else moved(best)
        so_far = Found(best, best_s, bound_s, steps)
        watch.report(best=best_s, bound=bound_s, answer=partial(answer, so_far) if answer else None)
    return Found(best, best_s, bound_s, steps)


def arrangements(ranks: Sequence[Rank]) -> list[tuple[int, ...]]:
    """The orders of ranks, those that only swap equal ones but once; the first ``FEW`` and one more."""
    found: list[tuple[int, ...]] = []

    def extend(order: tuple[int, ...]) -> None:
        if len(found) > FEW:
            return
        if len(order) == len(ranks):
            found.append(order)
        tried = set()
        for r, rank in enumerate(ranks):
            if r not in order and rank not in tried:
                tried.add(rank)
                extend((*order, r))

    extend(())
    return found


def every(table: LayerTable, ranks: Sequence[Rank], orders: Sequence[tuple[int, ...]]) -> Iterator[Split]:
    """All contiguous splits for some orders of the ranks, whether they fit or not."""
    for order in orders:
        used = tuple(ranks[r] for r in order)
        for cuts in combinations(range(1, len(table)), len(ranks) - 1):
            yield Split(table, used, order, (0, *cuts, len(table)))


def moved(one: Split) -> Iterator[Split]:
    """Splits with one boundary, or two, a layer further."""
    single = [(at, by) for at in range(1, len(one.begin) - 1) for by in (-1, 1)]
    moves: list[tuple[tuple[int, int], ...]] = [(move,) for move in single]
    moves += [(a, b) for a, b in combinations(single, 2) if a[0] != b[0]]
    for move in moves:
        begin = list(one.begin)
        for at, by in move:
            begin[at] += by
        if all(a < b for a, b in pairwise(begin)):
            yield Split(one.table, one.ranks, one.order, tuple(begin))


def _too_little(table: LayerTable, ranks: Sequence[Rank], any_order: bool) -> InfeasibleError:
    """What to say where no split fits: by how much the memory would have to grow."""
    count = len(ranks)

    def weigh(rank: Rank, position: int) -> Floats:
        held = table.all_bytes_held(table.ahead(position, count))
        there = np.arange(len(table) + 1)
        return np.where(there[None, :] > there[:, None], held / rank.memory_bytes, np.inf)

    least = best_split(table, ranks, any_order, larger, weigh)
    assert least is not None
    over = [
        (s, needed, rank.memory_bytes)
        for s, (needed, rank) in enumerate(zip(least.bytes_held, least.ranks, strict=True))
        if needed > rank.memory_bytes
    ]
    s, needed, limit = max(over, key=lambda one: one[1] / one[2])
    return InfeasibleError(
        f"ranks.{least.order[s]}.memory_bytes: no split fits: the one that comes nearest needs {needed:.12g} "
        f"bytes there, {needed / limit:.4g} times {limit:.12g}",
        path=f"ranks.{least.order[s]}.memory_bytes",
        hint=f"with {needed / limit:.6g} times the memory on every rank one fits; or use more ranks",
    )
