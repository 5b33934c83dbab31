"""Cuts and sub-micro-batches of multimodal plans against brute force, and the bound that holds for all of them.

Brute force plans small random requests: one to three modules of two to five layers on two or three ranks, and up to
four items of each module. It tries every way to put the layers on ranks in turn, every number of
sub-micro-batches of each module, those of every number of micro-batches of samples, and for each of these all orders
(branch and bound, without the planner's search and bounds of requests).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.plan.base.solve import read_request
from cdmpp.plan.multimodal import Module, StepSolution
from cdmpp.plan.multimodal.check import check
from cdmpp.plan.multimodal.designs import Design, DesignSearch, Evaluated, EvaluatedDesign
from cdmpp.plan.multimodal.modules import MemoryOptions, link_items, split_evenly
from cdmpp.plan.multimodal.placement import Chunk, Placement, cuts_of, every_row, place, split_micro_batches
from cdmpp.plan.multimodal.request_bound import request_bound_s
from cdmpp.plan.multimodal.schema import MultimodalRequest
from cdmpp.plan.multimodal.search import branch_and_bound
from cdmpp.plan.multimodal.tasks import RULES, list_schedule, make_tasks, sequence_by
from cdmpp.predict.requests import budget
from cdmpp.predict.requests.budget import SearchControl
from tests.plan.multimodal_cases import plan_step, rows_of

pytestmark = pytest.mark.slow

SIZES = np.array([1.0, 2.0, 4.0, 8.0])


def module(name: str, layers: int, item_s: float, fixed_s: float, after: tuple[int, ...] = ()) -> Module:
    """A module whose layers take a fixed time and a time for each item; backward twice as long."""
    seconds = item_s * (fixed_s + SIZES)
    return Module(name, (1.0,) * layers, SIZES, seconds, 2 * seconds, after)


def chain(*modules: tuple[int, float, float]) -> list[Module]:
    return [module(f"m{i}", *given, (i - 1,) if i else ()) for i, given in enumerate(modules)]


CHAIN = chain((7, 0.925, 0.25), (6, 0.99, 2.0), (10, 0.83, 0.25))


def plan(modules: list[Module], batch: list[int], ranks: int, max_steps: int, **more: Any) -> StepSolution:
    return plan_step(modules, batch, ranks, control=SearchControl(600.0), max_steps=max_steps, **more)


# Against brute force


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
            tasks = make_tasks(case.modules, Placement(chunks), items, case.ranks, MemoryOptions(), links)
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
        for chunk in row:
            load[chunk.rank] += module.units_s(units) * sum(module.layers[chunk.first : chunk.first + chunk.layers])
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


def test_plans_are_near_the_shortest_and_bounds_below_it_and_complete_ones_are_the_shortest() -> None:
    rng = np.random.default_rng(1)
    rows = [compare(random_case(rng, max_designs=2000, max_passes=32), max_steps=1000) for _ in range(10)]
    assert [row["excess"] for row in rows if row["excess"] > WITHIN] == []
    assert all(row["lower_bound_s"] <= row["shortest_s"] * (1 + 1e-9) for row in rows)
    complete = [row for row in rows if row["complete"]]
    assert len(complete) > 2
    for row in complete:
        assert row["makespan_s"] == row["lower_bound_s"] == pytest.approx(row["shortest_s"], rel=1e-9)


# Larger steps


def test_sizes_that_are_no_halves_of_the_rules_are_found() -> None:
    # 15 items in 5 sub-micro-batches of 3. In 4, the rule's number, or in 8 and 15 the step takes 442 s.
    solution = plan([module("a", 22, 1.0, 1.0)], [15], 4, 2000)
    assert solution.schedule.makespan_s <= 396.0
    assert solution.bound_s < 396.0 and not solution.complete


def test_uneven_cuts_and_counts_of_three_modules_are_found() -> None:
    solution = plan(CHAIN, [10, 11, 4], 5, 2500)
    # With the rule's sizes, their halves and quarters on even cuts the step takes 228 s.
    assert solution.schedule.makespan_s <= 200.0
    assert solution.bound_s <= solution.searched_bound_s <= solution.schedule.makespan_s


def test_plan_is_not_longer_than_with_any_efficiency_of_the_rule() -> None:
    modules = chain((8, 0.5, 1.0), (9, 1.0, 0.25))
    default = plan(modules, [9, 7], 3, 200).schedule.makespan_s
    for efficiency in (0.5, 0.6, 0.7, 0.8, 0.9, 0.99):
        solution = plan(modules, [9, 7], 3, 200, efficiency=efficiency)
        assert default <= solution.schedule.makespan_s * (1 + 1e-12)
        assert solution.schedule.makespan_s <= min(solution.baselines_s.values())


# The lower bound


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Module], list[int], int]:
    ranks, count = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    seconds = st.lists(st.integers(1, 40), min_size=4, max_size=4).map(lambda row: np.array(sorted(row)) / 4)
    modules = []
    for i in range(count):
        after = tuple(draw(st.sets(st.integers(0, i - 1), max_size=2))) if i else ()
        layers = draw(st.lists(st.sampled_from([1.0, 1.0, 0.5, 2.0]), min_size=1, max_size=9))
        modules.append(Module(f"m{i}", tuple(layers), SIZES, draw(seconds), draw(seconds), after))
    batch = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count).filter(any))
    return modules, batch, ranks


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(0, 2**31))
def test_lower_bound_holds_for_random_cuts_counts_and_orders(
    step: tuple[list[Module], list[int], int], seed: int
) -> None:
    modules, batch, ranks = step
    rng = np.random.default_rng(seed)
    cuts = []
    for one in modules:
        parts, start = ranks * int(rng.integers(1, one.most_segments(ranks) + 1)), int(rng.integers(ranks))
        inner = sorted(rng.integers(len(one.layers) + 1, size=parts - 1).tolist())
        cuts.append((*[0] * start, 0, *inner, len(one.layers)))
    items = [split_evenly(n, int(rng.integers(1, n + 1))) if n else () for n in batch]
    links = link_items(modules, batch)
    tasks = make_tasks(modules, place(tuple(cuts), ranks), items, ranks, MemoryOptions(), links)
    schedule = list_schedule(tasks, sequence_by(tasks, rng.random(tasks.segments)), RULES[seed % len(RULES)])
    assert request_bound_s(modules, batch, ranks, links) <= schedule.makespan_s * (1 + 1e-9)


def test_lower_bound_of_one_module_is_that_of_the_best_pipeline() -> None:
    sizes = np.array([1.0])
    for segments, seconds in ((1, 90.0), (2, 81.0)):
        one = Module("a", (1.0,) * 8, sizes, sizes, 2 * sizes, segments=segments)
        assert request_bound_s([one], [12], 4, link_items([one], [12])) == seconds


# Cuts


def test_cuts_and_placements_are_inverse_and_empty_parts_are_left_out() -> None:
    cuts = ((0, 2, 2, 5, 5, 5, 6), (0, 0, 4, 4), (0, 0, 0, 1, 3, 4))
    placement = place(cuts, 3)
    assert [[(c.segment, c.rank, c.first, c.layers) for c in row] for row in placement.chunks] == [
        [(0, 0, 0, 2), (0, 2, 2, 3), (1, 2, 5, 1)],
        [(0, 1, 0, 4)],
        [(0, 2, 0, 1), (1, 0, 1, 2), (1, 1, 3, 1)],
    ]
    assert cuts_of(placement, 3) == cuts
    for layers, ranks in ((4, 3), (3, 2), (2, 4)):
        rows = every_row(layers, ranks, -(-layers // ranks), range(ranks))
        assert len(rows) == len({*rows}) and {*rows} == {*rows_of(layers, ranks)}


# Budget


def form(name: str, layers: int, after: list[str]) -> dict[str, Any]:
    cost = {"sizes": [1, 2, 4], "forward_s": [1.25, 2.0, 3.5], "backward_s": [2.5, 4.0, 7.0]}
    return {"name": name, "layers": layers, "after": after, "cost": cost}


REQUEST = {
    "modules": [form("vision", 24, []), form("language", 32, ["vision"])],
    "batch": {"vision": 40, "language": 30},
    "ranks": 8,
    "budget_s": 1.0,
}


def test_search_checks_the_budget_after_every_few_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def process_time(self) -> float:
            self.now += 0.001
            return self.now

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(budget, "time", clock)
    solution = plan_step(chain((24, 1.0, 0.5), (32, 1.0, 1.0)), [40, 30], 8, control=SearchControl(0.5))
    # Readings of the clock, one in a millisecond: few after the budget, and not many orders between two of them.
    assert clock.now < 0.55
    assert 0 < solution.steps < 16 * 500


def test_stopped_search_answers_at_once_with_a_plan_that_passes_the_check() -> None:
    request = read_request(MultimodalRequest, REQUEST)
    control = SearchControl(600.0)
    control.stop()
    answer = request.solve(control).model_dump()
    assert answer["steps"] <= 4
    assert check(request, answer) == []


def test_search_that_is_stopped_by_its_listener_answers_with_the_best_plan_so_far() -> None:
    request = read_request(MultimodalRequest, REQUEST)
    seen: list[float] = []

    def stop(progress: Any) -> None:
        seen.append(progress.best)
        if len(seen) == 5:
            control.stop()

    control = SearchControl(600.0, stop, every_s=0.0)
    answer = request.solve(control).model_dump()
    assert len(seen) <= 6
    assert answer["makespan_s"] <= min(seen)
    assert check(request, answer) == []


def test_pool_begins_with_the_last_best_design_also_where_it_is_better_by_a_rounding_error() -> None:
    """Orders are searched on the placement of the first design, so the plan must be on it."""
    best: list[EvaluatedDesign] = []
    step = SimpleNamespace(step=SimpleNamespace(modules=(), ranks=1))
    search = DesignSearch([step], np.random.default_rng(0), lambda: False, best.append)  # type: ignore[list-item]
    for makespan_s in (1.0, 1.0 - 1e-15, 1.0):
        search.insert(Design((), ()), [Evaluated(SimpleNamespace(makespan_s=makespan_s), ())])  # type: ignore[arg-type]
        assert search.pool[0] is best[-1]
    assert len(best) == 2
