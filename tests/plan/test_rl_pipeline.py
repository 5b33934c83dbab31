"""Training by a pipeline schedule: its time by hand, its searched schedule, and its prices."""

import math
from typing import Any

import numpy as np
import pytest

from cdmpp import FieldError, make_plan
from cdmpp.plan.base.solve import read_request, solve_request
from cdmpp.plan.fused.check import check as check_fused
from cdmpp.plan.fused.schema import FusedRequest
from cdmpp.plan.rl.pools import TrainingForm
from cdmpp.plan.rl.problem import MOST_SHARE, schedules
from cdmpp.plan.rl.schema import RlPlan, RlRequest
from cdmpp.plan.rl.training import ReadyTimes, TrainingCost
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.rendering import render
from cdmpp.predict.requests.budget import SearchControl
from tests.plan.rl_cases import BASE

ONE_MODEL: dict[str, Any] = {
    "models": [{"stages": 4, "micro_batches": 6, "forward_s": 0.5, "backward_s": 1.0}],
    "ranks": 4,
    "max_steps": 16,
}
#: (micro_batches + stages - 1) x (forward + backward).
ONE_MODEL_S = 9 * 1.5
TOO_UNEQUAL: dict[str, Any] = {
    **ONE_MODEL,
    "models": [{"stages": 1, "micro_batches": 1, "forward_s": 1e-9, "backward_s": 1e9}],
}
FUSED: dict[str, Any] = {
    "models": [
        {"stages": 4, "micro_batches": 8, "forward_s": 0.05, "backward_s": 0.1, "direction": "down"},
        {"stages": 2, "micro_batches": 4, "forward_s": 0.04, "backward_s": 0.08, "direction": "up"},
    ],
    "ranks": 4,
    "max_steps": 64,
}
REQUEST: dict[str, Any] = {**BASE, "pools": [{"name": "here", "units": 12}]}


def solve(predictor: LatencyPredictor | None = None, **changes: Any) -> RlPlan:
    return solve_request(read_request(RlRequest, {**REQUEST, **changes}), predictor)


@pytest.mark.parametrize(("pipelines", "samples"), [(1, 8), (2, 8), (3, 8), (2, 24), (3, 64)])
def test_training_runs_the_schedule_as_often_as_its_pipelines_need(pipelines: int, samples: int) -> None:
    training = {"pipeline": {"request": ONE_MODEL, "samples": samples, "units": 4}, "fixed_s": 2.0}
    plan = solve(training=training, layout="shared", generation_units=4 * pipelines)
    runs = math.ceil(64 / (pipelines * samples))
    assert (plan.training.pipeline.pipelines, plan.training.pipeline.runs) == (pipelines, runs)
    assert plan.training.pipeline.run_s == pytest.approx(ONE_MODEL_S)
    assert plan.training.time_s == pytest.approx(runs * ONE_MODEL_S + 2)
    assert plan.step_s == pytest.approx(plan.generation.stage_s + plan.training.time_s)


def test_streamed_batches_run_whole_schedules_by_plain_loops() -> None:
    rng = np.random.default_rng(0)
    times, lengths = rng.uniform(0, 50, (2, 16)), rng.integers(1, 9, (2, 16))
    cost = TrainingCost(per_token_s=0.1, fixed_s=1.0, batch_overhead_s=0.2, run_s=3.0, run_samples=3, run_units=2)
    ready = ReadyTimes.of(times, lengths, 0)
    for batches in (1, 2, 4, 8):
        end, _ = ready.trained(cost, np.array([2, 4, 5]), batches)
        for draw, row in enumerate(times):
            order = np.argsort(row)
            for column, units in enumerate((2, 4, 5)):
                now = 0.0
                for batch in np.split(order, batches):
                    runs = math.ceil(len(batch) / (units // 2 * 3))
                    now = max(now, row[batch].max()) + 0.1 * lengths[draw, batch].sum() / units + 3 * runs + 0.2
                assert end[draw, column] == pytest.approx(now + 1)


def test_fused_schedule_is_searched_and_its_answer_gives_the_same_plan() -> None:
    searched = solve(training={"pipeline": {"request": FUSED, "samples": 16, "units": 4}})
    schedule = searched.training.pipeline.schedule
    assert check_fused(read_request(FusedRequest, FUSED), schedule.model_dump()) == []
    assert searched.training.units % 4 == 0
    answer = make_plan("pipeline", FUSED)
    given = solve(training={"pipeline": {"answer": answer, "samples": 16, "units": 4}})
    assert given.training.pipeline.schedule is None
    assert given.training.pipeline.run_s == schedule.makespan_s == answer["makespan_s"]
    assert given.step_s == searched.step_s
    assert "pipelines:" in render(searched.tables())


def test_pipeline_programs_are_priced_and_give_the_plan_an_interval(predictor: LatencyPredictor) -> None:
    work = {"programs": [{"program": {"operator": "linear", "m": 512, "n": 1024, "k": 1024}}], "device": "t4"}
    models = [{"stages": 2, "micro_batches": 2, "forward": work, "backward": work}]
    pipeline = {"request": {"models": models, "ranks": 2, "max_steps": 8}, "samples": 8}
    request = read_request(RlRequest, {**REQUEST, "training": {"pipeline": pipeline}})
    paths = [program.path for program in request.price_requests()]
    ends = (".forward.programs.0", ".backward.programs.0")
    assert paths == ["training.pipeline.request.models.0" + end for end in ends]
    plan = solve_request(request, predictor)
    assert plan.step_lower_s is not None
    assert plan.step_upper_s is not None
    assert plan.step_lower_s < plan.step_s < plan.step_upper_s
    assert plan.model_id == predictor.model_id


def test_equal_pipelines_are_searched_once_within_their_share_of_the_budget() -> None:
    budgets = []

    class Control(SearchControl):
        def part(self, budget_s: float | None = None, reserve_s: float = 0.0) -> SearchControl:
            budgets.append(budget_s)
            return super().part(budget_s, reserve_s)

    forms = [
        TrainingForm.model_validate({"pipeline": {"request": {**FUSED, "budget_s": 50}, "samples": samples}})
        for samples in (8, 8, 16)
    ]
    found = schedules([forms[0], None, forms[1], forms[2]], Control(100.0))
    assert list(found) == [0, 2, 3]
    assert found[0] is found[2]
    assert len(budgets) == 2
    assert all(budget is not None and 0 < budget <= MOST_SHARE * 100 for budget in budgets)


@pytest.mark.parametrize(
    ("pipeline", "path"),
    [
        ({"samples": 4}, "training.pipeline"),
        ({"request": ONE_MODEL, "answer": {"makespan_s": 1}, "samples": 4}, "training.pipeline"),
        ({"request": {**ONE_MODEL, "ranks": 3}, "samples": 4}, "training.pipeline.request.models.0.stages"),
        ({"request": TOO_UNEQUAL, "samples": 4}, "training.pipeline.request.models"),
        ({"answer": {"makespan_s": 0}, "samples": 4}, "training.pipeline.answer.makespan_s"),
        ({"answer": {"makespan_s": 1}, "samples": 4, "units": 13}, "training.pipeline.units"),
    ],
)
def test_error_of_a_wrong_pipeline_names_its_field(pipeline: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as error:
        solve(training={"pipeline": pipeline})
    assert error.value.path == path
    assert path in error.value.message
