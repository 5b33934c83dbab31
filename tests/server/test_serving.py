"""Before a service serves: misspelled settings, its address, its warnings, whom it believes."""

import re
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from cdmpp.cli.demo import running_server
from cdmpp_server.operate.access import new_key
from cdmpp_server.serving import ListenError, listen, warnings
from cdmpp_server.settings import FILE_VARIABLE, OTHERS, PREFIX, Settings, check_names
from tests.waiting import PATIENCE_S, PATIENT, ROOT, run_python

pytestmark = pytest.mark.slow

_, HASH = new_key()


@pytest.fixture(autouse=True)
def _enough_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warnings of this file are not about the limit of open files of this machine."""
    monkeypatch.setattr("cdmpp_server.operate.protocol.descriptor_limit", lambda: 10_000)


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The service with further variables, which must end by itself."""
    return run_python("-m", "cdmpp_server", "--port", "0", *arguments, **environment)


def test_misspelled_setting_stops_the_start() -> None:
    done = started(CDMPP_API_KEY_HASHS=f'{{"scheduler": "{HASH}"}}')
    assert done.returncode == 2
    assert done.stderr == (
        "error: settings: the environment variable CDMPP_API_KEY_HASHS is no setting: "
        "did you mean CDMPP_API_KEY_HASHES?\n"
    )


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("CDMPP_DEADLINE", "CDMPP_DEADLINE_S"),
        ("cdmpp_api_keys_hashes", "CDMPP_API_KEY_HASHES"),
        ("CDMPP_ADMIN_KEY_HASH", "CDMPP_ADMIN_KEY_HASHES"),
        ("CDMPP_SETTINGS", "CDMPP_SETTINGS_FILE"),
        ("CDMPP_DATABASE_URL", "CDMPP_DATABASE"),
        ("CDMPP_PUBLIC_DATUM", "CDMPP_PUBLIC_DATA"),
    ],
)
def test_message_names_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is no setting: did you mean {nearest}\?"):
        check_names({name: "x", "PATH": "/bin", "XCDMPP_A": ""}, Settings.model_fields)


def test_message_contains_no_value() -> None:
    with pytest.raises(ValueError, match=r"docs/server\.md") as caught:
        check_names({"CDMPP_ZZZZZZZZ": "secret"}, Settings.model_fields)
    assert "secret" not in str(caught.value)


def test_every_variable_that_the_product_reads_is_known() -> None:
    """So that no service refuses to start because of a variable of another part."""
    sources = [path.read_text(encoding="utf-8") for part in ("cdmpp", "server") for path in (ROOT / part).rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"""["'`](CDMPP_[A-Z_]*[A-Z])["'`]""", text)}
    assert {"CDMPP_CACHE", "CDMPP_DEBUG", "CDMPP_PUBLIC_DATA", "CDMPP_WORKERS_FOLDER", FILE_VARIABLE} <= read
    check_names(dict.fromkeys(read, ""), Settings.model_fields)
    assert set(OTHERS) <= read
    check_names({PREFIX + name.upper(): "" for name in Settings.model_fields}, Settings.model_fields)


KUBERNETES = {
    "CDMPP_SERVICE_HOST": "10.0.0.1",
    "CDMPP_SERVICE_PORT": "8000",
    "CDMPP_SERVICE_PORT_HTTP": "8000",
    "CDMPP_PORT": "tcp://10.0.0.1:8000",
    "CDMPP_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "CDMPP_PORT_8000_TCP_ADDR": "10.0.0.1",
    "CDMPP_POSTGRES_SERVICE_HOST": "10.0.0.2",
    "CDMPP_POSTGRES_PORT": "tcp://10.0.0.2:5432",
    "CDMPP_POSTGRES_PORT_5432_TCP_PROTO": "tcp",
}


def test_variables_of_kubernetes_are_ignored_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KUBERNETES.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.port == 8000
    (line,) = warnings(settings)
    assert all(name in line for name in KUBERNETES)
    monkeypatch.setenv("CDMPP_PORT", "8001")
    assert Settings().port == 8001


def test_an_unknown_name_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('api_key_hash = ["x"]\n')
    done = started(CDMPP_SETTINGS_FILE=str(file))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: settings: {file}: the name api_key_hash is no setting: did you mean api_key_hashes?\n"
    )


def test_public_service_without_keys_logs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(warnings(Settings())) == list(warnings(Settings(host="::1"))) == []
    assert list(warnings(Settings(host="0.0.0.0", api_key_hashes=[HASH]))) == []
    for host in ("0.0.0.0", "::", "10.0.0.7", "gpu1"):
        (line,) = warnings(Settings(host=host))
        assert "CDMPP_API_KEY_HASHES" in line and host in line


def test_reduced_connection_limit_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdmpp_server.operate.protocol.descriptor_limit", lambda: 1024)
    (line,) = warnings(Settings())
    assert "at most 768 connections instead of 2000" in line
    assert list(warnings(Settings(max_connections=700))) == []


def test_reasons_for_which_an_address_cannot_be_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ListenError, match="in use by another"):
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ListenError, match="no address of this machine"):
        listen("192.0.2.1", 0)
    with pytest.raises(ListenError, match=r"cannot listen on 'no\.such\.host\.invalid'"):
        listen("no.such.host.invalid", 0)


def test_all_addresses_of_a_name_share_a_port() -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(listener) for listener in listen("localhost", 0)]
        assert len({listener.getsockname()[1] for listener in sockets}) == 1
        assert sockets[0].getsockname()[0] in ("127.0.0.1", "::1")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_port_in_use_is_reported_in_one_line(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = started("--workers", workers, "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: port {port} of 127.0.0.1 is in use") and done.stderr.count("\n") == 1


def refused_by_rate(port: int, forwarded: str) -> bool:
    """Whether a request that names a forwarded address is refused because of its rate."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        lines = ("GET /models HTTP/1.1", "Host: localhost", f"X-Forwarded-For: {forwarded}", "Connection: close")
        connection.sendall("\r\n".join((*lines, "", "")).encode())
        answer = connection.makefile("rb").readline()
    assert answer.split()[1] in (b"200", b"429")
    return answer.split()[1] == b"429"


def test_forwarded_addresses_are_trusted_only_from_listed_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = {**PATIENT, "CDMPP_REQUESTS_PER_S": "0.001"}
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    with running_server(environment=rate) as server:
        first = [refused_by_rate(server.port, f"10.0.0.{i}") for i in range(3)]
        assert first == [False, True, True]
    with running_server(environment={**rate, "FORWARDED_ALLOW_IPS": "127.0.0.1"}) as server:
        assert [refused_by_rate(server.port, f"10.0.0.{i}") for i in (1, 2, 2)] == [False, False, True]
