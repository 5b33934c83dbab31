"""What the service says of itself, how it starts, and what its settings are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import ValidationError

import cdmpp_server.app
import cdmpp_server.predict.routes
from cdmpp.devices import known, lookup
from cdmpp.errors import ArtifactError
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.support import selected
from cdmpp_server.__main__ import main
from cdmpp_server.app import create_app
from cdmpp_server.predict.programs import Devices, Programs, ResolvedProgram, exact_key
from cdmpp_server.predict.service import check_golden
from cdmpp_server.settings import FILE_VARIABLE, Settings
from tests.server.conftest import LINEAR, problem, service, without_ids


def test_alive_and_ready(client: TestClient, predictor: LatencyPredictor) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    ready = {"status": "ready", "model_id": predictor.model_id, "observations": "ready"}
    assert client.get("/readyz").json() == ready


def test_not_ready_when_the_golden_prediction_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cdmpp_server.predict.routes, "check_golden", lambda predictor: "figures are nonsense")
    with service() as client:
        assert "nonsense" in problem(client.get("/readyz"), 503, "not_ready")["detail"]
        assert client.get("/healthz").status_code == 200


def test_the_golden_prediction_sees_what_is_no_latency(predictor: LatencyPredictor, monkeypatch) -> None:
    assert check_golden(predictor) == ""
    fresh = LatencyPredictor(predictor.artifact)
    answers = predictor.predict_queries
    monkeypatch.setattr(fresh, "predict_queries", lambda *sent: [replace(a, lower_s=1.0) for a in answers(*sent)])
    assert "bounds" in check_golden(fresh)
    monkeypatch.setattr(fresh, "predict_queries", None)  # calling it fails
    assert check_golden(fresh)


def test_every_known_device_with_its_figures(client: TestClient, predictor: LatencyPredictor) -> None:
    listed = client.get("/devices").json()["devices"]
    names = [spec.name for spec in known()]
    # Devices that only the model knows follow.
    assert [d["name"] for d in listed[: len(names)]] == names
    assert {d["name"] for d in listed[len(names) :]} == set(predictor.artifact.device_names) - set(names)
    assert {d["name"] for d in listed if d["trained"]} == set(predictor.artifact.device_names)
    first = {key: value for key, value in listed[0].items() if key != "trained"}
    assert first == known()[0].model_dump(mode="json")


def test_a_listed_device_can_be_sent_back(client: TestClient, ask) -> None:
    device = {k: v for k, v in client.get("/devices").json()["devices"][5].items() if k != "trained"}
    by_figures, by_name = ask(
        [{"program": LINEAR, "device": device}, {"program": LINEAR, "device": device["name"]}], strict=True
    ).json()["results"]
    assert without_ids(by_figures) == without_ids(by_name)


def test_device_with_a_status_is_listed_with_it_and_answered_with_the_reason(client: TestClient, ask) -> None:
    listed = {d["name"]: d for d in client.get("/devices").json()["devices"]}
    assert listed["gfx942-tensile"]["status"] == "stand-in"
    assert listed["h800"]["link"] == "nvlink4-400"
    relabelled = {k: v for k, v in listed["t4"].items() if k != "trained"} | {"name": "t5", "status": "unreleased"}
    body = ask([{"program": LINEAR, "device": device} for device in ("gfx942-tensile", relabelled)], strict=True).json()
    stand_in, unreleased = body["results"]
    assert "stands in for a board" in stand_in["domain_reason"]
    assert "the device is unreleased" in unreleased["domain_reason"]
    assert {stand_in["domain"], unreleased["domain"]} <= {"near", "out"}
    refused = ask([{"program": LINEAR, "device": {**relabelled, "status": "rumoured"}}]).json()["results"][0]["error"]
    assert refused["code"] == "invalid_device"
    assert "'stand-in' or 'unreleased'" in refused["message"]


def test_specifications_that_differ_in_later_figures_share_no_cached_answer(predictor: LatencyPredictor) -> None:
    inline = {**lookup("l4").model_dump(mode="json", exclude={"aliases"}), "name": "own"}
    devices = Devices()
    first, second = (devices.find({**inline, "l2_bandwidth_bytes_per_s": v}, predictor.artifact) for v in (1e12, 2e12))
    assert first.digest == second.digest
    assert first.cache_key != second.cache_key


def test_support_and_models_are_the_predictors(client: TestClient, predictor: LatencyPredictor) -> None:
    assert client.get("/support").json() == predictor.support()
    # A device or operator selects its part of the matrix, as the command line does.
    part = client.get("/support", params={"device": "h100", "operator": "gemm"}).json()
    whole = predictor.support()
    assert part["matrix"] == selected(whole["matrix"], "linear", "h100-sxm") and part["matrix"]["rows"]
    assert {**part, "matrix": whole["matrix"]} == whole
    assert {name for row in part["matrix"]["rows"] for name in row["domain"]} <= {"h100-sxm"}
    for params, status, code in (
        ({"device": "a101"}, 404, "unknown_device"),
        ({"operator": "lstm"}, 422, "unsupported_operator"),
        ({"device": "x" * 1000}, 422, "invalid_request"),
    ):
        refused = client.get("/support", params=params)
        assert (refused.status_code, refused.json()["code"]) == (status, code)
    # The loaded model comes first; other tests of this application adapt it.
    model = client.get("/models").json()["models"][0]
    assert model["model_id"] == predictor.model_id
    assert model["trained_devices"] == list(predictor.artifact.device_names)
    assert model["parameters"] > 0


def test_a_missing_model_ends_the_start_in_one_line(tmp_path: Path) -> None:
    app = create_app(Settings(model=tmp_path / "nothing"))
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    with pytest.raises(ArtifactError):
        anyio.run(app, {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert sent[0]["message"].startswith("cannot start: ")
    assert "\n" not in sent[0]["message"]


def test_settings_from_arguments_environment_and_file(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('max_items = 7\nport = 1\nhost = "0.0.0.0"\n')
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    monkeypatch.setenv("CDMPP_PORT", "2")
    monkeypatch.setenv("CDMPP_HOST", "::1")
    monkeypatch.setenv("CDMPP_PUBLIC_DATA", "elsewhere")  # another part's variable is none of ours
    chosen = Settings(host="127.0.0.2")
    assert (chosen.max_items, chosen.port, chosen.host) == (7, 2, "127.0.0.2")


@pytest.mark.parametrize("fields", [{"port": 70_000}, {"max_items": 0}, {"prot": 1}, {"max_body_bytes": 1}])
def test_impossible_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings(**fields)


def test_the_command_names_a_wrong_setting(capsys, monkeypatch, tmp_path: Path) -> None:
    assert main(["--port", "70000"]) == 2
    assert "port" in capsys.readouterr().err
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "missing.toml"))
    assert main([]) == 2
    assert "missing.toml" in capsys.readouterr().err


def test_the_cache_of_programs_keeps_its_bound() -> None:
    def ask(rows: int, backend: Any = None) -> ResolvedProgram:
        fields = {"operator": "relu", "rows": rows, "cols": 1}
        return programs.known(exact_key(fields), backend) or programs.operator(fields, exact_key(fields), backend)

    programs = Programs(max_bytes=60_000)
    responses = [ask(n) for n in range(1, 40)]
    assert 0 < len(programs) < 30
    assert ask(39) is responses[-1]
    assert programs.hashed(responses[-1].hash) is responses[-1]
    assert programs.hashed(responses[0].hash) is None
    assert ask(1).program == responses[0].program
    assert ask(39, "tvm").backend == "tvm"
    hashed = programs.hashed(responses[-1].hash)
    assert hashed is not None and hashed.backend == "library"
    programs = Programs(max_bytes=0)
    assert ask(1).program == responses[0].program
    assert len(programs) == 0


def test_exact_key_separates_values_that_compare_equal() -> None:
    sent = [{"m": 1}, {"m": 1.0}, {"m": True}, {"m": "1"}, {"m": 2**70}, {"m": 0.0}, {"m": -0.0}, {"n": 1}, {}]
    assert len({exact_key(value) for value in sent}) == len(sent)
    name = "".join(["operator", "_" * 3])  # not the interned one
    assert exact_key({name: "x"}) == exact_key({"operator___": "x"})
    assert len(exact_key({"tvm_json": "x" * 10_000})) == 32


def test_nothing_happens_at_import() -> None:
    assert not any(isinstance(value, FastAPI) for value in vars(cdmpp_server.app).values())


def test_a_wrong_model_folder_is_one_error_without_a_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--model", str(tmp_path / "nope"), "--port", "0"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and "is not a model folder" in error and hint.startswith("hint: ")
