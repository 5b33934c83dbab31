"""Allocation equals an exhaustive search and respects its lower bound; servers are returned at least cost."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp import FieldError, InfeasibleError, make_plan
from cdmpp.devices.registry import lookup
from cdmpp.llm import TrainingPlan, read_config, search_layouts
from cdmpp.llm.engines.profile import load_training_engine
from cdmpp.plan.cluster import ClusterJob, allocate, equal_share, greedy, least, most_saved, reclaim
from cdmpp.plan.cluster.schema import ClusterPlan, ClusterRequest
from cdmpp.plan.cluster.solver import draw, total_s
from cdmpp.plan.registry import PLANNERS
from cdmpp.predict.interface import Predictor
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.rendering import render

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "cluster.json"
times = st.integers(1, 40)


@st.composite
def jobs(draw: st.DrawFn) -> list[ClusterJob]:
    out = []
    for i in range(draw(st.integers(1, 4))):
        counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True).map(sorted))
        seconds = draw(st.lists(times, min_size=len(counts), max_size=len(counts)))
        out.append(ClusterJob(str(i), tuple(counts), tuple(map(float, seconds))))
    return out


@settings(max_examples=80, deadline=None)
@given(jobs(), st.integers(0, 14))
def test_allocation_equals_the_exhaustive_optimum(given_jobs: list[ClusterJob], capacity: int) -> None:
    first = least(given_jobs, capacity)
    options = [job.workers if n else (0,) for job, n in zip(given_jobs, first, strict=True)]
    feasible = [list(c) for c in itertools.product(*options) if sum(c) <= capacity]
    best = min(total_s(given_jobs, c) for c in feasible)
    chosen = allocate(given_jobs, capacity)
    assert sum(chosen) <= capacity
    assert total_s(given_jobs, chosen) == best
    relaxed = total_s(given_jobs, first) - most_saved(given_jobs, first, capacity - sum(first))
    assert relaxed <= best + 1e-9
    for policy in (equal_share, greedy):
        other = policy(given_jobs, capacity)
        assert sum(other) <= capacity
        assert [bool(n) for n in other] == [bool(n) for n in first]
        assert total_s(given_jobs, other) >= best


def test_the_knapsack_beats_greedy_where_steps_are_unequal() -> None:
    # Greedy takes the best rate (3 for 1 worker), and then the large step no longer fits.
    pair = [ClusterJob("a", (1, 2), (10.0, 7.0)), ClusterJob("b", (1, 3), (10.0, 5.0))]
    assert greedy(pair, 4) == [2, 1]
    assert allocate(pair, 4) == [1, 3]


def test_a_job_that_does_not_fit_waits() -> None:
    three = [ClusterJob("long", (4,), (100.0,)), ClusterJob("short", (2,), (1.0,)), ClusterJob("middle", (3,), (10.0,))]
    assert least(three, 6) == [0, 2, 3]


def test_the_cheapest_servers_are_returned() -> None:
    servers = {"s1": {"a": 2}, "s2": {"a": 1, "b": 1}, "s3": {}}
    workers, needed, cost = {"a": 4, "b": 1}, {"a": 2, "b": 1}, {"a": 50.0, "b": 5.0}
    plans = [reclaim(servers, count, workers, needed, cost) for count in (1, 2, 3)]
    assert (plans[0].servers, plans[0].preempted, plans[0].cost_s) == (["s3"], [], 0.0)
    assert (plans[1].servers, plans[1].preempted, plans[1].shrunk) == (["s1", "s3"], [], ["a"])
    assert (plans[2].preempted, plans[2].cost_s) == (["a", "b"], 55.0)


def test_the_example_is_planned_with_predictions(predictor: LatencyPredictor, tmp_path: Path) -> None:
    value = json.loads(EXAMPLE.read_text())
    answer = make_plan("cluster", value, predictor)
    plan = ClusterPlan.model_validate(answer)
    assert answer["reclaimed"]["servers"] == ["inference-1"]
    assert answer["workers"] == 16 + 4
    assert sum(job["workers"] for job in answer["jobs"]) <= 20
    assert all(answer["total_remaining_s"] <= other + 1e-9 for other in answer["baselines"].values())
    assert answer["gap"] >= -1e-9
    assert any("conv2d" in line for line in answer["explanation"])
    request = ClusterRequest.model_validate(value)
    assert "the lower bound of all numbers of workers of the jobs that run is" in render(plan.report())
    draw(request, plan).savefig(tmp_path / "cluster.png")


JOB: dict[str, Any] = {"name": "a", "workers": [2, 4], "remaining_samples": 10, "samples_per_s": [1, 2]}


@pytest.mark.parametrize(
    ("request_", "error", "path"),
    [
        ({"gpus": 1, "jobs": [JOB]}, InfeasibleError, "gpus"),
        ({"gpus": 4, "jobs": [JOB, JOB]}, FieldError, "jobs.1.name"),
        ({"gpus": 4, "jobs": [{**JOB, "workers": [4, 2]}]}, FieldError, "jobs.0.workers"),
        ({"gpus": 4, "jobs": [{**JOB, "samples_per_s": [1]}]}, FieldError, "jobs.0.samples_per_s"),
        ({"gpus": 4, "jobs": [{**JOB, "samples_per_s": None}]}, FieldError, "jobs.0"),
        ({"gpus": 4, "jobs": [JOB], "reclaim": 1}, FieldError, "reclaim"),
        (
            {"gpus": 4, "jobs": [JOB], "loans": [{"name": "s", "gpus": 1, "running": {"b": 1}}]},
            FieldError,
            "loans.0.running",
        ),
        ({"gpus": -1, "jobs": [JOB]}, FieldError, "gpus"),
        ({"gpus": 1, "jobs": []}, FieldError, "jobs"),
    ],
)
def test_error_names_the_field(request_: dict[str, Any], error: type[FieldError], path: str) -> None:
    with pytest.raises(error) as caught:
        make_plan("cluster", request_)
    assert caught.value.path == path


# Jobs that train a language model

CONFIGS = Path(__file__).parents[2] / "examples" / "llm"
#: Values that all layouts have, so that few are priced.
GIVEN: dict[str, Any] = {"global_batch": 64, "sequence": 2048, "pp": 1, "micro_batch": 1}
LLAMA: dict[str, Any] = {"config": str(CONFIGS / "llama-3.1-8b.json"), "device": "h100-sxm", **GIVEN}


def training_job(name: str, workers: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "workers": workers, "remaining_samples": 6400, "training": {**LLAMA, **more}}


def test_training_jobs_have_the_fastest_layout_of_each_count(predictor: LatencyPredictor) -> None:
    answer = make_plan("cluster", {"gpus": 16, "jobs": [training_job("a", [1, 4, 8, 16])]}, predictor)
    fastest = {}
    for gpus in (4, 8, 16):
        ranking = search_layouts(LLAMA["config"], "h100-sxm", gpus=gpus, predictor=predictor, **GIVEN)
        fastest[gpus] = ranking.steps[0]
    with pytest.raises(InfeasibleError):
        search_layouts(LLAMA["config"], "h100-sxm", gpus=1, predictor=predictor, **GIVEN)
    (job,) = answer["jobs"]
    assert job["workers"] == 16 and job["layout"] == fastest[16].layout.named()
    assert job["remaining_s"] == pytest.approx(100 * fastest[16].step_s, rel=1e-12)
    assert job["least_remaining_s"] == pytest.approx(100 * fastest[4].step_s, rel=1e-12)
    assert any("no layout of 1 workers divides and fits the memory" in line for line in answer["explanation"])
    assert not any("memory was not checked" in line for line in answer["explanation"])
    ends = answer["reliability"]["ends"]
    assert ends["lower"] < answer["total_remaining_s"] < ends["upper"]
    plan = TrainingPlan.of(
        read_config(LLAMA["config"]), lookup("h100-sxm"), load_training_engine("megatron"), asdict(fastest[16].layout)
    )
    assert answer["reliability"]["programs"] == len(plan.queries)


def test_allocation_of_training_jobs_equals_the_exhaustive_optimum(predictor: LatencyPredictor) -> None:
    value = {
        "gpus": 20,
        "jobs": [
            training_job("a", [4, 8, 16]),
            {**training_job("b", [4, 8], tp=2), "remaining_samples": 9000},
            {"name": "c", "workers": [1, 2, 6], "remaining_samples": 5e5, "samples_per_s": [90.0, 170.0, 400.0]},
        ],
        "loans": [{"name": "s", "gpus": 8, "gpus_per_worker": 4}],
    }
    answer = make_plan("cluster", value, predictor)
    seconds: list[dict[int, float]] = []
    for job in value["jobs"]:
        seconds.append({})
        for at, n in enumerate(job["workers"]):
            alone = {**job, "workers": [n]}
            if "samples_per_s" in job:
                alone["samples_per_s"] = [job["samples_per_s"][at]]
            seconds[-1][n] = make_plan("cluster", {"gpus": n, "jobs": [alone]}, predictor)["total_remaining_s"]
    feasible = [counts for counts in itertools.product(*seconds) if sum(counts) <= 22]
    best = min(sum(s[n] for s, n in zip(seconds, counts, strict=True)) for counts in feasible)
    assert answer["workers"] == 22 and sum(job["workers"] for job in answer["jobs"]) <= 22
    assert answer["total_remaining_s"] == pytest.approx(best, rel=1e-12)
    assert answer["lower_bound_s"] <= best * (1 + 1e-12)
    assert min(answer["baselines"].values()) >= best * (1 - 1e-12)


def test_equal_configurations_are_predicted_once_and_given_by_path_or_content(predictor: LatencyPredictor) -> None:
    asked: list[int] = []

    class Counting:
        model_id = predictor.model_id

        def predict_queries(self, queries: Any) -> Any:
            asked.append(len(queries))
            return predictor.predict_queries(queries)

    content = {**LLAMA, "config": json.loads(Path(LLAMA["config"]).read_text())}
    one, other = training_job("a", [8]), {**training_job("b", [8]), "training": content}
    for chosen in ([one], [one, other]):
        answer = make_plan("cluster", {"gpus": 16, "jobs": chosen}, cast("Predictor", Counting()))
    assert asked[0] == asked[1]
    assert answer["jobs"][0]["remaining_s"] == answer["jobs"][1]["remaining_s"]
    # A service reads no files: a request that was not read here has a path.
    with pytest.raises(FieldError, match=r"jobs\.0\.training\.config"):
        PLANNERS["cluster"].read({"gpus": 16, "jobs": [one]})


def test_faults_of_training_jobs_name_the_field(predictor: LatencyPredictor) -> None:
    for more, path in (
        ({"workers": [1]}, "jobs.0.workers"),
        ({"workers": [4], "training": {**LLAMA, "tp": 3}}, "jobs.0.workers"),
        ({"training": {**LLAMA, "device": "no such"}}, "jobs.0.training.device"),
        ({"training": {**LLAMA, "engine": "no such"}}, "jobs.0.training.engine"),
        ({"training": {**LLAMA, "config": {"model_type": "no such"}}}, "jobs.0.training.config.model_type"),
        ({"samples_per_s": [1.0]}, "jobs.0"),
    ):
        with pytest.raises((FieldError, InfeasibleError)) as caught:
            make_plan("cluster", {"gpus": 16, "jobs": [{**training_job("a", [8]), **more}]}, predictor)
        assert caught.value.path == path
