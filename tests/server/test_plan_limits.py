"""The service limits the size of plan requests by its settings; the library has no such limits."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from cdmpp.plan.registry import PLANNERS, make_plan
from cdmpp_server.plan.work import PlanReader, read
from cdmpp_server.plan_limits import DEFAULTS
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings
from tests.server.conftest import plan_examples

STAGES: dict[str, Any] = {"stages": [{"forward_s": 1, "backward_s": 2}] * 257, "micro_batches": 2, "timeline": False}
MODEL = {"stages": 4, "micro_batches": 4200, "forward_s": 1, "backward_s": 2}
FUSED: dict[str, Any] = {"models": [MODEL], "ranks": 4, "max_steps": 1}


def examples() -> list[tuple[str, Any]]:
    return [(kind, json.loads(path.read_text())) for kind, path in plan_examples()]


def read_limited(kind: str, value: Any, limits: dict[str, float]) -> None:
    read(PlanReader(Settings(plan_limits=limits).plan_limits), kind, json.dumps(value).encode())


def refusal(kind: str, value: Any, limits: dict[str, float]) -> dict[str, Any]:
    with pytest.raises(ProblemError) as refused:
        read_limited(kind, value, limits)
    return refused.value.refusal()


def test_every_size_of_a_request_has_a_default_limit_and_every_limit_a_size() -> None:
    sizes = {f"{kind}.{name}" for kind, value in examples() for name in PLANNERS[kind].read(value).sizes()}
    assert sizes | {"budget_s"} == set(DEFAULTS)


@pytest.mark.parametrize(("kind", "value"), examples())
def test_request_at_its_limits_is_read_and_one_beyond_any_of_them_is_refused(kind: str, value: Any) -> None:
    sizes = {f"{kind}.{name}": size for name, size in PLANNERS[kind].read(value).sizes().items() if size}
    read_limited(kind, value, dict(sizes))
    for name, size in sizes.items():
        problem = refusal(kind, value, {name: size - 0.5})
        assert (problem["status"], problem["code"]) == (409, "plan_too_large")
        assert f"{size:,}" in problem["message"]
        assert problem["errors"][0]["path"] == name.rpartition(".")[2]


@pytest.mark.parametrize(("kind", "value", "size"), [("simulate", STAGES, "stages"), ("pipeline", FUSED, "passes")])
def test_library_plans_what_the_service_refuses_by_default(kind: str, value: Any, size: str) -> None:
    assert refusal(kind, value, {})["errors"][0]["path"] == size
    read_limited(kind, value, {f"{kind}.{size}": 1e9})
    assert make_plan(kind, value)["makespan_s"] > 0


def test_huge_counts_are_refused_before_anything_of_their_size_is_made() -> None:
    stage = {"forward_s": 1, "backward_s": 2}
    cost = {"sizes": [1], "forward_s": [1], "backward_s": [2]}
    modules = [{"name": f"m{i}", "layers": 1_000_000, "cost": cost} for i in range(200)]
    for kind, value in (
        ("simulate", {"stages": [stage] * 200, "micro_batches": 1_000_000}),
        ("split", {"layers": [{**stage, "count": 1_000_000}] * 200, "ranks": 2, "micro_batches": 2}),
        ("pipeline", {"modules": modules, "batch": {f"m{i}": 1_000_000 for i in range(200)}, "ranks": 1_000_000}),
    ):
        assert refusal(kind, value, {})["code"] == "plan_too_large"


def test_longer_budget_than_the_service_allows_is_refused() -> None:
    problem = refusal("pipeline", {**FUSED, "budget_s": 601}, {"pipeline.passes": 1e9})
    assert problem["message"] == "budget_s: 601, and this service takes at most 600"


@pytest.mark.parametrize(
    ("limits", "text"), [({"replay.node": 1}, "did you mean 'replay.nodes'"), ({"budget_s": 0}, "positive")]
)
def test_wrong_limit_in_the_settings_is_refused(limits: dict[str, float], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        Settings(plan_limits=limits)
