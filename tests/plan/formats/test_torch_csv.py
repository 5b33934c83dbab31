"""Schedules for torch.distributed.pipelining: run by torch, and read back."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdmpp import make_plan
from cdmpp.errors import FieldError
from cdmpp.plan.formats import export_plan, import_request
from cdmpp.plan.fused.schema import FusedPlan
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

STAGE = {"forward_s": 1.0, "backward_s": 2.0}
FUSED: dict[str, Any] = {
    "models": [{"stages": 4, "micro_batches": 6, **STAGE, "direction": "up"}],
    "ranks": 4,
    "max_activations": 3,
    "max_steps": 64,
    "budget_s": 60,
}
MODULE: dict[str, Any] = {
    "name": "decoder",
    "layers": 8,
    "cost": {"sizes": [1, 2], "forward_s": [1, 2], "backward_s": [2, 4]},
}
SEGMENTS: dict[str, Any] = {"modules": [MODULE], "batch": {"decoder": 4}, "ranks": 2, "max_steps": 20, "budget_s": 60}
#: Two modules; the second one begins behind the first one and goes on at rank 0.
WRAPPED: dict[str, Any] = {
    "modules": [{**MODULE, "layers": 1}, {**MODULE, "name": "b", "layers": 4, "after": ["decoder"]}],
    "batch": {"decoder": 4, "b": 4},
    "ranks": 3,
    "executable": True,
    "max_steps": 100,
    "budget_s": 60,
}
LAYERS = [{"name": f"layer{i}", "forward_s": 1.0 + i % 3, "backward_s": 2.0} for i in range(6)]
SPLIT: dict[str, Any] = {"layers": LAYERS, "ranks": 2, "micro_batches": 4, "goal": "step"}
#: Kind, request, ranks, micro-batches.
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "fused": ("pipeline", FUSED, 4, 6),
    "delayed weight gradients": (
        "simulate",
        {"stages": [STAGE] * 2, "micro_batches": 4, "schedule": "zero_bubble"},
        2,
        4,
    ),
    "segments": ("pipeline", SEGMENTS, 2, 4),
    "wrapped modules": ("pipeline", WRAPPED, 3, 4),
    "split": ("split", SPLIT, 2, 4),
}


#: Two models, which every rank runs one after the other.
IN_TURN: dict[str, Any] = {
    "models": [
        {"stages": 4, "micro_batches": 4, **STAGE},
        {"stages": 4, "micro_batches": 4, "forward_s": 0.5, "backward_s": 1.0, "direction": "up"},
    ],
    "ranks": 4,
    "executable": True,
    "max_steps": 64,
    "budget_s": 60,
}


def exported(kind: str, request: dict[str, Any]) -> str:
    """The schedule of a request's plan."""
    return export_plan("torch-csv", kind, request, make_plan(kind, request)).text


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Losses and differences of all cases, run on two and four processes."""
    folder, cases = tmp_path_factory.mktemp("schedules"), []
    for name, (kind, request, ranks, micro_batches) in CASES.items():
        path = folder / f"{name}.csv"
        path.write_text(exported(kind, request))
        cases.append({"csv": [str(path)], "ranks": ranks, "micro_batches": micro_batches})
    plan = make_plan("pipeline", IN_TURN)
    paths = []
    for model in FusedPlan.model_validate(plan).sequence() or ():
        paths.append(folder / f"model{model}.csv")
        paths[-1].write_text(export_plan("torch-csv", "pipeline", IN_TURN, plan, model=model).text)
    cases.append({"csv": list(map(str, paths)), "ranks": 4, "micro_batches": 4})
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    worker = Path(__file__).with_name("pipeline_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(listed)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip([*CASES, "models in turn"], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", [*CASES, "models in turn"])
def test_pipelined_step_equals_the_whole_module(name: str, steps: dict[str, dict[str, float]]) -> None:
    step = steps[name]
    assert step["loss"] == pytest.approx(step["expected_loss"], rel=1e-5)
    assert step["difference"] <= 1e-5 * step["largest"]


def test_modules_wrap_round_the_ranks() -> None:
    plan = make_plan("pipeline", WRAPPED)
    assert [entry["rank"] for entry in plan["layout"] if entry["module"] == "b"] == [1, 2, 0]


@pytest.mark.parametrize("name", CASES)
def test_schedule_that_is_read_back_takes_as_long_as_the_plan(name: str) -> None:
    kind, request, ranks, micro_batches = CASES[name]
    plan = make_plan(kind, request)
    text = export_plan("torch-csv", kind, request, plan).text
    found = import_request("torch-csv", text, "simulate", fields={"stages": STAGE}).request
    assert len(found["schedule"]["order"]) == ranks
    assert found["micro_batches"] == micro_batches
    again = make_plan("simulate", found)
    if name in ("fused", "delayed weight gradients"):  # their stages have these costs
        assert again["makespan_s"] == pytest.approx(plan["makespan_s"], rel=1e-12)


def test_delayed_weight_gradients_are_separate_actions() -> None:
    first = exported(*CASES["delayed weight gradients"][:2]).splitlines()[0]
    assert "0I0" in first and "0W0" in first and "0B" not in first


def test_each_copy_of_a_model_has_the_schedule() -> None:
    request = {**FUSED, "models": [{"stages": 2, "micro_batches": 3, **STAGE}]}
    found = export_plan("torch-csv", "pipeline", request, make_plan("pipeline", request))
    assert len(found.text.splitlines()) == 2
    assert any("2 copies" in note for note in found.notes)


@pytest.mark.parametrize(
    ("kind", "request_", "message"),
    [
        ("pipeline", {**FUSED, "models": [{"stages": 2, "micro_batches": 2, **STAGE}] * 2}, "2 models share the ranks"),
        ("pipeline", {**SEGMENTS, "batch": None, "batches": [{"decoder": 2}] * 2}, "several steps"),
        ("pipeline", {**SEGMENTS, "modules": [{**MODULE, "layers": 1}]}, "run no stage"),
        ("simulate", {"stages": [STAGE], "micro_batches": 2, "timeline": False}, "no passes"),
        (
            "pipeline",
            {
                **SEGMENTS,
                "modules": [MODULE, {**MODULE, "name": "b"}, {**MODULE, "name": "c", "after": ["decoder", "b"]}],
                "batch": {"decoder": 1, "b": 1, "c": 1},
            },
            "no chain",
        ),
        (
            "pipeline",
            {
                **SEGMENTS,
                "modules": [MODULE, {**MODULE, "name": "b", "after": ["decoder"]}],
                "batch": {"decoder": 2, "b": 3},
            },
            "equal micro-batches",
        ),
    ],
)
def test_plans_that_torch_cannot_run_are_named(kind: str, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        export_plan("torch-csv", kind, request_, make_plan(kind, request_))
    assert caught.value.path and (caught.value.hint or "stage" in message)


def test_communication_of_a_schedule_is_listed_and_left_out() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0,\n"
    found = import_request("torch-csv", text, "simulate")
    assert found.request["schedule"]["order"][0] == [
        {"stage": 0, "pass": "F", "micro_batch": 0},
        {"stage": 0, "pass": "B", "micro_batch": 0},
    ]
    assert "SEND_F (1)" in found.ignored and "UNSHARD (1)" in found.ignored
    assert found.missing == ("stages.0.forward_s", "stages.0.backward_s")


def test_overlapping_actions_run_one_after_the_other() -> None:
    found = import_request("torch-csv", "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n", "simulate", fields={"stages": STAGE})
    assert make_plan("simulate", found.request)["makespan_s"] == 9
    assert any("1 overlapping" in note for note in found.notes) and not found.missing


@pytest.mark.parametrize("text", ["", "0F0,hello\n", "0F\n", "\n\n", "0F0,999999999F0\n"])
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(FieldError):
        import_request("torch-csv", text, "simulate")
