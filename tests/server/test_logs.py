"""Log: one line per request with its id, and one format for all records."""

import json
import logging
import logging.config
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from benchmarks.serving.process import free_port
from cdmpp_server.app import create_app
from cdmpp_server.operate.access import new_key
from cdmpp_server.operate.logs import JsonFormatter, TextFormatter, log_config, request_id, request_log
from cdmpp_server.settings import Settings
from tests.server.conftest import ITEM, JSON, problem, service
from tests.waiting import PATIENCE_S, ROOT


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """The request records of the log as JSON objects, in order."""
    out: list[dict[str, Any]] = []
    handler = logging.Handler()
    handler.emit = lambda record: out.append(json.loads(JsonFormatter().format(record)))
    logger = logging.getLogger("cdmpp_server")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield out
    logger.setLevel(before)
    logger.removeHandler(handler)


def test_one_log_line_per_request(client: TestClient, lines: list[dict[str, Any]]) -> None:
    response = client.post("/predict", json={"items": [ITEM] * 3}, headers={"x-request-id": "my-id.1_2"})
    (line,) = lines
    assert response.headers["x-request-id"] == line["request_id"] == "my-id.1_2"
    assert (line["method"], line["route"], line["status"], line["items"]) == ("POST", "/predict", 200, 3)
    assert 0 < line["duration_s"] < 60
    assert line["level"] == "info" and re.match(r"\d{4}-\d\d-\d\dT", line["time"])
    assert "code" not in line and "key" not in line


def test_refusal_logs_its_code_and_the_route(client: TestClient, lines: list[dict[str, Any]]) -> None:
    client.post("/predict", content=b"{", headers=JSON)
    client.get("/no/such/path?secret=1")
    client.get("/predict")
    assert [(x["route"], x["status"], x["code"]) for x in lines] == [
        ("/predict", 400, "malformed_json"),
        ("none", 404, "not_found"),
        ("/predict", 405, "method_not_allowed"),
    ]
    assert "secret" not in json.dumps(lines)


def test_probes_are_not_logged(client: TestClient, lines: list[dict[str, Any]]) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert client.get(path).headers["x-request-id"]
    assert lines == []


@pytest.mark.parametrize("sent", [b"", b"a b", b"x" * 129, "ü".encode(), b"a\tb", b"{}"])
def test_invalid_request_id_is_replaced(client: TestClient, sent: bytes) -> None:
    assert re.fullmatch("[0-9a-f]{32}", client.get("/healthz", headers={"x-request-id": sent}).headers["x-request-id"])


def test_bug_has_an_id_and_a_log_line(lines: list[dict[str, Any]]) -> None:
    app: FastAPI = create_app(Settings())

    @app.get("/broken")
    async def broken() -> None:
        logging.getLogger("cdmpp_server.test").info("inside")
        raise RuntimeError("secret detail")

    response = TestClient(app, raise_server_exceptions=False).get("/broken", headers={"x-request-id": "q"})
    problem(response, 500, "internal_error")
    assert response.headers["x-request-id"] == "q" and "secret" not in response.text
    inside, line = lines
    assert inside["message"] == "inside" and inside["request_id"] == "q"
    assert (line["status"], line["code"]) == (500, "internal_error")


def test_log_has_the_name_of_the_key_only(lines: list[dict[str, Any]]) -> None:
    key, hash = new_key()
    with service(api_key_hashes={"scheduler": hash}) as client:
        client.get("/devices", headers={"authorization": f"Bearer {key}"})
    (line,) = [line for line in lines if line.get("route") == "/devices"]
    assert line["key"] == "scheduler"
    assert key not in json.dumps(lines) and hash not in json.dumps(lines)


def test_client_text_cannot_break_a_log_line() -> None:
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "a\n{%s}\u2028", ("b\r\n\ud800",), None)
    text = JsonFormatter().format(record)
    assert len(text.splitlines()) == 1
    assert json.loads(text)["message"] == "a\n{b\r\n\ud800}\u2028"


def test_traceback_is_one_line_of_json() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    text = JsonFormatter().format(record)
    assert "\n" not in text and "ValueError: why" in json.loads(text)["traceback"]


def test_text_format_has_the_request_id() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "something", (), None)
    token = request_id.set("abc")
    try:
        assert TextFormatter().format(record).endswith("INFO something (request abc)")
    finally:
        request_id.reset(token)


@pytest.mark.parametrize(("terminal", "expected"), [(True, TextFormatter), (False, JsonFormatter)])
def test_auto_format_is_text_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, expected: type
) -> None:
    out = StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", out)
    assert log_config("auto")["formatters"]["line"]["()"] is expected
    assert log_config("json")["formatters"]["line"]["()"] is JsonFormatter
    assert log_config("text")["formatters"]["line"]["()"] is TextFormatter


@pytest.mark.slow
def test_service_process_logs_json_to_stderr(tmp_path: Path) -> None:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "cdmpp_server", "--port", str(port)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "CDMPP_LOG_FORMAT": "json"},
    ) as process:
        try:
            assert process.stderr is not None and process.stdout is not None
            seen = []
            while not seen or "running on" not in seen[-1]:
                seen.append(process.stderr.readline())
                assert seen[-1], "".join(seen)
            httpx2.get(f"http://127.0.0.1:{port}/devices", headers={"x-request-id": "from-here"})
        finally:
            process.send_signal(signal.SIGTERM)
            seen += process.stderr.read().splitlines()
        assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
        assert process.stdout.read() == ""
    parsed = [json.loads(line) for line in seen]
    (request,) = [line for line in parsed if line["logger"] == request_log.name]
    assert (request["request_id"], request["route"], request["status"]) == ("from-here", "/devices", 200)
    assert not [line for line in parsed if line["logger"] == "uvicorn.access"]
