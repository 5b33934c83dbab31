"""The tree search over orders of segments, against plain Python, every order, and every schedule."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.jit import COMPILED
from cdmpp.planning.multimodal.dispatch import complete, dispatch, follow, longest_ways, preemptive_s
from cdmpp.planning.multimodal.exact import best_of_all, branch_and_bound
from cdmpp.planning.multimodal.schedule import RULES, dispatched, followed, natural_key, sequence_of, start_keys
from cdmpp.planning.multimodal.search import Counter, search
from cdmpp.planning.multimodal.tasks import Memory, Tasks
from tests.planning.multimodal_cases import module, orders, shortest, slowly, step

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
        modules.append(module(f"m{i}", layers, draw(COSTS), draw(COSTS), tuple(sorted(behind))))
    return step(modules, units, segments, at)


@settings(max_examples=60, deadline=None)
@given(steps(), st.sampled_from(RULES), st.integers(0, 2**31))
def test_the_dispatcher_is_the_plain_list_scheduler(tasks: Tasks, rule, seed: int) -> None:  # type: ignore[no-untyped-def]
    sequence = sequence_of(tasks, np.random.default_rng(seed).random(tasks.segments))
    found = dispatched(tasks, sequence, rule)
    assert found.makespan_s == slowly(tasks, sequence.tolist(), rule)
    assert tasks.bound_s <= found.makespan_s * (1 + 1e-12)
    # The orders that it took, followed as early as they allow, are the same schedule.
    again = followed(tasks, found.orders)
    assert again.makespan_s == found.makespan_s
    assert (again.start_s == found.start_s).all()


@settings(max_examples=30, deadline=None)
@given(steps())
def test_orders_put_each_segment_behind_what_it_waits_for(tasks: Tasks) -> None:
    for key in [*start_keys(tasks), -natural_key(tasks)]:
        sequence = sequence_of(tasks, key).tolist()
        assert sorted(sequence) == list(range(tasks.segments))
        place = {segment: at for at, segment in enumerate(sequence)}
        segment_of = np.repeat(np.arange(tasks.segments), np.diff(tasks.first_task)).tolist()
        for t in range(tasks.half):
            for other in tasks.after[tasks.first_after[t] : tasks.first_after[t + 1]].tolist():
                if other < tasks.half:
                    assert place[segment_of[t]] <= place[segment_of[other]]


@pytest.mark.parametrize("units", [(3, 3, 3), (1, 2, 3), (3, 1, 2)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_search_finds_the_best_of_all_orders(units: tuple[int, int, int], ranks: int) -> None:
    modules = [
        module("vision", ranks, 0.5, 1.25),
        module("language", ranks, 1.0, 2.0, (0,)),
        module("diffusion", ranks, 0.75, 1.0, (1,)),
    ]
    tasks = step(modules, units, (1, 1, 1), ranks)
    best = min(dispatched(tasks, np.array(order), rule).makespan_s for order in orders(tasks) for rule in RULES)
    first = dispatched(tasks, sequence_of(tasks, natural_key(tasks)), RULES[0])
    counter = Counter()
    found = search([tasks], first, SearchControl(60.0), np.random.default_rng(0), counter=counter)
    assert found.complete
    assert found.best.makespan_s == best
    assert counter.hits + counter.misses == found.steps


def test_three_segments_of_each_of_three_modules_are_tried_wholly() -> None:
    modules = [module("vision", 6, 0.5, 1.25), module("language", 6, 1.0, 2.0, (0,)), module("diffusion", 6, 0.75, 1.0)]
    tasks = step(modules, (1, 1, 1), (3, 3, 3), 2)
    everything = list(orders(tasks))
    assert len(everything) == 84  # of 9 places, 3 for diffusion; vision is before language
    best = min(dispatched(tasks, np.array(order), rule).makespan_s for order in everything for rule in RULES)
    first = dispatched(tasks, sequence_of(tasks, natural_key(tasks)), RULES[0])
    found = search([tasks], first, SearchControl(60.0), np.random.default_rng(1))
    assert found.complete and found.best.makespan_s == best


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
def test_small_steps_are_the_shortest_of_all_schedules(
    units: tuple[int, ...], ranks: int, costs: tuple[float, ...]
) -> None:
    chain = [module(f"m{i}", ranks, cost, 1.5 * cost, (i - 1,) if i % 2 else ()) for i, cost in enumerate(costs)]
    tasks = step(chain, units, (1,) * len(units), ranks)
    first = dispatched(tasks, sequence_of(tasks, natural_key(tasks)), RULES[0])
    found = search([tasks], first, SearchControl(60.0), np.random.default_rng(0))
    best, proven = best_of_all([tasks], found.best, SearchControl(60.0))
    assert proven
    assert best.makespan_s == shortest(tasks)


def test_branch_and_bound_finds_what_no_order_of_segments_gives() -> None:
    # Here every list schedule keeps a rank busy where waiting would be better.
    improved = 0
    rng = np.random.default_rng(1)
    for _ in range(40):
        costs = rng.integers(1, 40, 4) / 16
        modules = [module("a", 2, costs[0], costs[1]), module("b", 4, costs[2], costs[3])]
        tasks = step(modules, (1, 1), (1, 2), 2)
        first = dispatched(tasks, sequence_of(tasks, natural_key(tasks)), RULES[0])
        found = search([tasks], first, SearchControl(60.0), rng)
        best, proven = best_of_all([tasks], found.best, SearchControl(60.0))
        assert found.complete and proven
        assert tasks.bound_s <= best.makespan_s <= found.best.makespan_s
        assert best.makespan_s == shortest(tasks)
        improved += best.makespan_s < found.best.makespan_s
    assert improved > 0


def test_a_search_by_steps_gives_equal_answers_and_one_by_time_ends() -> None:
    modules = [module("a", 4, 0.5, 1.25), module("b", 8, 1.0, 2.0, (0,))]
    tasks = step(modules, (8, 6), (1, 2), 4)
    first = dispatched(tasks, sequence_of(tasks, natural_key(tasks)), RULES[0])
    runs = [search([tasks], first, SearchControl(60.0), np.random.default_rng(7), max_steps=300) for _ in range(2)]
    assert runs[0].best.makespan_s == runs[1].best.makespan_s
    assert (runs[0].best.start_s == runs[1].best.start_s).all()
    assert [run.steps for run in runs] == [300, 300]
    watch = SearchControl(60.0)
    watch.stop()
    assert search([tasks], first, watch, np.random.default_rng(0)).best is first


@pytest.mark.skipif(not COMPILED, reason="numba is not installed")
def test_compiled_loops_are_the_plain_ones() -> None:
    modules = [module("a", 4, 0.3, 0.7), module("b", 4, 1.1, 1.9, (0,), activation_bytes=1.0)]
    tasks = step(modules, (3, 2), (2, 1), 2, Memory(40.0))
    key = np.random.default_rng(0).random(tasks.segments)
    graph = (tasks.duration_s, tasks.before, tasks.first_after, tasks.after)
    for compiled in (True, False):
        loops = [f if compiled else f.py_func for f in (longest_ways, preemptive_s, complete, dispatch, follow)]
        ways = loops[0](*graph)
        by_head = np.argsort(ways[0], kind="stable")
        bound = loops[1](ways[0][by_head], tasks.duration_s[by_head], ways[1][by_head])
        sequence = np.empty(tasks.segments, np.int64)
        loops[2](
            np.empty(0, np.int64),
            tasks.first_segment,
            tasks.need_ptr,
            tasks.need_class,
            tasks.need_count,
            key,
            sequence,
        )
        made = []
        for rule in RULES[::5]:
            start, place = np.empty(2 * tasks.half), np.empty(2 * tasks.half, np.int64)
            span = loops[3](
                tasks.half,
                tasks.ranks,
                tasks.rank,
                *graph,
                tasks.first_task,
                *tasks.lanes,
                sequence,
                ways[1],
                rule.back_rule,
                rule.preference,
                rule.strict,
                tasks.kept,
                tasks.more_forward,
                tasks.more_backward,
                tasks.room,
                start,
                place,
            )
            rank = np.concatenate([tasks.rank, tasks.rank])
            in_turn = np.argsort(place)
            flat = in_turn[np.argsort(rank[in_turn], kind="stable")]
            again = np.empty_like(start)
            follows = loops[4](
                *graph, np.concatenate([[0], np.cumsum(np.bincount(rank))]), flat, again, np.empty_like(place)
            )
            made.append((span, start.tolist(), place.tolist(), follows, again.tolist()))
        order = np.full(2 * tasks.half, -1, np.int64)
        loop = branch_and_bound if compiled else branch_and_bound.py_func
        exact = loop(
            tasks.ranks, np.concatenate([tasks.rank, tasks.rank]), *graph, ways[1], made[0][0] * 2, 2000, order
        )
        now = (ways[0].tolist(), ways[1].tolist(), bound, sequence.tolist(), made, exact, order.tolist())
        if compiled:
            expected = now
    assert now == expected


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(COSTS, COSTS, COSTS), min_size=1, max_size=5))
def test_the_preemptive_bound_is_below_every_order_and_above_simple_bounds(
    jobs: list[tuple[float, float, float]],
) -> None:
    heads, durations, tails = (np.array(each) for each in zip(*sorted(jobs), strict=True))
    bound = preemptive_s(heads, durations, tails)
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
