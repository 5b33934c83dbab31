"""The five sentences of plans: baselines that could be carried out, and what the bound is of."""

from __future__ import annotations

from typing import Any

from cdmpp.plan.registry import make_plan

LAYER = {"name": "layer", "count": 4, "forward_s": 0.001, "backward_s": 0.002, "activation_bytes": 0}
JOB = {"workers": [4], "remaining_samples": 100, "samples_per_s": [1]}


def summary(kind: str, request: dict[str, Any]) -> list[str]:
    lines: list[str] = make_plan(kind, request)["summary"]
    return lines


def test_baseline_of_a_split_fits_into_the_memory() -> None:
    layers = [{**LAYER, "name": "first", "count": 1, "weight_bytes": 9e8}, {**LAYER, "weight_bytes": 1e8}]
    ranks: list[dict[str, Any]] = [{"memory_bytes": 9.5e8}, {}]
    request = {"layers": layers, "ranks": ranks, "micro_batches": 4}
    plan = make_plan("split", request)
    assert plan["too_large"] and all(plan["baselines"][name] < plan["value_s"] for name in plan["too_large"])
    assert not any("the best baseline" in line for line in plan["summary"])
    plan = make_plan("split", {**request, "ignore_memory": True})
    assert "too_large" not in plan and plan["summary"][1].startswith("the best baseline")


def test_cheaper_baseline_is_said_to_be_less() -> None:
    request = {"stages": [{"forward_s": 0.001, "backward_s": 0.002}] * 2, "micro_batches": 4, "schedule": "1f1b"}
    lines = summary("simulate", {**request, "replicas": [8], "gradient_sync_s": 1})
    assert lines[0].endswith("with 1 further copies and their gradients")
    assert lines[1].startswith("the best baseline, zero bubble, takes") and lines[1].endswith("% less")


def test_bound_of_a_cluster_is_of_the_jobs_that_run() -> None:
    lines = summary("cluster", {"gpus": 4, "jobs": [{"name": "a", **JOB}, {"name": "b", **JOB}]})
    assert lines[0] == "sum of remaining times 100 s of the jobs that run; 1 of 2 waits"
    assert lines[2].startswith("the lower bound of all numbers of workers of the jobs that run is")


def test_recommendation_of_colocated_instances_is_not_compared_with_the_other_choice() -> None:
    side = {"layer": {"batch": [1, 64], "seconds": [0.001, 0.001]}, "instances": 2}
    request: dict[str, Any] = {
        "layers": 2,
        "attention": side,
        "ffn": side,
        "link": {"bytes_per_token": 1000, "bandwidth_bytes_per_s": 1e6, "alpha_s": 1e-3},
        "tpot_s": 1.0,
    }
    plan = make_plan("afd", request)
    assert plan["recommended"] == "colocated"
    lines = plan["summary"]
    assert not any(line.startswith("the best baseline") for line in lines)
    assert any(": the best disaggregated choice is " in line for line in lines)
    plan = make_plan("afd", {**request, "link": {**request["link"], "alpha_s": 0, "bandwidth_bytes_per_s": 1e12}})
    assert plan["recommended"] == "disaggregated"
    assert plan["summary"][1].startswith(
        f"the best baseline, {min(plan['baselines'], key=plan['baselines'].get)}".replace("_", " ")
    )
