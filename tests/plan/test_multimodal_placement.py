"""Placements of multimodal plans: cuts of 1F1B against every cut, a memory limit, and many ranks.

1F1B is simulated in plain Python for the comparison.
"""

from __future__ import annotations

import itertools
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest

from cdmpp.errors import InfeasibleError
from cdmpp.plan.base.solve import read_request
from cdmpp.plan.multimodal import Module, placement
from cdmpp.plan.multimodal.check import check
from cdmpp.plan.multimodal.designs import StepDesigns
from cdmpp.plan.multimodal.modules import EFFICIENCY, MemoryOptions, link_items, split_evenly
from cdmpp.plan.multimodal.placement import balanced_cuts, contiguous, contiguous_at, improve_cuts, rank_pairs
from cdmpp.plan.multimodal.request_bound import request_bound_s
from cdmpp.plan.multimodal.schema import MultimodalRequest
from cdmpp.plan.multimodal.tasks import StepSettings
from cdmpp.predict.requests.budget import SearchControl
from tests.plan.multimodal_cases import module, plan_step

#: Share by which 1F1B within a memory limit may exceed the best cut: layers are moved one at a time.
WEAK = 0.01
CASES = [((2, 8), (1, 2), 3), ((4, 3), (5, 3), 2), ((3, 6), (2, 4), 4), ((6, 2), (7, 2), 3)]
COST = {"sizes": [1, 2], "forward_s": [0.1, 0.2], "backward_s": [0.2, 0.4]}


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


@pytest.mark.parametrize(("layers", "batch", "ranks"), CASES)
def test_cuts_and_plans_are_at_most_as_long_as_1f1b_with_any_cut(
    layers: tuple[int, int], batch: tuple[int, int], ranks: int
) -> None:
    modules = chain(*layers)
    shortest = []
    for count in range(1, batch[1] + 1):
        items = micro_batches(batch, count)
        work_s = [sum(sum(m.layer_s(int(n))) for n in row if n) for m, row in zip(modules, items, strict=True)]
        even = contiguous(modules, [m.work * s for m, s in zip(modules, work_s, strict=True)], ranks)
        placement, seconds, remaining = improve_cuts(modules, even, items, ranks, 100_000)
        on = [sum(c.layers for row in placement.chunks for c in row if c.rank == r) for r in range(ranks)]
        cuts = tuple(np.cumsum([0, *on]).tolist())
        assert seconds == pytest.approx(one_f_one_b_s(modules, items, cuts))
        shortest.append(
            min(
                one_f_one_b_s(modules, items, (0, *inner, sum(layers)))
                for inner in combinations_with_replacement(range(sum(layers) + 1), ranks - 1)
            )
        )
        assert seconds == pytest.approx(shortest[-1])
        assert 0 < remaining < 100_000
    assert link_items(modules, batch, 1).samples == 1
    plan = plan_step(modules, batch, ranks, samples=1, max_steps=20)
    assert plan.schedule.makespan_s <= min(shortest) * (1 + 1e-9)
    assert plan.baselines_s["1f1b"] <= min(shortest) * (1 + 1e-9)


def case(seed: int) -> tuple[Module, int, int, MemoryOptions]:
    """A module of unlike layers, the items of a step, ranks, and a limit that some cuts keep only by recomputing."""
    random = np.random.default_rng(seed)
    layers = tuple(random.uniform(0.5, 2.0, int(random.integers(3, 9))).round(2).tolist())
    sizes, forward_s, backward_s = np.array([1.0, 2.0]), np.array([1.0, 1.6]), np.array([2.0, 3.2])
    unlike = Module(
        "m", layers, sizes, forward_s, backward_s, activation_bytes=10.0, boundary_bytes=1.0, weight_bytes=5.0
    )
    memory = MemoryOptions(float(random.uniform(30, 150)), ("keep", "recompute"))
    return unlike, int(random.integers(2, 6)), int(random.integers(2, 4)), memory


def best_of_all_cuts(one: Module, items: int, ranks: int, memory: MemoryOptions) -> float:
    links = link_items([one], [items], None)
    designs = StepDesigns(StepSettings([one], [items], ranks, memory, links, EFFICIENCY), SearchControl())
    layers = len(one.layers)
    cuts = (np.array([0, *inner, layers]) for inner in itertools.combinations(range(1, layers), ranks - 1))
    found = [designs.one_f_one_b(contiguous_at([one], cut)) for cut in cuts]
    return min((schedule.makespan_s for schedule, _ in filter(None, found)), default=float("inf"))


@pytest.mark.slow
def test_1f1b_within_a_memory_limit_has_a_cut_for_the_limit() -> None:
    for seed in range(20):
        one, items, ranks, memory = case(seed)
        try:
            solution = plan_step([one], [items], ranks, memory=memory, control=SearchControl(), max_steps=5)
        except InfeasibleError:
            continue
        if "1f1b" in solution.baselines_s:
            best_s = best_of_all_cuts(one, items, ranks, memory)
            assert solution.baselines_s["1f1b"] <= best_s * (1 + WEAK), seed


def request(ranks: int, *layers: int, **more: Any) -> MultimodalRequest:
    modules = [{"name": f"m{i}", "layers": n, "cost": COST, "activation_bytes": 10.0} for i, n in enumerate(layers)]
    for before, after in itertools.pairwise(modules):
        after["after"] = [before["name"]]
    batch = {str(form["name"]): 20 for form in modules}
    value = {"modules": modules, "batch": batch, "ranks": ranks, "max_steps": 30, **more}
    return read_request(MultimodalRequest, value)


def solved(form: MultimodalRequest) -> dict[str, Any]:
    answer = form.solve(SearchControl()).model_dump()
    assert check(form, answer) == []
    return answer


def test_plan_with_more_ranks_than_layers_equals_that_with_a_rank_for_each_layer() -> None:
    fields = ("makespan_s", "lower_bound_s", "searched_lower_bound_s", "baselines", "layout", "complete", "steps")
    for layers in [(2,), (5,), (2, 3)]:
        used = sum(layers)
        few, many = solved(request(used, *layers)), solved(request(64, *layers))
        assert [many[field] for field in fields] == [few[field] for field in fields]
        assert many["order"] == few["order"] + [[]] * (64 - used)
        assert [row["peak_bytes"] for row in many["memory"][used:]] == [0.0] * (64 - used)


def test_steps_on_one_placement_leave_further_ranks_idle() -> None:
    answer = solved(request(9, 2, 1, batch=None, batches=[{"m0": 3, "m1": 2}, {"m0": 1, "m1": 4}]))
    assert [len(step["order"]) for step in answer["plans"]] == [9, 9]


def test_memory_limit_with_idle_ranks() -> None:
    answer = solved(request(6, 3, memory_bytes=200.0))
    assert [len(order) > 0 for order in answer["order"]] == [True] * 3 + [False] * 3


def test_progress_has_the_ranks_of_the_request() -> None:
    ranks: list[int] = []
    control = SearchControl(600.0, lambda progress: ranks.append(len(progress.answer().order)), every_s=0.0)
    request(12, 4).solve(control)
    assert ranks and set(ranks) == {12}


def test_stopped_search_tries_one_number_of_micro_batches_for_1f1b(monkeypatch: pytest.MonkeyPatch) -> None:
    improved: list[int] = []

    def counted(*given: Any) -> Any:
        improved.append(1)
        return improve_cuts(*given)

    monkeypatch.setattr(placement, "improve_cuts", counted)
    control = SearchControl(600.0)
    control.stop()
    form = request(4, 8)
    assert check(form, form.solve(control).model_dump()) == []
    assert len(improved) == 1


def test_moves_between_many_ranks_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def makespan_s(*_: Any) -> float:
        calls.append(1)
        return 1.0

    monkeypatch.setattr(placement, "run_in_order", makespan_s)
    ranks = 640
    even = contiguous_at([module("m", ranks, 0.1, 0.2)], np.arange(ranks + 1))
    improve_cuts([module("m", ranks, 0.1, 0.2)], even, [np.array([4])], ranks, 1_000_000)
    # 640 ranks visited in up to 640 rounds: far fewer moves than two passes of each rank would permit.
    assert len(calls) <= 40


def test_rank_pairs_begin_with_neighbours() -> None:
    for ranks in range(1, 7):
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        assert list(rank_pairs(ranks)) == sorted(pairs, key=lambda pair: abs(pair[0] - pair[1]))


def test_many_layers_are_cut_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_CUT_CELLS", 1)
    assert balanced_cuts(np.ones(8), np.zeros(4)).tolist() == [0, 2, 4, 6, 8]
    assert balanced_cuts(np.array([3.0, 1.0, 1.0, 1.0]), np.zeros(2)).tolist() == [0, 1, 4]
    assert balanced_cuts(np.ones(2), np.zeros(5))[[0, -1]].tolist() == [0, 2]


def test_lower_bound_of_many_layers_checks_the_budget() -> None:
    one = module("m", 170, 0.1, 0.2)
    links = link_items([one], [6], None)
    looks = 0

    def over() -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    quick_s = request_bound_s([one], [6], 170, links, over)
    assert looks < 20
    assert 0 < quick_s <= request_bound_s([one], [6], 170, links) * (1 + 1e-12)
