"""Dynamic programming over contiguous splits, from the last stage to the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cdmpp.plan.split.stages import Split
from cdmpp.plan.split.table import LayerTable, Rank
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.simulate.emulator.stages import Floats


class UnfinishedError(Exception):
    """The budget ended before the best split was known."""


Join = Callable[[Floats, Floats, Floats, int], Floats]


def longest(time_s: Floats, transfer_s: Floats, rest_s: Floats, micro_batches: int) -> Floats:
    """The longest of a stage, the transfer after it and the following stages."""
    return np.maximum(time_s, np.maximum(transfer_s, rest_s))


def bound(time_s: Floats, transfer_s: Floats, rest_s: Floats, micro_batches: int) -> Floats:
    """Lower bound of a step from a stage on: all its passes, or one pass and then the following stages."""
    return np.maximum(micro_batches * time_s, time_s + 2 * transfer_s + rest_s)


def states(ranks: Sequence[Rank], any_order: bool) -> tuple[list[Rank], list[tuple[int, ...]]]:
    """States of the dynamic programming: kinds of ranks, and how many of each are left, fewest first.

    In a given order every rank is a separate kind, and the last ones are left.
    """
    if not any_order:
        return list(ranks), [
            tuple(int(r >= len(ranks) - left) for r in range(len(ranks))) for left in range(len(ranks) + 1)
        ]
    kinds = sorted(set(ranks), key=lambda rank: (rank.kind, rank.memory_bytes))
    counts = [sum(rank == kind for rank in ranks) for kind in kinds]
    grid_of = np.stack(np.meshgrid(*[np.arange(n + 1) for n in counts], indexing="ij"), axis=-1)
    all_of = [tuple(int(n) for n in row) for row in grid_of.reshape(-1, len(kinds))]
    return kinds, sorted(all_of, key=sum)


def best_split(
    table: LayerTable,
    ranks: Sequence[Rank],
    any_order: bool,
    join: Join,
    weigh: Callable[[Rank, int], Floats] | None = None,
    control: SearchControl | None = None,
) -> Split | None:
    """The split with the least value, from the last stage to the first; None where none fits.

    ``weigh`` replaces the time of every run of layers on a rank by another figure.

    Raises
    ------
    UnfinishedError
        ``control`` has expired.
    """
    kinds, left = states(ranks, any_order)
    count, layers = len(ranks), len(table)
    # best[state][i]: least value of layers i and later on the ranks of the state.
    best: dict[tuple[int, ...], Floats] = {left[0]: np.full(layers + 1, np.inf)}
    best[left[0]][layers] = 0.0
    choice: dict[tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    transfer_s = np.concatenate(([0.0], table.transfer_s))
    transfer_s[layers] = 0.0
    runs = {kind: table.times_s(kind.kind) for kind in kinds} if weigh is None else {}
    for state in left[1:]:
        if control is not None and control.expired:
            raise UnfinishedError
        position = count - sum(state)
        # In a given order, the next rank is the first of those that are left.
        nexts = [k for k, n in enumerate(state) if n] if any_order else [position]
        value = np.full(layers + 1, np.inf)
        which, until = np.zeros(layers + 1, np.int64), np.zeros(layers + 1, np.int64)
        for k in nexts:
            rest_s = best[tuple(n - (other == k) for other, n in enumerate(state))]
            if weigh is None:
                held = table.all_bytes_held(table.ahead(position, count))
                time_s = np.where(held <= kinds[k].memory_bytes, runs[kinds[k]], np.inf)
            else:
                time_s = weigh(kinds[k], position)
            joined = join(time_s, transfer_s[None, :], rest_s[None, :], table.micro_batches)
            at = joined.argmin(axis=1)
            least = joined[np.arange(layers + 1), at]
            better = least < value
            value[better], until[better], which[better] = least[better], at[better], k
        best[state], choice[state] = value, (which, until)
    if not np.isfinite(best[left[-1]][0]):
        return None
    state, begin, used = left[-1], [0], []
    while begin[-1] < layers:
        k, until_layer = (int(part[begin[-1]]) for part in choice[state])
        state = tuple(n - (other == k) for other, n in enumerate(state))
        used.append(kinds[k])
        begin.append(until_layer)
    return Split(table, tuple(used), _order(ranks, used, any_order), tuple(begin))


def _order(ranks: Sequence[Rank], used: Sequence[Rank], any_order: bool) -> tuple[int, ...]:
    """Index in the request of each rank in use."""
    if not any_order:
        return tuple(range(len(ranks)))
    free: dict[Rank, list[int]] = {}
    for r, rank in enumerate(ranks):
        free.setdefault(rank, []).append(r)
    return tuple(free[rank].pop(0) for rank in used)


def larger(share: Floats, transfer_s: Floats, rest: Floats, micro_batches: int) -> Floats:
    """The larger of the figures of a stage and of the following ones."""
    return np.maximum(share, rest)
