"""Cuts of contiguous placements against every cut, by a 1F1B simulation in plain Python."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest

from cdmpp.plan.multimodal import Module, plan_step
from cdmpp.plan.multimodal.candidates import improve_cuts
from cdmpp.plan.multimodal.modules import link_items, split_evenly
from cdmpp.plan.multimodal.placement import contiguous


def chain(vision: int, language: int) -> list[Module]:
    sizes = np.array([1.0, 2.0, 4.0])
    return [
        Module("vision", (1.0,) * vision, sizes, 0.5 + sizes, 1.0 + 2 * sizes),
        Module("language", (1.0,) * language, sizes, 2 + 0.5 * sizes, 4 + sizes, after=(0,)),
    ]


def micro_batches(batch: tuple[int, int], count: int) -> list[np.ndarray]:
    """Items of both modules by micro-batch: sequences are the samples, image j belongs to one of them."""
    images, sequences = batch
    of_sequence = np.repeat(np.arange(count), split_evenly(sequences, count))
    of_image = of_sequence[np.arange(images) * sequences // images]
    return [np.bincount(of_image, minlength=count), np.bincount(of_sequence, minlength=count)]


def one_f_one_b_s(modules: list[Module], items: list[np.ndarray], cuts: tuple[int, ...]) -> float:
    """Makespan of 1F1B with the stages between the cuts, in seconds."""
    layers = [i for i, module in enumerate(modules) for _ in module.layers]
    ranks, count = len(cuts) - 1, len(items[0])
    cost = [[modules[i].layer_s(int(n)) if n else (0.0, 0.0) for n in items[i]] for i in range(2)]
    orders = []
    for r in range(ranks):
        warm_up = min(ranks - 1 - r, count)
        order = [("F", m) for m in range(warm_up)]
        for m in range(count):
            order += [("F", warm_up + m)] if warm_up + m < count else []
            order.append(("B", m))
        orders.append(order)
    ends: dict[tuple[int, str, int], float] = {}
    free = [0.0] * ranks
    while any(orders):
        for r, order in enumerate(orders):
            while order:
                way, m = order[0]
                previous = (r - 1, "F", m) if way == "F" else (r + 1, "B", m) if r < ranks - 1 else (r, "F", m)
                if previous[0] >= 0 and previous not in ends:
                    break
                order.pop(0)
                seconds = sum(cost[i][m][way == "B"] for i in layers[cuts[r] : cuts[r + 1]])
                free[r] = ends[r, way, m] = max(free[r], ends.get(previous, 0.0)) + seconds
    return max(free)


CASES = [((2, 8), (1, 2), 3), ((4, 3), (5, 3), 2), ((3, 6), (2, 4), 4), ((6, 2), (7, 2), 3)]


@pytest.mark.parametrize(("layers", "batch", "ranks"), CASES)
def test_improved_cuts_give_the_shortest_1f1b(layers, batch, ranks):
    modules = chain(*layers)
    for count in range(1, batch[1] + 1):
        items = micro_batches(batch, count)
        work_s = [sum(sum(m.layer_s(int(n))) for n in row if n) for m, row in zip(modules, items, strict=True)]
        even = contiguous(modules, [m.work * s for m, s in zip(modules, work_s, strict=True)], ranks)
        placement, seconds, remaining = improve_cuts(modules, even, items, ranks, 100_000)
        on = [sum(c.layers for row in placement.chunks for c in row if c.rank == r) for r in range(ranks)]
        cuts = tuple(np.cumsum([0, *on]).tolist())
        assert seconds == pytest.approx(one_f_one_b_s(modules, items, cuts))
        every = (
            one_f_one_b_s(modules, items, (0, *inner, sum(layers)))
            for inner in combinations_with_replacement(range(sum(layers) + 1), ranks - 1)
        )
        assert seconds == pytest.approx(min(every))
        assert 0 < remaining < 100_000


@pytest.mark.parametrize(("layers", "batch", "ranks"), CASES)
def test_plan_is_at_most_as_long_as_1f1b_with_any_cut(layers, batch, ranks):
    modules = chain(*layers)
    assert link_items(modules, batch, 1).samples == 1
    best = min(
        one_f_one_b_s(modules, micro_batches(batch, count), (0, *inner, sum(layers)))
        for count in range(1, batch[1] + 1)
        for inner in combinations_with_replacement(range(sum(layers) + 1), ranks - 1)
    )
    plan = plan_step(modules, batch, ranks, samples=1, max_steps=20)
    assert plan.schedule.makespan_s <= best * (1 + 1e-9)
    assert plan.baselines_s["1f1b"] <= best * (1 + 1e-9)
