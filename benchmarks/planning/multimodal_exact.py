"""Multimodal pipeline plans against brute force on small random requests.

Each request has one to three modules of two to five layers on two or three ranks, and up to four items of each
module. Brute force tries every cut of the layers into every allowed number of segments, every number of
sub-micro-batches of each module, those of every number of micro-batches of samples, and for each of these all orders
(branch and bound, without the planner's search and bounds of requests). The plan must be within 1 % of the shortest,
and its lower bound not above it. ``--cases 100 --out benchmarks/results/multimodal_exact.json`` takes some minutes.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.results import write_result
from cdmpp.plan.multimodal import Module, plan_step
from cdmpp.plan.multimodal.branch_and_bound import branch_and_bound
from cdmpp.plan.multimodal.candidates import split_micro_batches
from cdmpp.plan.multimodal.links import link_items
from cdmpp.plan.multimodal.memory import Memory
from cdmpp.plan.multimodal.modules import split_evenly
from cdmpp.plan.multimodal.placement import Chunk, Placement
from cdmpp.plan.multimodal.tasks import make_tasks
from cdmpp.predict.requests.budget import SearchControl

#: Most designs of a request, and most passes of one of them.
MAX_DESIGNS, MAX_PASSES = 30_000, 40
#: Largest difference of a plan and the shortest one that counts as found.
WITHIN = 0.01


@dataclass(frozen=True)
class Case:
    """A small request."""

    modules: list[Module]
    batch: list[int]
    ranks: int


def random_case(rng: np.random.Generator, max_designs: int = MAX_DESIGNS, max_passes: int = MAX_PASSES) -> Case:
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


def compare(case: Case, *, budget_s: float = 600.0, max_steps: int | None = None) -> dict[str, Any]:
    """Plan a request and compare it with the shortest plan."""
    plan = plan_step(case.modules, case.batch, case.ranks, control=SearchControl(budget_s), max_steps=max_steps)
    best_s = shortest_s(case, plan.schedule.makespan_s)
    return {
        "makespan_s": plan.schedule.makespan_s,
        "shortest_s": best_s,
        "lower_bound_s": plan.bound_s,
        "complete": plan.complete,
        "excess": plan.schedule.makespan_s / best_s - 1,
        "gap": best_s / plan.bound_s - 1,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000, help="orders that each search evaluates")
    parser.add_argument("--budget", type=float, help="seconds of each search instead")
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = []
    for number in range(options.cases):
        case = random_case(rng)
        row = (
            compare(case, max_steps=options.steps) if options.budget is None else compare(case, budget_s=options.budget)
        )
        rows.append(row)
        shape = f"layers {[len(m.layers) for m in case.modules]}, items {case.batch}, {case.ranks} ranks"
        print(
            f"{number} {shape}: plan {row['makespan_s']:.2f} s, shortest {row['shortest_s']:.2f} s "
            f"(+{100 * row['excess']:.2f} %), bound {row['lower_bound_s']:.2f} s, complete {row['complete']}",
            flush=True,
        )
    result = {
        "what": "multimodal plans against brute force over cuts, sub-micro-batches and orders",
        "cases": len(rows),
        "steps": options.steps if options.budget is None else None,
        "budget_s": options.budget,
        "within_1_percent": sum(row["excess"] <= WITHIN for row in rows),
        "shortest": sum(row["excess"] <= 1e-9 for row in rows),
        "worst_excess": max(row["excess"] for row in rows),
        "complete": sum(row["complete"] for row in rows),
        "wrong_bounds": sum(row["lower_bound_s"] > row["shortest_s"] * (1 + 1e-9) for row in rows),
        "mean_bound_gap": float(np.mean([row["gap"] for row in rows])),
        "rows": rows,
    }
    print({name: value for name, value in result.items() if name != "rows"})
    if options.out is not None:
        write_result(options.out, result)


if __name__ == "__main__":
    main()
