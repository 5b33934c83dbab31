"""Executable pipelines: plans that torch.distributed.pipelining runs, against brute force, and their price."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.formats import export_plan, import_request
from cdmpp.plan.fused.check import check as check_fused
from cdmpp.plan.fused.problem import FusedProblem, run_orders
from cdmpp.plan.fused.schema import FusedPlan, FusedRequest
from cdmpp.plan.multimodal.check import check as check_modules
from cdmpp.plan.multimodal.modules import MemoryOptions, Module, chained, link_items, split_evenly
from cdmpp.plan.multimodal.placement import Placement
from cdmpp.plan.multimodal.schema import MultimodalRequest
from cdmpp.plan.multimodal.search import branch_and_bound
from cdmpp.plan.multimodal.tasks import make_tasks
from cdmpp.plan.registry import make_plan
from cdmpp.predict.predictor import LatencyPredictor
from tests.plan.multimodal_cases import rows_of

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def model(stages: int, micro_batches: int, forward_s: float, backward_s: float, **more: Any) -> dict[str, Any]:
    given = {"stages": stages, "micro_batches": micro_batches, "forward_s": forward_s, "backward_s": backward_s}
    return {**given, **more}


def shortest_in_turn_s(problem: FusedProblem) -> float:
    """Least makespan of all plans in which every rank runs the models in one order, one after the other."""
    tasks = problem.tasks
    best = math.inf
    for sequence in itertools.permutations(range(len(problem.models))):
        rows = []
        for numbers in tasks.by_rank():
            blocks = []
            for m in sequence:
                of_model = [n for n in numbers.tolist() if tasks.model[tasks.group[n]] == m]
                ways = sorted({*itertools.permutations(tasks.forward[tasks.group[of_model]].tolist())})
                valid = [way for way in ways if min(np.cumsum(np.where(way, 1, -1))) >= 0]
                queues = [[n for n in of_model if tasks.forward[tasks.group[n]] == forward] for forward in (0, 1)]
                blocks.append(
                    [
                        [queues[f][sum(way[:at]) if f else at - sum(way[:at])] for at, f in enumerate(way)]
                        for way in valid
                    ]
                )
            rows.append([[*itertools.chain(*parts)] for parts in itertools.product(*blocks)])
        for orders in itertools.product(*rows):
            try:
                best = min(best, float(run_orders(problem, orders)[1].max()))
            except FieldError:
                continue  # a deadlock
    return best


@settings(max_examples=12)
@given(st.sampled_from([1.0, 2.0, 3.5]), st.sampled_from([1.0, 4.0]), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_fused_plan_in_turns_is_the_shortest_of_its_kind(f: float, b: float, up: bool, transfer_s: float) -> None:
    first = model(2, 2, f, b, transfer_s=transfer_s)
    second = model(2, 2, 1.0, 2.0, direction="up" if up else "down")
    value = {"models": [first, second], "ranks": 2, "executable": True, "budget_s": 600, "max_steps": 300}
    request = FusedRequest.model_validate(value)
    plan = make_plan("pipeline", value)
    assert check_fused(request, plan) == []
    assert plan["makespan_s"] == pytest.approx(shortest_in_turn_s(request.problem()), rel=1e-9)
    assert plan["execution"]["price"] >= 0 and "greedy" not in plan["baselines"]
    assert plan["execution"]["unrestricted_s"] <= make_plan("pipeline", {**value, "executable": False})["makespan_s"]


def test_single_model_is_executable_without_a_price() -> None:
    value = {"models": [model(2, 3, 1.0, 2.0)], "ranks": 4, "budget_s": 600, "max_steps": 50}
    plan = make_plan("pipeline", {**value, "executable": True})
    assert plan["execution"]["price"] == 0 and plan["makespan_s"] == make_plan("pipeline", value)["makespan_s"]


def shortest_modules_s(modules: list[Module], batch: list[int], ranks: int, best: float) -> float:
    """Least makespan of equal sub-micro-batches, as many of each module, with a stage on every rank; or ``best``."""
    modules = chained(modules)
    rows = [rows_of(len(one.layers), ranks) for one in modules]
    for count in (c for c in range(1, max(batch) + 1) if all(n % c == 0 for n in batch)):
        items = [split_evenly(n, count) for n in batch]
        for chunks in itertools.product(*rows):
            used = [chunk.rank for row in chunks for chunk in row]
            if {*used} != {*range(ranks)}:
                continue
            if len(modules) == 1 and (len(used) % ranks or used != [i % ranks for i in range(len(used))]):
                continue
            tasks = make_tasks(modules, Placement(chunks), items, ranks, MemoryOptions(), link_items(modules, batch))
            if tasks.bound_s >= best:
                continue
            order = np.full(tasks.size, -1, np.int64)
            arguments = (ranks, tasks.rank_of_all, tasks.graph, tasks.paths_s[1], best, 10**8, order)
            best = branch_and_bound(*arguments)[0]
    return best


@pytest.mark.parametrize("names", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_executable_modules_are_the_shortest_of_their_kind(names: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    modules, batch, ranks = [], {}, int(rng.integers(2, 4))
    for name in ("a", "b")[:names]:
        forward = np.round(np.cumsum(rng.uniform(0.5, 2, 3)), 2).tolist()
        cost = {"sizes": [1, 2, 4], "forward_s": forward, "backward_s": [2 * s for s in forward]}
        after = ["a"] if name == "b" else []
        layers = int(rng.integers(ranks, 4))
        modules.append({"name": name, "layers": layers, "cost": cost, "after": after, "transfer_s": float(seed % 2)})
        batch[name] = int(rng.choice([2, 4]))
    value = {"modules": modules, "batch": batch, "ranks": ranks, "executable": True, "budget_s": 600, "max_steps": 1500}
    request = MultimodalRequest.model_validate(value)
    plan = make_plan("pipeline", value)
    assert check_modules(request, plan) == []
    best = shortest_modules_s(request.resolved_modules(), list(batch.values()), ranks, plan["makespan_s"])
    assert plan["makespan_s"] == pytest.approx(best, rel=1e-9)
    assert plan["execution"]["unrestricted_s"] <= plan["makespan_s"]
    assert export_plan("torch-csv", "pipeline", value, plan).text.count("\n") == ranks
    if names == 1:
        assert "pipeline-model-parallel-layout" in export_plan("megatron-layout", "pipeline", value, plan).text


def test_modules_that_are_no_chain_become_one() -> None:
    cost = {"sizes": [1, 2], "forward_s": [1, 1.5], "backward_s": [2, 3]}
    modules = [{"name": n, "layers": 2, "cost": cost, "after": a} for n, a in (("a", []), ("b", []), ("c", ["a", "b"]))]
    value = {"modules": modules, "batch": {"a": 4, "b": 2, "c": 2}, "ranks": 2, "executable": True}
    value |= {"budget_s": 600, "max_steps": 100}
    plan = make_plan("pipeline", value)
    assert check_modules(MultimodalRequest.model_validate(value), plan) == []
    found = export_plan("torch-csv", "pipeline", value, plan)
    assert any("the modules are a chain, a, b, c" in note for note in found.notes)
    # The schedule that torch would run, with the stages' costs, takes as long as the plan.
    read = import_request("torch-csv", found.text, "simulate", fields={"stages": {"forward_s": 1.0, "backward_s": 1.0}})
    stages = sorted((e for e in plan["layout"]), key=lambda e: ("abc".index(e["module"]), e["first_layer"]))
    sizes = {name: cut["size"] for name, cut in plan["sub_batches"].items()}
    read.request["stages"] = [
        {way: e["layers"] * cost[way][sizes[e["module"]] - 1] for way in ("forward_s", "backward_s")} for e in stages
    ]
    assert make_plan("simulate", read.request)["makespan_s"] == pytest.approx(plan["makespan_s"], rel=1e-9)


def test_more_ranks_than_layers_cannot_be_executed() -> None:
    cost = {"sizes": [1], "forward_s": [1], "backward_s": [2]}
    value = {"modules": [{"name": "a", "layers": 2, "cost": cost}], "batch": {"a": 2}, "ranks": 3, "executable": True}
    with pytest.raises(InfeasibleError, match="2 layers are fewer than 3 ranks"):
        make_plan("pipeline", value)


def test_shipped_example_of_two_models_is_exported() -> None:
    value = {**json.loads((EXAMPLES / "pipeline.json").read_text()), "executable": True}
    plan = make_plan("pipeline", value)
    sequence = FusedPlan.model_validate(plan).sequence()
    assert sequence is not None and sorted(sequence) == [0, 1]
    for number, copies in ((0, 1), (1, 2)):
        for copy in range(copies):
            found = export_plan("torch-csv", "pipeline", value, plan, model=number, copy_number=copy)
            stages, micro_batches = (value["models"][number][name] for name in ("stages", "micro_batches"))
            cells = [cell for line in found.text.splitlines() for cell in line.split(",")]
            assert len({*cells}) == len(cells) == 2 * stages * micro_batches
            assert any("each rank runs the schedules of models" in note for note in found.notes)
    with pytest.raises(FieldError, match="the request has 2 models"):
        export_plan("torch-csv", "pipeline", value, plan, model=2)
    mixed = make_plan("pipeline", {**value, "executable": False})
    assert any("the request is executable" in fault for fault in check_fused(FusedRequest.model_validate(value), mixed))
    assert plan["execution"]["price"] == pytest.approx(plan["makespan_s"] / mixed["makespan_s"] - 1)


def test_shipped_example_of_modules_is_exported(predictor: LatencyPredictor) -> None:
    value = json.loads((EXAMPLES / "pipeline_modules.json").read_text()) | {"executable": True, "max_steps": 100}
    plan = make_plan("pipeline", value, predictor)
    assert {cut["count"] for cut in plan["sub_batches"].values()} <= {1, 2, 4, 8}
    assert export_plan("torch-csv", "pipeline", value, plan).text.count("\n") == 4


def test_models_in_turn_keep_the_memory_limit() -> None:
    value = {"models": [model(4, 6, 1.0, 2.0), model(4, 6, 0.5, 1.0, direction="up")], "ranks": 4, "max_activations": 2}
    value |= {"executable": True, "budget_s": 600, "max_steps": 60}
    request = FusedRequest.model_validate(value)
    plan = make_plan("pipeline", value)
    assert check_fused(request, plan) == [] and plan["peak_activations"] <= 2
    assert plan["makespan_s"] <= plan["baselines"]["serial_1f1b"]


def test_step_without_items_of_a_module_is_refused_where_a_rank_has_no_stage() -> None:
    value = {
        "modules": [
            {"name": name, "layers": 1, "cost": {"sizes": [1], "forward_s": [1.0], "backward_s": [2.0]}, "after": after}
            for name, after in (("vision", []), ("language", ["vision"]))
        ],
        "batch": {"vision": 2, "language": 0},
        "ranks": 2,
        "executable": True,
        "budget_s": 600,
        "max_steps": 20,
    }
    with pytest.raises(InfeasibleError, match="gives each rank a stage") as caught:
        make_plan("pipeline", value)
    assert caught.value.path == "executable"
