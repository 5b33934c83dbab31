"""Limits of connections: number, bytes and time of headers, descriptors; on a service and with a fake clock."""

import http.client
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving.process import Served, running
from cdmpp_server.operate import protocol
from cdmpp_server.operate.protocol import LAST, OVER_S, SAY_AGAIN_S, BoundedProtocol, Connections, descriptor_limit
from tests.server import conftest
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

MOST = 4
HEADER_BYTES = 4096
BODY = json.dumps(conftest.BODY).encode()
GET = b"GET /models HTTP/1.1\r\nHost: localhost\r\n"
PREDICT = (
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    % (len(BODY), BODY)
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("connections") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Served]:
    limits = {
        "CDMPP_MAX_CONNECTIONS": str(MOST),
        "CDMPP_MAX_HEADER_BYTES": str(HEADER_BYTES),
        "CDMPP_HEADER_TIMEOUT_S": "2",
        "CDMPP_LOG_FORMAT": "json",
    }
    with running(environment=limits, ready_s=PATIENCE_S, log=log) as served:
        yield served


def connect(server: Served, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    connection.sendall(sent)
    return connection


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next response."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def metric(server: Served, name: str) -> float:
    status, text = server.ask("GET", "/metrics")
    assert status == 200
    match = re.search(rf"^{re.escape(name)} (\S+)$", text.decode() if isinstance(text, bytes) else text, re.M)
    return float(match[1]) if match else 0.0


def test_connection_beyond_the_limit_gets_503_with_retry_after(server: Served) -> None:
    with ExitStack() as stack:
        # Requests in progress hold their connections: their bodies have not arrived.
        held = [stack.enter_context(connect(server, PREDICT[:-1])) for _ in range(MOST)]
        wait_until(lambda: metric(server, "cdmpp_connections") >= MOST, "arrival of the connections")
        for _ in range(20):
            with connect(server, PREDICT) as further:
                status, headers, body = answer(further)
                assert (status, headers["retry-after"], json.loads(body)["code"]) == (503, "1", "overloaded")
                further.sendall(PREDICT)
                assert answer(further)[0] == 503
        # One that sends nothing, or no whole header, gets the same answer.
        for sent in (b"", PREDICT[:20]):
            with connect(server, sent) as silent:
                status, headers, _ = answer(silent)
                assert (status, headers["retry-after"]) == (503, "1")
                assert silent.recv(1) == b""
        # Monitoring works all the while.
        assert server.ask("GET", "/healthz")[0] == 200
        assert metric(server, 'cdmpp_connections_refused_total{reason="limit"}') >= 40
        for connection in held:
            connection.sendall(PREDICT[-1:])
            assert answer(connection)[0] == 200
    wait_until(lambda: metric(server, "cdmpp_connections") <= MOST, "end of the connections")
    with connect(server, PREDICT) as again:
        assert answer(again)[0] == 200


def test_a_refused_connection_is_served_once_there_is_room(server: Served) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(connect(server, PREDICT[:-1])) for _ in range(MOST)]
        wait_until(lambda: metric(server, "cdmpp_connections") >= MOST, "arrival of the connections")
        with connect(server, PREDICT) as further:
            assert answer(further)[0] == 503
            held[0].sendall(PREDICT[-1:])
            assert answer(held[0])[0] == 200
            held[0].close()
            statuses = []

            def served() -> bool:
                with connect(server, PREDICT) as other:
                    statuses.append(answer(other)[0])
                return statuses[-1] == 200

            wait_until(served, "room for a connection")
            assert set(statuses) <= {200, 503}


def test_a_header_without_end_is_refused(server: Served) -> None:
    for line in (b"X-Filler: " + b"x" * 1000 + b"\r\n", b"x" * 1000):
        # The service stops reading long before a megabyte was accepted.
        with connect(server, GET + b"X-Long: ") as connection, pytest.raises(OSError):
            for _ in range(100_000):
                connection.sendall(line)
    with connect(server, GET + b"X: " + b"x" * HEADER_BYTES + b"\r\n\r\n") as connection:
        status, _, body = answer(connection)
        assert (status, json.loads(body)["code"]) == (431, "headers_too_large")
    assert metric(server, 'cdmpp_connections_refused_total{reason="header_bytes"}') >= 3


def test_bytes_after_a_body_are_bounded(server: Served) -> None:
    sent = PREDICT.split(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: "
    with connect(server, sent) as connection, pytest.raises(OSError):
        for _ in range(100_000):
            connection.sendall(b"x" * 1000)


def test_idle_connections_and_slow_headers_are_ended(server: Served) -> None:
    with connect(server) as idle, connect(server, GET + b"X: ") as slow, connect(server, PREDICT) as used:
        assert answer(used)[0] == 200
        assert idle.recv(1) == b""
        status, _, body = answer(slow)
        assert (status, json.loads(body)["code"]) == (408, "header_timeout")
        assert used.recv(1) == b""
    assert metric(server, 'cdmpp_connections_refused_total{reason="header_time"}') >= 1


def test_another_protocol_is_answered_as_http(server: Served) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n\r\n"
    with connect(server, GET + upgrade) as connection:
        assert answer(connection)[0] == 200


@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit and /proc")
def test_running_out_of_descriptors_is_logged_and_resets_no_connection(server: Served, log: Path) -> None:
    import resource

    highest = max(int(name) for name in os.listdir(f"/proc/{server.process.pid}/fd"))
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (highest + LAST // 2, before[1]))
    try:
        for _ in range(3):
            with connect(server, PREDICT) as connection:
                status, headers, _ = answer(connection)
                assert (status, headers["retry-after"]) == (503, "1")
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)
    (line,) = [line for line in log.read_text().splitlines() if "running out of file descriptors" in line]
    assert json.loads(line)["level"] == "error"
    assert metric(server, 'cdmpp_connections_refused_total{reason="descriptors"}') >= 3
    with connect(server, PREDICT) as connection:
        assert answer(connection)[0] == 200


def test_the_service_raises_its_limit_of_open_files(server: Served) -> None:
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("needs prlimit")
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard


class Transport:
    """The calls of a connection that end it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def is_closing(self) -> bool:
        return bool(self.calls)

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def write(self, data: bytes) -> None:
        self.calls.append(data.split()[1].decode())


BEGUN, COMPLETE = (SimpleNamespace(response_complete=complete) for complete in (False, True))


@pytest.mark.parametrize(
    ("state", "limit_s", "calls"),
    [
        ({}, 10.0, ["close"]),
        ({"_sends": "header"}, 10.0, ["408", "close"]),
        ({"_sends": "header", "cycle": COMPLETE}, 10.0, ["408", "close"]),
        ({"_admitted": False}, OVER_S, ["503", "close"]),
        ({"_admitted": False, "cycle": COMPLETE}, OVER_S, ["close"]),
        ({"_sends": "body", "cycle": COMPLETE}, 60.0, ["close"]),
        ({"_stalled_at": 100.0, "cycle": BEGUN}, 60.0, ["abort"]),
    ],
)
def test_every_state_of_a_connection_has_a_time_limit(
    state: dict[str, Any], limit_s: float, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    limits = Connections(lambda: now)
    monkeypatch.setattr(protocol, "CONNECTIONS", limits)
    connection = BoundedProtocol.__new__(BoundedProtocol)
    transport = Transport()
    idle = {"_sends": "nothing", "_since": 100.0, "_admitted": True, "_last": False, "_stalled_at": None}
    fields = {**idle, "_closing_at": None, "cycle": None, "transport": transport, **state}
    fields["server_state"] = SimpleNamespace(default_headers=[])
    vars(connection).update(fields)
    limits.open.add(connection)
    now = 100.0 + limit_s
    limits.sweep()
    assert transport.calls == []
    now += 0.01
    limits.sweep()
    assert transport.calls == calls
    # A client that does not read keeps no connection that is being closed.
    if calls[-1] == "close":
        now += 1
        limits.sweep()
        now += 10.1
        limits.sweep()
        assert transport.calls == [*calls, "abort"]


def test_a_request_in_progress_has_the_time_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Connections(lambda: 1e9)
    monkeypatch.setattr(protocol, "CONNECTIONS", limits)
    connection = BoundedProtocol.__new__(BoundedProtocol)
    transport = Transport()
    fields = {"_sends": "body", "_since": 0.0, "_admitted": True, "_stalled_at": None, "cycle": BEGUN}
    vars(connection).update({**fields, "transport": transport})
    connection.check(1e9)
    assert transport.calls == []


def test_lack_of_descriptors_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    seconds = 0.0
    limits = Connections(lambda: seconds)
    assert limits.descriptors_left(10) >= LAST and caplog.messages == []
    for second in range(int(2 * SAY_AGAIN_S)):
        seconds = float(second)
        assert limits.descriptors_left(descriptor_limit() - 2) == 1
    assert len(caplog.messages) == 2
