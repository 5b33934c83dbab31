"""The service as a process of its own: schemathesis, hostile bodies, the demonstration."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdmpp.cli import demo
from cdmpp.cli.demo import Server, running_server
from cdmpp.plan.registry import PLANNERS
from tests.server.conftest import BODY, LINEAR, without_ids
from tests.waiting import PATIENCE_S, PATIENT, ROOT, is_running, run_python, wait_until

pytestmark = pytest.mark.slow

HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(environment={**PATIENT, "CDMPP_WARM_PLANS": "true"}) as server:
        server.request("GET", "/openapi.json")  # made at the first request, for which schemathesis waits 10 s
        yield server


#: Of the coverage phase /predict alone has 3,000 requests, most with the operators of those of /curve and /observe.
CONFIG = """
[[operations]]
include-path = "/predict"
phases.coverage.enabled = false
generation.max-examples = 60
"""
PLANS = "^(" + "|".join(["/plans", "/jobs.*", *(re.escape(kind.path) for kind in PLANNERS.values())]) + ")$"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        # All links are between the operations of plans and jobs.
        (f"--exclude-path-regex={PLANS}", "--phases=examples,coverage,fuzzing"),
        # DELETE cancels a job, whose best answer can still be read.
        (f"--include-path-regex={PLANS}", "--phases=examples,fuzzing,stateful", "--exclude-checks=use_after_free"),
    ],
    ids=["predictions", "plans"],
)
def test_schemathesis_finds_nothing(server: Server, tmp_path: Path, options: tuple[str, ...]) -> None:
    """All of its checks at their defaults: the published schema is exact."""
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    command = ("-m", "schemathesis.cli", f"--config-file={config}", "run")
    # Response times are measured by benchmarks, not here.
    limits = ("--request-timeout=600", "--max-response-time=600", "--max-examples=5", "--seed=1")
    address = f"http://127.0.0.1:{server.port}/openapi.json"
    done = run_python(*command, address, "--checks=all", *limits, "--no-color", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    # It may still warn, as of model names that it cannot guess.
    assert re.search(r"(\d{2,}) generated, \1 passed", done.stdout), done.stdout[-3000:]


def test_a_huge_body_is_refused_while_it_arrives(server: Server) -> None:
    for framing, chunk in (
        (b"Transfer-Encoding: chunked", b"10000\r\n" + b" " * 65536 + b"\r\n"),
        (b"Content-Length: 2147483648", b" " * 65536),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            connection.sendall(HEAD + framing + b"\r\n\r\n")
            # A little over the limit of 16 MiB: the answer comes long before the 2 GiB have.
            for _ in range(264):
                connection.sendall(chunk)
            answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"application/problem+json" in answer
    assert server.request("GET", "/healthz") == {"status": "ok"}


def test_a_length_that_lies_harms_nobody(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(HEAD + b"Content-Length: 10\r\n\r\n" + json.dumps(BODY).encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    # More is promised than sent: the service waits, others are answered.
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(HEAD + b"Content-Length: 99\r\n\r\n{}")
        assert server.request("GET", "/healthz") == {"status": "ok"}


def test_repeated_request_is_answered_from_the_cache(server: Server) -> None:
    items = [{"program": {**LINEAR, "m": m}, "device": "t4"} for m in range(1, 257)]

    def computed_rows() -> float:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return next(float(line.split()[1]) for line in lines if line.startswith("cdmpp_batch_rows_sum"))

    def predictions() -> list[dict[str, Any]]:
        return without_ids(*server.request("POST", "/predict", {"items": items})["results"])

    first = predictions()
    rows = computed_rows()
    assert rows >= len(items) and all("latency_s" in result for result in first)
    assert predictions() == first
    assert computed_rows() == rows


#: Matrix products while processes are started, as the service does.
MULTIPLY = textwrap.dedent("""
    import cdmpp_server
    import asyncio, threading
    import numpy, uvloop

    stop = threading.Event()

    def multiply():
        rows, centres = numpy.ones((256, 12)), numpy.ones((12, 1024))
        while not stop.is_set():
            rows @ centres

    async def start_processes():
        for _ in range(30):
            process = await asyncio.create_subprocess_exec("true")
            await process.wait()

    thread = threading.Thread(target=multiply)
    thread.start()
    uvloop.run(start_processes())
    stop.set()
    thread.join()
    print("ended")
    """)


def test_matrix_product_ends_while_processes_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvloop", reason="needs uvloop, which the service uses where it exists")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    done = run_python("-c", MULTIPLY)
    assert done.stdout == "ended\n", done.stderr


@pytest.fixture
def demonstration(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstration asks this module's server."""
    monkeypatch.setattr(demo, "running_server", lambda **_: contextlib.nullcontext(server))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own handler


def test_demonstration_prints_the_screen_of_the_readme(demonstration: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    screen = capsys.readouterr().out.strip()
    assert len(screen.splitlines()) <= 40 and max(map(len, screen.splitlines())) <= 100
    [shown] = re.findall(r"```\n(model .*?)\n```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    number = re.compile(r"\d+\.\d+")
    assert number.sub("#", screen) == number.sub("#", shown), "replace the screen in README.md by what make demo prints"
    printed, written = (list(map(float, number.findall(text))) for text in (screen, shown))
    assert printed == pytest.approx(written, rel=0.02)


def test_verbose_demonstration_prints_every_program(demonstration: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(verbose=True) == 0
    figure = r"[\d.]+ (?:ns|µs|ms|s)"
    line = re.compile(rf"^(\S+)  +(\d+)  +(\S+)  +{figure} \[{figure}, {figure}\]  +(in|near|out)$", re.M)
    rows = line.findall(capsys.readouterr().out)
    assert len(rows) == (7 + 23) * len(demo.DEVICES)
    assert {device for _, _, device, _ in rows} == set(demo.DEVICES)


def test_a_terminated_demonstration_takes_its_server_along() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "cdmpp.cli.demo"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as demo:
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
        if not children.parent.exists():
            demo.kill()
            pytest.skip("needs /proc to see processes")
        wait_until(lambda: children.read_text().split(), "the start of the server")
        server_pid = int(children.read_text().split()[0])
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(PATIENCE_S) == 143
        assert not is_running(server_pid)


def test_demonstration_reports_the_error(
    demonstration: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "ROOT", ROOT / "tests")
    assert demo.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "transformer_block.onnx" in error


def test_demonstration_names_what_could_not_be_predicted() -> None:
    failed = {"device": "t4", "error": {"code": "c", "message": "too odd", "hint": ""}}
    program = {"name": "relu", "count": 1, "answers": [failed]}
    answer = {"programs": [program], "unsupported": [{"operator": "Einsum", "count": 2, "reason": "no such operator"}]}
    assert demo.programs("model", answer).rows == [
        ("relu", "1", "t4", "not predicted: too odd", "-"),
        ("Einsum", "2", "-", "not predicted: no such operator", "-"),
    ]
