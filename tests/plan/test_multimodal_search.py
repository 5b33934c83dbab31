"""Dispatcher, tree search and branch and bound against reference implementations in plain Python."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.plan.base.task_graph import longest_paths_s, preemptive_makespan_s, run_in_order
from cdmpp.plan.multimodal.dispatch import DispatchRule, dispatch
from cdmpp.plan.multimodal.modules import MemoryOptions
from cdmpp.plan.multimodal.search import CacheCounts, branch_and_bound, search, solve_exactly
from cdmpp.plan.multimodal.tasks import (
    RULES,
    Schedule,
    Tasks,
    complete,
    data_order_key,
    initial_keys,
    list_schedule,
    schedule_orders,
    sequence_by,
)
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.utils.jit import COMPILED
from tests.plan.multimodal_cases import all_sequences, module, optimal_makespan_s, reference_makespan_s, step

#: Costs in sixteenths: sums are exact in any order.
COSTS = st.integers(1, 48).map(lambda n: n / 16)


@st.composite
def steps(draw: st.DrawFn, most_units: int = 3, ranks: int = 3) -> Tasks:
    count, at = draw(st.integers(1, 3)), draw(st.integers(1, ranks))
    modules, units, segments = [], [], []
    for i in range(count):
        segments.append(draw(st.integers(1, 2)))
        units.append(draw(st.integers(1, most_units)))
        layers = at * segments[-1] + draw(st.integers(0, 1))
        behind = draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set()
        sent_s = draw(st.sampled_from([0.0, 0.25, 2.0]))
        transfer = (np.array([1.0, 4.0]), np.array([sent_s, 2 * sent_s])) if sent_s else None
        modules.append(module(f"m{i}", layers, draw(COSTS), draw(COSTS), tuple(sorted(behind)), transfer=transfer))
    return step(modules, units, segments, at)


def initial(tasks: Tasks) -> Schedule:
    """The list schedule in data order."""
    return list_schedule(tasks, sequence_by(tasks, data_order_key(tasks)), RULES[0])


@settings(max_examples=60, deadline=None)
@given(steps(), st.sampled_from(RULES), st.integers(0, 2**31))
def test_dispatcher_equals_the_reference_list_scheduler(tasks: Tasks, rule: DispatchRule, seed: int) -> None:
    sequence = sequence_by(tasks, np.random.default_rng(seed).random(tasks.segments))
    schedule = list_schedule(tasks, sequence, rule)
    assert schedule.makespan_s == reference_makespan_s(tasks, sequence.tolist(), rule)
    assert tasks.bound_s <= schedule.makespan_s * (1 + 1e-12)
    # Its orders, run as early as possible, give the same schedule.
    again = schedule_orders(tasks, schedule.orders)
    assert again.makespan_s == schedule.makespan_s
    assert (again.start_s == schedule.start_s).all()


@settings(max_examples=30, deadline=None)
@given(steps())
def test_sequences_put_each_segment_after_its_dependencies(tasks: Tasks) -> None:
    for key in [*initial_keys(tasks), -data_order_key(tasks)]:
        sequence = sequence_by(tasks, key).tolist()
        assert sorted(sequence) == list(range(tasks.segments))
        place = {segment: at for at, segment in enumerate(sequence)}
        segment_of = np.repeat(np.arange(tasks.segments), np.diff(tasks.first_task)).tolist()
        for t in range(tasks.half):
            for other in tasks.graph.after[tasks.graph.first_after[t] : tasks.graph.first_after[t + 1]].tolist():
                if other < tasks.half:
                    assert place[segment_of[t]] <= place[segment_of[other]]


@pytest.mark.parametrize("units", [(3, 3, 3), (1, 2, 3), (3, 1, 2)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_search_finds_the_best_of_all_sequences(units: tuple[int, int, int], ranks: int) -> None:
    modules = [
        module("vision", ranks, 0.5, 1.25),
        module("language", ranks, 1.0, 2.0, (0,)),
        module("diffusion", ranks, 0.75, 1.0, (1,)),
    ]
    tasks = step(modules, units, (1, 1, 1), ranks)
    best = min(
        list_schedule(tasks, np.array(order), rule).makespan_s for order in all_sequences(tasks) for rule in RULES
    )
    first = initial(tasks)
    counts = CacheCounts()
    found, steps = search([tasks], first, SearchControl(60.0), np.random.default_rng(0), counts=counts)
    assert found.makespan_s == best
    assert counts.hits + counts.misses == steps


def test_search_finds_the_best_order_of_few_segments() -> None:
    modules = [module("vision", 6, 0.5, 1.25), module("language", 6, 1.0, 2.0, (0,)), module("diffusion", 6, 0.75, 1.0)]
    tasks = step(modules, (1, 1, 1), (3, 3, 3), 2)
    sequences = list(all_sequences(tasks))
    assert len(sequences) == 84  # of 9 places, 3 for diffusion; vision is before language
    best = min(list_schedule(tasks, np.array(order), rule).makespan_s for order in sequences for rule in RULES)
    first = initial(tasks)
    found, _ = search([tasks], first, SearchControl(60.0), np.random.default_rng(1))
    assert found.makespan_s == best


@pytest.mark.parametrize(
    ("units", "ranks", "costs"),
    [
        ((1, 1, 1), 2, (0.5, 1.0, 0.75)),
        ((2, 1, 1), 2, (0.5, 1.0, 0.75)),
        ((1, 2, 1), 2, (1.0, 0.25, 2.0)),
        ((2, 2), 2, (0.5, 1.25)),
        ((1, 1), 3, (1.0, 0.75)),
        ((3,), 2, (1.0,)),
    ],
)
def test_small_steps_are_solved_to_the_optimum(units: tuple[int, ...], ranks: int, costs: tuple[float, ...]) -> None:
    chain = [module(f"m{i}", ranks, cost, 1.5 * cost, (i - 1,) if i % 2 else ()) for i, cost in enumerate(costs)]
    tasks = step(chain, units, (1,) * len(units), ranks)
    first = initial(tasks)
    found, _ = search([tasks], first, SearchControl(60.0), np.random.default_rng(0))
    best = solve_exactly([tasks], found, SearchControl(60.0))
    assert best.makespan_s == optimal_makespan_s(tasks)


@pytest.mark.slow
def test_branch_and_bound_improves_on_all_list_schedules() -> None:
    # Every list schedule keeps a rank busy where idling would be better.
    improved = 0
    rng = np.random.default_rng(1)
    for _ in range(40):
        costs = rng.integers(1, 40, 4) / 16
        modules = [module("a", 2, costs[0], costs[1]), module("b", 4, costs[2], costs[3])]
        tasks = step(modules, (1, 1), (1, 2), 2)
        first = initial(tasks)
        found, _ = search([tasks], first, SearchControl(60.0), rng)
        best = solve_exactly([tasks], found, SearchControl(60.0))
        assert tasks.bound_s <= best.makespan_s <= found.makespan_s
        assert best.makespan_s == optimal_makespan_s(tasks)
        improved += best.makespan_s < found.makespan_s
    assert improved > 0


def test_searches_with_max_steps_are_equal_and_stopped_ones_end() -> None:
    modules = [module("a", 4, 0.5, 1.25), module("b", 8, 1.0, 2.0, (0,))]
    tasks = step(modules, (8, 6), (1, 2), 4)
    first = initial(tasks)
    runs = [search([tasks], first, SearchControl(60.0), np.random.default_rng(7), max_steps=300) for _ in range(2)]
    assert runs[0][0].makespan_s == runs[1][0].makespan_s
    assert (runs[0][0].start_s == runs[1][0].start_s).all()
    assert [steps for _, steps in runs] == [300, 300]
    control = SearchControl(60.0)
    control.stop()
    assert search([tasks], first, control, np.random.default_rng(0))[0] is first


@pytest.mark.skipif(not COMPILED, reason="numba is not installed")
def test_compiled_and_interpreted_functions_are_equal() -> None:
    modules = [module("a", 4, 0.3, 0.7), module("b", 4, 1.1, 1.9, (0,), activation_bytes=1.0)]
    tasks = step(modules, (3, 2), (2, 1), 2, MemoryOptions(40.0))
    key = np.random.default_rng(0).random(tasks.segments)
    results = []
    for compiled in (True, False):

        def variant(function: Any, compiled: bool = compiled) -> Any:
            return function if compiled else function.py_func

        head, tail = variant(longest_paths_s)(tasks.graph)
        by_head = np.argsort(head, kind="stable")
        bound = variant(preemptive_makespan_s)(head[by_head], tasks.duration_s[by_head], tail[by_head])
        sequence = np.empty(tasks.segments, np.int64)
        needs = (tasks.need_ptr, tasks.need_class, tasks.need_count)
        variant(complete)(tasks.first_segment, *needs, key, sequence)
        made = []
        for rule in RULES[::5]:
            start, place = np.empty(tasks.size), np.empty(tasks.size, np.int64)
            memory = tasks.memory_use()
            makespan = variant(dispatch)(tasks.graph, tasks.queues, memory, sequence, tail, rule, start, place)
            in_order = np.argsort(place)
            flat = in_order[np.argsort(tasks.rank_of_all[in_order], kind="stable")]
            first_of = np.concatenate([[0], np.cumsum(np.bincount(tasks.rank_of_all))])
            again = np.empty_like(start)
            repeated = variant(run_in_order)(tasks.graph, first_of, flat, again, np.empty_like(place))
            made.append((makespan, start.tolist(), place.tolist(), repeated, again.tolist()))
        order = np.full(tasks.size, -1, np.int64)
        limit_s = made[0][0] * 2
        exact = variant(branch_and_bound)(tasks.ranks, tasks.rank_of_all, tasks.graph, tail, limit_s, 2000, order)
        results.append((head.tolist(), tail.tolist(), bound, sequence.tolist(), made, exact, order.tolist()))
    assert results[0] == results[1]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(COSTS, COSTS, COSTS), min_size=1, max_size=5))
def test_preemptive_bound_is_below_every_order_and_above_simple_bounds(jobs: list[tuple[float, float, float]]) -> None:
    heads, durations, tails = (np.array(column) for column in zip(*sorted(jobs), strict=True))
    bound = preemptive_makespan_s(heads, durations, tails)
    best = float("inf")
    for order in itertools.permutations(range(len(jobs))):
        now = end = 0.0
        for job in order:
            now = max(now, heads[job]) + durations[job]
            end = max(end, now + tails[job])
        best = min(best, end)
    assert bound <= best
    assert bound >= max(heads + durations + tails)
    assert bound >= heads.min() + durations.sum() + tails.min()
