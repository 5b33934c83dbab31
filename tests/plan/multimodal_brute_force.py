"""Brute force over the plans of small random multimodal requests.

Each request has one to three modules of two to five layers on two or three ranks, and up to four items of each
module. Brute force tries every cut of the layers into every allowed number of segments, every number of
sub-micro-batches of each module, those of every number of micro-batches of samples, and for each of these all orders
(branch and bound, without the planner's search and bounds of requests).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.plan.multimodal import Module, plan_step
from cdmpp.plan.multimodal.candidates import split_micro_batches
from cdmpp.plan.multimodal.exact import branch_and_bound
from cdmpp.plan.multimodal.modules import Memory, link_items, split_evenly
from cdmpp.plan.multimodal.placement import Chunk, Placement
from cdmpp.plan.multimodal.tasks import make_tasks
from cdmpp.predict.requests.budget import SearchControl

#: Largest difference of a plan and the shortest one that counts as found.
WITHIN = 0.01


@dataclass(frozen=True)
class Case:
    """A small request."""

    modules: list[Module]
    batch: list[int]
    ranks: int


def random_case(rng: np.random.Generator, max_designs: int, max_passes: int) -> Case:
    """A request whose designs brute force can try."""
    while True:
        count, ranks = int(rng.integers(1, 4)), int(rng.integers(2, 4))
        modules = []
        for i in range(count):
            sizes = np.array([1.0, 2.0, 4.0])
            fixed, item, ratio = rng.uniform(0, 2), rng.uniform(0.3, 2), rng.uniform(0.8, 2.5)
            forward_s = np.round(fixed + item * sizes, 2)
            after = tuple(j for j in range(i) if rng.random() < 0.7)
            layers = int(rng.integers(2, 6))
            times = (1.0,) * layers if rng.random() < 0.7 else tuple(np.round(rng.uniform(0.5, 2, layers), 1).tolist())
            modules.append(Module(f"m{i}", times, sizes, forward_s, np.round(ratio * forward_s, 2), after))
        case = Case(modules, [int(n) for n in rng.integers(1, 5, count)], ranks)
        rows = [rows_of(len(module.layers), ranks) for module in modules]
        if math.prod(map(len, rows)) * math.prod(case.batch) > max_designs:
            continue
        most = sum(max(map(len, row)) * items for row, items in zip(rows, case.batch, strict=True))
        if 2 * most <= max_passes:
            return case


def rows_of(layers: int, ranks: int) -> list[tuple[Chunk, ...]]:
    """Every way to cut a module's layers into chunks over up to as many segments as have a layer on each rank."""
    parts = max(1, layers // ranks) * ranks
    rows = set()
    for inner in itertools.combinations_with_replacement(range(layers + 1), parts - 1):
        cuts = (0, *inner, layers)
        chunks: list[Chunk] = []
        for part in range(parts):
            if cuts[part + 1] > cuts[part]:
                rank = part % ranks
                segment = chunks[-1].segment + (rank <= chunks[-1].rank) if chunks else 0
                chunks.append(Chunk(segment, rank, cuts[part], cuts[part + 1] - cuts[part]))
        rows.add(tuple(chunks))
    return sorted(rows, key=lambda row: [(c.first, c.rank) for c in row])


def splits_of(case: Case) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every number of sub-micro-batches of each module, and every number of micro-batches of samples."""
    yield from itertools.product(*([split_evenly(n, count) for count in range(1, n + 1)] for n in case.batch))
    links = link_items(case.modules, case.batch)
    for count in range(1, case.batch[links.samples] + 1):
        yield tuple(split_micro_batches(case.batch, count, links)[0])


def shortest_s(case: Case, known_s: float) -> float:
    """Least makespan of all cuts, sub-micro-batches and orders, or ``known_s`` if none is shorter."""
    links = link_items(case.modules, case.batch)
    rows = [rows_of(len(module.layers), case.ranks) for module in case.modules]
    for items in set(splits_of(case)):
        for chunks in itertools.product(*rows):
            if _busiest_s(case, chunks, items) >= known_s * (1 - 1e-12):
                continue
            tasks = make_tasks(case.modules, Placement("segments", chunks), items, case.ranks, Memory(), links)
            order = np.full(tasks.size, -1, np.int64)
            tail_s = tasks.paths_s[1]
            known_s, complete, _ = branch_and_bound(
                case.ranks, tasks.rank_of_all, tasks.graph, tail_s, known_s, 100_000_000, order
            )
            assert complete
    return known_s


def _busiest_s(case: Case, chunks: Sequence[tuple[Chunk, ...]], items: Sequence[tuple[int, ...]]) -> float:
    """Seconds of work of the busiest rank."""
    load = [0.0] * case.ranks
    for module, row, units in zip(case.modules, chunks, items, strict=True):
        seconds = sum(sum(module.layer_s(n)) for n in units)
        for chunk in row:
            load[chunk.rank] += seconds * sum(module.layers[chunk.first : chunk.first + chunk.layers])
    return max(load)


def compare(case: Case, *, max_steps: int) -> dict[str, Any]:
    """Plan a request and compare it with the shortest plan."""
    plan = plan_step(case.modules, case.batch, case.ranks, control=SearchControl(600.0), max_steps=max_steps)
    best_s = shortest_s(case, plan.schedule.makespan_s)
    return {
        "makespan_s": plan.schedule.makespan_s,
        "shortest_s": best_s,
        "lower_bound_s": plan.bound_s,
        "complete": plan.complete,
        "excess": plan.schedule.makespan_s / best_s - 1,
    }
