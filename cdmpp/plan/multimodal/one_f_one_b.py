"""1F1B of contiguous placements: its orders, and cuts that make it short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cdmpp.plan.multimodal.modules import Module, topological_order
from cdmpp.plan.multimodal.placement import Placement, contiguous_at, contiguous_cuts, move_layer
from cdmpp.plan.multimodal.tasks import Tasks
from cdmpp.utils.jit import jit


def one_f_one_b_orders(tasks: Tasks, micro_batch: Sequence[Sequence[int]]) -> list[list[int]]:
    """1F1B order of each rank's tasks for a contiguous placement.

    Rank r of P runs ``min(P - 1 - r, micro-batches)`` forward passes, then forward and backward passes alternately.

    Parameters
    ----------
    tasks : Tasks
    micro_batch : sequence of sequence of int
        Micro-batch of each unit, by module.
    """
    ranks, half = tasks.ranks, tasks.half
    count = 1 + max(max(units) for units in micro_batch if len(units))
    stages: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(ranks)]
    for i, _ in tasks.classes:
        for unit, row in enumerate(tasks.ids[i]):
            for t in row.tolist():
                stages[int(tasks.rank[t])][micro_batch[i][unit]].append(t)
    orders = []
    for r, stage in enumerate(stages):
        warm_up = min(ranks - 1 - r, count)
        order = [t for m in range(warm_up) for t in stage[m]]
        for m in range(count):
            if warm_up + m < count:
                order += stage[warm_up + m]
            order += [half + t for t in reversed(stage[m])]
        orders.append(order)
    return orders


def improve_cuts(
    modules: Sequence[Module], placement: Placement, items: Sequence[np.ndarray], ranks: int, max_passes: int
) -> tuple[Placement, float, int]:
    """Improve a contiguous placement by the makespan of 1F1B rather than by its slowest stage.

    With few or unequal micro-batches the most even cut is not the best: filling and draining the pipeline counts as
    much as its pace. Layers are moved between two stages as long as that shortens 1F1B.

    Parameters
    ----------
    modules : sequence of Module
    placement : Placement
        Contiguous placement to start from.
    items : sequence of ndarray of int64, shape (micro-batches,)
        Items of each module in each micro-batch; 0 where it has none.
    ranks : int
    max_passes : int
        Passes to simulate altogether.

    Returns
    -------
    placement : Placement
    makespan_s : float
        Makespan of 1F1B whose stages pass a micro-batch on as a whole.
    remaining : int
        Passes of ``max_passes`` that are left.
    """
    count = len(items[0])
    forward, backward = [], []
    for i in topological_order(modules):
        costs = {int(n): modules[i].layer_s(int(n)) if n else (0.0, 0.0) for n in set(items[i].tolist())}
        seconds = np.array([costs[int(n)] for n in items[i]]).T
        layers = np.array(modules[i].layers)[:, None]
        forward.append(layers * seconds[0])
        backward.append(layers * seconds[1])
    zeros = np.zeros((1, count))
    forward_total_s = np.cumsum(np.concatenate([zeros, *forward]), axis=0)
    backward_total_s = np.cumsum(np.concatenate([zeros, *backward]), axis=0)
    cuts = contiguous_cuts(placement, ranks)

    def makespan_s(at: np.ndarray) -> float:
        return float(_one_f_one_b_s(np.diff(forward_total_s[at], axis=0), np.diff(backward_total_s[at], axis=0)))

    # With many ranks and few micro-batches the time is that of waiting ranks, which are visited in each round.
    passes = 2 * ranks * max(count, ranks // 32)
    best_s, remaining = makespan_s(cuts), max_passes - passes
    moves = rank_pairs(ranks)
    while remaining >= passes and (pair := next(moves, None)) is not None:
        source, target = pair
        if cuts[source + 1] == cuts[source]:
            continue
        moved = move_layer(cuts, source, target)
        remaining -= passes
        moved_s = makespan_s(moved)
        if moved_s < best_s * (1 - 1e-9):
            best_s, cuts, moves = moved_s, moved, rank_pairs(ranks)
    return contiguous_at(modules, cuts), best_s, remaining


def rank_pairs(ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs of different ranks, neighbours first: most of the gain of a move of layers is there."""
    for distance in range(1, ranks):
        for a in range(ranks):
            for b in (a - distance, a + distance):
                if 0 <= b < ranks:
                    yield a, b


@jit
def _one_f_one_b_s(forward_s: np.ndarray, backward_s: np.ndarray) -> float:
    """Makespan of 1F1B in seconds; durations of the passes, both of shape (ranks, micro-batches)."""
    ranks, count = forward_s.shape
    # Ends of the passes; below 0 before they run.
    forward_end = np.full((ranks, count), -1.0)
    backward_end = np.full((ranks, count), -1.0)
    free = np.zeros(ranks)
    place = np.zeros(ranks, np.int64)
    remaining = 2 * ranks * count
    while remaining > 0:
        for r in range(ranks):
            warm_up = min(ranks - 1 - r, count)
            while place[r] < 2 * count:
                # ``warm_up`` forward passes, forward and backward alternately, ``warm_up`` backward passes.
                at = place[r] - warm_up
                alternate = 2 * (count - warm_up)
                if at < 0 or (at < alternate and at % 2 == 0):
                    m = place[r] if at < 0 else warm_up + at // 2
                    ready = forward_end[r - 1, m] if r > 0 else 0.0
                    if ready < 0.0:
                        break
                    free[r] = max(free[r], ready) + forward_s[r, m]
                    forward_end[r, m] = free[r]
                else:
                    m = at // 2 if at < alternate else place[r] - count
                    ready = backward_end[r + 1, m] if r < ranks - 1 else forward_end[r, m]
                    if ready < 0.0:
                        break
                    free[r] = max(free[r], ready) + backward_s[r, m]
                    backward_end[r, m] = free[r]
                place[r] += 1
                remaining -= 1
    return float(free.max())
