"""Options of language models have one default: in Python, at the command line, over HTTP and in TOML."""

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.client.operations import Operations
from cdmpp.llm import calibrate, estimate, goodput, search_layouts, simulate, training_step
from cdmpp.llm.options import BATCH, SERVING, TRAINING, RequestOption
from cdmpp.plan.sweep.points import Sweep, SweepLoad
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.llm import CalibrateRequest, LlmRequest, SimulateRequest
from cdmpp_server.training import TrainingStepRequest

LLAMA = Path(__file__).parents[2] / "examples" / "llm" / "llama-3.1-8b.json"
REQUIRED = "required"


def of_python(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: REQUIRED if p.default is p.empty else p.default for p in parameters}


def of_schema(model: type[BaseModel]) -> dict[str, Any]:
    fields = {name: REQUIRED if f.is_required() else f.get_default() for name, f in model.model_fields.items()}
    # A sweep has a list of each setting; an empty one is the usual value.
    return {name: (value or [None])[0] if isinstance(value, list) else value for name, value in fields.items()}


#: Options whose default depends on others at an interface, and which the tests below ask for.
DEPENDS = {"config", "device", "predictor", "model", "output"}


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any], least: int) -> dict[str, Any]:
    shared = (set(expected) & set(found)) - DEPENDS
    assert len(shared) >= least, shared
    return {name: (expected[name], found[name]) for name in shared if expected[name] != found[name]}


@pytest.mark.parametrize(
    ("function", "found", "least"),
    [
        (estimate, of_schema(Sweep), 8),
        (goodput, of_schema(SweepLoad), 1),
        # Without a stated sharding, a search tries several.
        (training_step, {**of_python(search_layouts), "sharding": "none"}, 8),
        (training_step, of_python(Operations.training_step), 1),
        (calibrate, of_schema(CalibrateRequest), 1),
        (calibrate, of_python(Operations.llm_calibrate), 1),
    ],
)
def test_defaults_are_those_of_the_python_function(
    function: Callable[..., Any], found: dict[str, Any], least: int
) -> None:
    assert _differences(of_python(function), found, least) == {}


@pytest.mark.parametrize(
    ("function", "options", "request_model", "command"),
    [
        (estimate, BATCH, LlmRequest, "llm"),
        (simulate, SERVING, SimulateRequest, "llm"),
        (training_step, TRAINING, TrainingStepRequest, "training-step"),
    ],
)
def test_each_declared_option_stands_at_every_interface(
    function: Callable[..., Any], options: Mapping[str, RequestOption], request_model: type[BaseModel], command: str
) -> None:
    assert set(options) <= set(of_python(function)) & set(request_model.model_fields)
    printed = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert [name for name in options if f"--{name.replace('_', '-')}" not in printed] == []
    for name, option in options.items():
        assert option.default in (..., None) or isinstance(option.default, option.type), name


def test_an_unknown_or_missing_option_is_refused_before_any_work() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'kv_type'"):
        estimate("no such file", "h100-sxm", kv_type="int8")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing a required argument: 'gpus'"):
        training_step("no such file", "h100-sxm", global_batch=8, sequence=128)  # type: ignore[call-arg]


@pytest.mark.slow
def test_answers_have_the_length_of_the_interface_that_is_asked(predictor: LatencyPredictor) -> None:
    assert of_python(estimate)["output"] == of_schema(LlmRequest)["output"] == of_schema(Sweep)["output"]
    assert of_python(simulate)["output"] == of_schema(SimulateRequest)["output"] == 1024

    def asked(*options: str) -> Any:
        result = CliRunner().invoke(app, ["llm", str(LLAMA), "-d", "h100-sxm", "--json", *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    assert asked() == estimate(LLAMA, "h100-sxm", predictor=predictor).to_dict()
    load: dict[str, Any] = {"concurrency": 2, "count": 6, "predictor": predictor}
    assert asked("--concurrency", "2", "--count", "6") == simulate(LLAMA, "h100-sxm", **load).to_dict()
    common = {"config": "x.json", "devices": ["t4"], "price_per_gpu_hour": {"t4": 1.0}, "goals": {"ttft_s": 1.0}}
    assert Sweep.model_validate({**common, "load": {}}).output == 1024
    assert Sweep.model_validate({**common, "load": {}, "output": 7}).output == 7
