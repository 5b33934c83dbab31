"""Simulate requests: plans, refused requests, plots and text."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cdmpp import FieldError, InfeasibleError, make_plan
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.rendering import render
from cdmpp.simulate.emulator.schema import SimulatePlan, SimulateRequest
from cdmpp.simulate.emulator.solver import draw
from cdmpp.utils.units import format_latency

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "simulate.json"
STAGE: dict[str, Any] = {"forward_s": 5, "backward_s": 10, "activation_bytes": 10, "weight_bytes": 100}
GIVEN: dict[str, Any] = {"stages": [STAGE] * 4, "micro_batches": 8}


def simulate(**more: Any) -> dict[str, Any]:
    answer = make_plan("simulate", {**GIVEN, **more})
    SimulatePlan.model_validate(answer)
    return answer


def test_the_figures_of_a_step() -> None:
    answer = simulate()
    assert answer["makespan_s"] == answer["same_passes_bound_s"] == 165.0
    # The first pass of the last rank waits for three others; then the rank works for 120 s.
    assert answer["lower_bound_s"] == 135.0
    assert answer["gap"] == 165.0 / 135.0 - 1.0 and answer["interval"] is None
    assert [one["peak_bytes"] for one in answer["ranks"]] == [140.0, 130.0, 120.0, 110.0]
    assert answer["baselines"] == {"gpipe": 165.0, "zero_bubble": 135.0, "one_at_a_time": 8 * 4 * 15.0}
    assert answer["bubble"] == pytest.approx(3 / 11)
    passes = answer["timeline"]
    assert len(passes) == 4 * 8 * 2
    assert passes[0] == {"rank": 0, "stage": 0, "pass": "F", "micro_batch": 0, "start_s": 0.0, "end_s": 5.0}
    for rank in range(4):
        row = [one for one in passes if one["rank"] == rank]
        assert all(a["end_s"] <= b["start_s"] for a, b in pairwise(row))


def test_timeline_as_an_explicit_order_gives_an_equal_timeline() -> None:
    first = simulate(schedule="zero_bubble", transfer_s=0.5)
    order: list[list[dict[str, Any]]] = [[] for _ in range(4)]
    for one in first["timeline"]:
        order[one["rank"]].append({key: one[key] for key in ("stage", "pass", "micro_batch")})
    assert 0.0 < first["gap"] < 0.05
    again = simulate(schedule={"order": order}, transfer_s=0.5)
    assert again["timeline"] == first["timeline"]
    assert again["schedule"] == "order" and again["baselines"]["zero_bubble"] == first["makespan_s"]


def test_reuse_changes_only_the_cache_counts() -> None:
    one, other = simulate(reuse=True, micro_batches=32), simulate(reuse=False, micro_batches=32)
    assert one.pop("cache")["hits"] > 0 and other.pop("cache")["hits"] == 0
    assert one == other


def test_interleaved_and_classes() -> None:
    stage = {**STAGE, "classes": [{"forward_s": 1, "backward_s": 2, "activation_bytes": 1}]}
    answer = simulate(stages=[stage] * 4, micro_batches=[0, 1, 1, 0], schedule="interleaved", ranks=2, virtual_stages=2)
    assert {(one["rank"], tuple(one["stages"])) for one in answer["ranks"]} == {(0, (0, 2)), (1, (1, 3))}
    assert answer["makespan_s"] >= answer["lower_bound_s"] > 0
    assert answer["ranks"][0]["busy_s"] == 2 * (15 + 3 + 3 + 15)


def test_offloaded_copies_are_listed() -> None:
    answer = simulate(stages=[{**STAGE, "memory": "offload"}] * 4, host_bandwidth_bytes_per_s=10)
    assert {one["pass"] for one in answer["copies"]} == {"in", "out"}
    assert answer["ranks"][3]["peak_bytes"] == 110.0  # nothing waits there, so nothing leaves
    assert simulate(timeline=False, micro_batches=2)["copies"] == []


def test_error_names_the_smallest_memory_that_is_enough() -> None:
    with pytest.raises(InfeasibleError, match="the smallest limit for this schedule is 140") as error:
        simulate(memory_bytes=139)
    assert error.value.path == "memory_bytes"
    assert "with all stages recomputed it would be 110" in error.value.hint
    assert simulate(memory_bytes=140)["peak_bytes"] == 140.0


def test_equal_replicas_are_simulated_once() -> None:
    stage = {**STAGE, "classes": [{"forward_s": 10, "backward_s": 20}]}
    alone = simulate(stages=[stage] * 4, micro_batches=[0, 0, 0, 1])
    answer = simulate(
        stages=[stage] * 4,
        micro_batches=[0, 0, 0, 1],
        replicas=[[0, 0, 0, 1]] * 3 + [[1, 1, 0, 1], 4],
        gradient_sync_s=2,
    )
    assert answer["replicas_s"][:3] == [alone["makespan_s"]] * 3 and answer["replicas_s"][4] == 105.0
    assert answer["replicas_s"][3] > alone["makespan_s"]
    assert answer["step_s"] == answer["replicas_s"][3] + 2
    assert answer["cache"]["hits"] >= alone["cache"]["hits"] + 3
    assert "copy 3" in answer["explanation"][-1]
    assert alone["step_s"] == alone["makespan_s"] and alone["replicas_s"] == []
    with pytest.raises(InfeasibleError):
        simulate(micro_batches=1, replicas=[8], memory_bytes=120)


ONE = {"stage": 0, "pass": "F", "micro_batch": 0}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"stages": []}, "stages"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"stages": [{**STAGE, "forward_s": -1}]}, "stages.0.forward_s"),
        ({"stages": [{"forward_s": 1}]}, "stages.0"),
        ({"stages": [{**STAGE, "weight_s": 11}]}, "stages.0.weight_s"),
        ({"stages": [{**STAGE, "forward": {"device": "t4", "programs": [{"program": {"a": 1}}]}}]}, "stages.0"),
        ({"ranks": 3}, "ranks"),
        ({"ranks": 2}, "schedule"),
        ({"ranks": 8}, "ranks"),
        ({"virtual_stages": 3}, "virtual_stages"),
        ({"transfer_s": [1.0]}, "transfer_s"),
        ({"micro_batches": [0, 1]}, "stages.0.classes"),
        ({"stages": [STAGE, {**STAGE, "classes": [STAGE]}]}, None),
        ({"stages": [{**STAGE, "memory": "offload"}]}, "host_bandwidth_bytes_per_s"),
        ({"schedule": {"order": [[ONE]]}}, "schedule.order"),
        ({"schedule": {"order": [[ONE]]}, "ranks": 4}, "ranks"),
        ({"schedule": {"order": [[ONE]]}, "replicas": [3]}, "replicas"),
    ],
)
def test_error_names_the_field(change: dict[str, Any], path: str | None) -> None:
    with pytest.raises(FieldError) as error:
        simulate(**change)
    if path is not None:
        assert error.value.path.startswith(path)


def test_steps_without_time() -> None:
    answer = simulate(stages=[{"forward_s": 0, "backward_s": 0}], micro_batches=1)
    assert answer["makespan_s"] == 0.0 and answer["gap"] == 0.0 and answer["bubble"] == 0.0


@pytest.fixture(scope="module")
def example(predictor: LatencyPredictor) -> tuple[SimulateRequest, dict[str, Any]]:
    value = json.loads(EXAMPLE.read_text())
    return SimulateRequest.model_validate(value), make_plan("simulate", value, predictor)


def test_predicted_costs_are_explained_by_their_programs(example: tuple[SimulateRequest, dict[str, Any]]) -> None:
    _, answer = example
    SimulatePlan.model_validate(answer)
    assert answer["model_id"]
    assert answer["interval"]["lower_s"] < answer["makespan_s"] < answer["interval"]["upper_s"]
    text = "\n".join(answer["explanation"])
    assert "stage 3 is long" in text
    [extra] = re.findall(r"more than stage 0: (.*)", text)
    assert "linear:dtype=float16,m=4096,n=50304,k=2048" in extra


def test_plan_is_printed_and_drawn(example: tuple[SimulateRequest, dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    request, plan = example[0], SimulatePlan.model_validate(example[1])
    assert "bubble" in render(plan.report())
    axes = draw(request, plan).axes
    assert [axis.get_xlabel() for axis in axes] == ["time (ms)", "peak memory (GB)"]
    assert plan.timeline is not None
    assert sum(len(group.get_paths()) for group in axes[0].collections) == len(plan.timeline)
    with pytest.raises(FieldError):
        draw(request, plan.model_copy(update={"timeline": None}))


def test_text_names_the_bound_of_its_figures() -> None:
    plan = SimulatePlan.model_validate(simulate())
    text = render(plan.report())
    bound = f"the lower bound of all schedules is {format_latency(plan.lower_bound_s)}"
    assert f"{bound}: this is {100 * plan.gap:.3g} % above it" in text
    best_s = plan.baselines["zero_bubble"]
    left = 100 * (1 - plan.lower_bound_s / best_s)
    assert f"with the schedule zero_bubble the step takes {format_latency(best_s)}, " in text
    assert ("another schedule cannot shorten it" if left < 0.05 else f"shorten it by {left:.1f} % at most") in text
    assert "another order of the same passes can" in text


def test_step_that_exceeds_the_memory_of_its_device_is_infeasible_unless_memory_is_ignored() -> None:
    cost = {"collective": {"operator": "send_recv", "bytes": 1e6, "ranks": 2}, "device": "a100-sxm4-40gb"}
    stage = {"forward": cost, "backward": cost, "activation_bytes": 1e9, "weight_bytes": 41e9}
    predictor = LatencyPredictor.load()

    def step(**more: Any) -> dict[str, Any]:
        return make_plan("simulate", {"stages": [stage] * 2, "micro_batches": 4, **more}, predictor)

    with pytest.raises(InfeasibleError, match=r"42[0-9.]*, the memory of its device, but rank 0 needs") as error:
        step()
    assert "recomputed it would be 42000000000, which fits" in error.value.hint and "ignore_memory" in error.value.hint
    assert step(ignore_memory=True)["peak_bytes"] == step(memory_bytes=1e12)["peak_bytes"] == 43e9


def test_rounding_error_gives_no_gap() -> None:
    plan = SimulatePlan.model_validate(simulate())
    equal = plan.model_copy(update={"makespan_s": 1.0 + 2.0**-52, "lower_bound_s": 1.0})
    assert equal.gap == 0.0
