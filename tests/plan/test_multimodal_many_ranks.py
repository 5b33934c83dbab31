"""Multimodal plans with more ranks than layers, and with so many ranks that candidates take long to build."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cdmpp.plan.base.solve import read_request
from cdmpp.plan.multimodal import candidates, placement
from cdmpp.plan.multimodal.candidates import rank_pairs
from cdmpp.plan.multimodal.check import check
from cdmpp.plan.multimodal.modules import Module, link_items
from cdmpp.plan.multimodal.placement import balanced_cuts
from cdmpp.plan.multimodal.request_bound import request_bound_s
from cdmpp.plan.multimodal.schema import MultimodalRequest
from cdmpp.predict.requests.budget import SearchControl

COST = {"sizes": [1, 2], "forward_s": [0.1, 0.2], "backward_s": [0.2, 0.4]}


def request(ranks: int, *layers: int, **more: Any) -> MultimodalRequest:
    modules = [{"name": f"m{i}", "layers": n, "cost": COST, "activation_bytes": 10.0} for i, n in enumerate(layers)]
    for before, module in itertools.pairwise(modules):
        module["after"] = [before["name"]]
    batch = {str(module["name"]): 20 for module in modules}
    value = {"modules": modules, "batch": batch, "ranks": ranks, "max_steps": 30, **more}
    return read_request(MultimodalRequest, value)


def solved(form: MultimodalRequest) -> dict[str, Any]:
    answer = form.solve(SearchControl()).model_dump()
    assert check(form, answer) == []
    return answer


def module_of(layers: int) -> Module:
    sizes = np.array([1.0, 2.0])
    return Module("m", (1.0,) * layers, sizes, 0.1 * sizes, 0.2 * sizes)


@pytest.mark.parametrize("layers", [(2,), (5,), (2, 3)])
def test_plan_with_more_ranks_than_layers_equals_that_with_a_rank_for_each_layer(layers: tuple[int, ...]) -> None:
    used = sum(layers)
    few, many = solved(request(used, *layers)), solved(request(64, *layers))
    for field in ("makespan_s", "lower_bound_s", "searched_lower_bound_s", "baselines", "layout", "complete", "steps"):
        assert many[field] == few[field]
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
    improve_cuts = candidates.improve_cuts

    def counted(*given: Any) -> Any:
        improved.append(1)
        return improve_cuts(*given)

    monkeypatch.setattr(candidates, "improve_cuts", counted)
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

    monkeypatch.setattr(candidates, "run_in_order", makespan_s)
    ranks = 640
    even = placement.contiguous_at([module_of(ranks)], np.arange(ranks + 1))
    candidates.improve_cuts([module_of(ranks)], even, [np.array([4])], ranks, 1_000_000)
    # 640 ranks visited in up to 640 rounds: far fewer moves than two passes of each rank would permit.
    assert len(calls) <= 40


def test_rank_pairs_begin_with_neighbours() -> None:
    for ranks in range(1, 7):
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        assert list(rank_pairs(ranks)) == sorted(pairs, key=lambda pair: abs(pair[0] - pair[1]))


def test_many_layers_are_cut_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_CUT_CELLS", 0)
    assert balanced_cuts(np.ones(8), np.zeros(4)).tolist() == [0, 2, 4, 6, 8]
    assert balanced_cuts(np.array([3.0, 1.0, 1.0, 1.0]), np.zeros(2)).tolist() == [0, 1, 4]
    assert balanced_cuts(np.ones(2), np.zeros(5))[[0, -1]].tolist() == [0, 2]


def test_lower_bound_of_many_layers_checks_the_budget() -> None:
    module, links = module_of(170), link_items([module_of(170)], [6], None)
    looks = 0

    def over() -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    quick_s = request_bound_s([module], [6], 170, links, over)
    assert looks < 20
    assert 0 < quick_s <= request_bound_s([module], [6], 170, links) * (1 + 1e-12)
