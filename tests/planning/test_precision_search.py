"""The allocator against exhaustive search, its bounds, and the extremes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.planning.precision_cases import limited, make_costs
from cdmpp.compose.budget import SearchControl
from cdmpp.errors import InfeasibleError
from cdmpp.planning.precision.allocate import Steps, exhaustive, fastest, heap, search, simple
from cdmpp.planning.precision.elimination import Elimination
from cdmpp.planning.precision.plan import baselines, make_plan, rounded_up
from cdmpp.planning.precision.pricing import Pricing, lowest
from cdmpp.planning.precision.relaxation import Relaxation


def steps(most: int | None = None) -> Steps:
    return Steps(SearchControl(None), most)


@pytest.mark.parametrize(("count", "types", "seed"), [(12, 2, 1), (12, 2, 2), (7, 3, 2), (9, 3, 3)])
def test_equal_to_exhaustive_search(count: int, types: int, seed: int) -> None:
    names = ("int8", "float16", "float32")[-types:]
    costs, limit_s = limited(make_costs(count, seed, names), 0.45, 0.6)
    best = exhaustive(costs, limit_s)
    assert best is not None
    found = search(costs, simple(costs, lowest(costs), limit_s), limit_s, steps(60_000))
    assert Pricing(costs, found.levels).within(limit_s)
    assert found.objective == pytest.approx(best[1], rel=1e-9)
    assert found.proven


@pytest.mark.parametrize("seed", range(4))
def test_within_two_per_cent_without_the_tree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heap, exchanges and the relaxation's candidates alone, as on networks too large for a proof."""
    monkeypatch.setattr("cdmpp.planning.precision.allocate._TREE", 0)
    costs, limit_s = limited(make_costs(8, 20 + seed), 0.4, 0.5)
    best = exhaustive(costs, limit_s)
    assert best is not None
    found = search(costs, simple(costs, lowest(costs), limit_s), limit_s, steps(15_000))
    assert found.objective <= 1.02 * best[1]
    assert found.bound <= best[1] * (1 + 1e-9)


def test_never_worse_than_the_heap_and_never_below_the_bound() -> None:
    for seed in range(3):
        costs, limit_s = limited(make_costs(40, seed), 0.3, 0.4)
        found = search(costs, simple(costs, lowest(costs), limit_s), limit_s, steps(3000))
        greedy = Pricing(costs, heap(costs, lowest(costs), limit_s))
        assert greedy.within(limit_s)
        assert found.bound <= found.objective <= greedy.sensitivity
        assert found.objective / found.bound < 1.25


def test_equal_steps_give_equal_plans() -> None:
    costs, limit_s = limited(make_costs(25, 5), 0.3, 0.4)
    one, other = (search(costs, simple(costs, lowest(costs), limit_s), limit_s, steps(2500), seed=3) for _ in range(2))
    assert (one.levels, one.bound) == (other.levels, other.bound)


def test_exhaustive_refuses_what_is_too_large() -> None:
    with pytest.raises(ValueError, match="too many"):
        exhaustive(make_costs(30, 0), 1.0)


def test_the_fastest_plan_is_found_and_bounded() -> None:
    for seed in range(3):
        costs, _ = limited(make_costs(7, seed), 1.0, 0.3)
        least = min(
            priced.iteration_s
            for levels in product(range(3), repeat=7)
            if (priced := Pricing(costs, levels)).memory_bytes <= costs.memory_bytes
        )
        found = fastest(costs, Relaxation(costs).least_memory()[0], steps(2000).go_on)
        assert found.bound_s <= least * (1 + 1e-9)
        assert least * (1 - 1e-12) <= found.iteration_s <= 1.02 * least


def test_least_memory_is_exact() -> None:
    for seed in range(3):
        costs = make_costs(7, seed)
        relaxation = Relaxation(costs)
        assert relaxation.exact
        levels, bound = relaxation.least_memory()
        least = min(Pricing(costs, at).memory_bytes for at in product(range(3), repeat=7))
        assert Pricing(costs, levels).memory_bytes == pytest.approx(least)
        assert bound == pytest.approx(least)


@pytest.mark.parametrize("entries", [4096, 9])
def test_elimination_finds_or_bounds_the_minimum(entries: int) -> None:
    chance = np.random.default_rng(entries)
    sizes = [2, 3, 2, 3, 2]
    scopes = [(0,), (1,), (2,), (3,), (4,), (0, 1), (1, 2, 3), (3, 4), (0, 4), (4, 2)]
    tables = [chance.normal(size=[sizes[v] for v in scope]) for scope in scopes]

    def total(values: tuple[int, ...] | list[int]) -> float:
        return float(sum(t[tuple(values[v] for v in s)] for s, t in zip(scopes, tables, strict=True)))

    every = sorted(total(values) for values in product(*map(range, sizes)))
    eliminated = Elimination(sizes, scopes, entries)
    bound, values, messages = eliminated.minimise(tables)
    assert eliminated.exact == (entries == 4096)
    assert bound <= every[0] + 1e-12
    if eliminated.exact:
        assert total(values) == pytest.approx(every[0])
        assert bound == pytest.approx(every[0])
    seen: list[float] = []
    threshold = (every[5] + every[6]) / 2
    done = eliminated.enumerate(messages, bound, lambda: threshold, lambda at: seen.append(total(at)), lambda: True)
    assert done
    assert sorted(v for v in seen if v < threshold) == pytest.approx(every[:6])


def test_devices_share_one_limit() -> None:
    slow, limit_s = limited(make_costs(8, 1), 0.0, 0.7)
    fast = replace(slow, name="fast", workers=3, forward_s=[row / 4 for row in slow.forward_s])
    plan = make_plan([slow, fast], None, SearchControl(None), max_steps=8000)
    assert plan.limit_of == "start"
    assert plan.limit_s == pytest.approx(limit_s)
    first, second = (Pricing(c, f.levels) for c, f in zip([slow, fast], plan.found, strict=True))
    # The fast device hides more precision behind the slow one.
    assert second.sensitivity < first.sensitivity
    named = {one.name: one for one in baselines([slow, fast], plan)}
    assert not named["all_float32"].feasible
    highest = [named["all_lowest"].sensitivity, named["start"].sensitivity]
    assert highest == [pytest.approx(4 * Pricing(slow, lowest(slow)).sensitivity)] * 2


def test_where_the_lowest_precision_does_not_fit_the_least_memory_is_the_start() -> None:
    """Copies of the weights can take more than their activations save."""
    costs, _ = limited(make_costs(12, 0, ("float16", "float32")), 0.45, 0.6)
    assert Pricing(costs, lowest(costs)).memory_bytes > costs.memory_bytes
    plan = make_plan([costs], None, SearchControl(None), max_steps=60_000)
    least = Pricing(costs, Relaxation(costs).least_memory()[0])
    assert plan.limit_s == least.iteration_s
    best = exhaustive(costs, plan.limit_s)
    assert best is not None
    assert plan.found[0].objective == pytest.approx(best[1], rel=1e-9)


def test_memory_that_fits_no_plan_names_what_would() -> None:
    costs = make_costs(8, 2)
    levels, _ = Relaxation(costs).least_memory()
    least = Pricing(costs, levels).memory_bytes
    with pytest.raises(InfeasibleError) as caught:
        make_plan([replace(costs, memory_bytes=least * 0.9)], None, SearchControl(None))
    assert caught.value.path == "devices.0.memory_bytes"
    need = float(caught.value.hint.split()[2].rstrip(","))
    plan = make_plan([replace(costs, memory_bytes=need)], None, SearchControl(None), max_steps=500)
    assert Pricing(costs, plan.found[0].levels).memory_bytes <= need


def test_time_that_fits_no_plan_names_what_would() -> None:
    costs = make_costs(8, 2)
    with pytest.raises(InfeasibleError) as caught:
        make_plan([costs], 1e-5, SearchControl(None))
    assert caught.value.path == "iteration_limit_s"
    need = float(caught.value.hint.split()[2])
    plan = make_plan([costs], need, SearchControl(None), max_steps=500)
    assert Pricing(costs, plan.found[0].levels).iteration_s <= need


@pytest.mark.parametrize("value", [1e-9, 0.123456789, 1.0, 1234567.8])
def test_rounding_up_gives_a_limit_that_holds(value: float) -> None:
    assert value <= rounded_up(value) <= value * 1.00001
