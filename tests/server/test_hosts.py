"""Names under which the service answers, and pages that load nothing from elsewhere."""

import re
import shutil
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from cdmpp.cli.demo import running_server
from cdmpp_server.operate.access import Hosts
from cdmpp_server.page import POLICY
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings
from tests.server.conftest import BODY, problem, service

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A service with the default names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CDMPP_ALLOWED_HOSTS", raising=False)
        client = service()
    client.base_url, client.follow_redirects = "http://localhost:8000", False
    with client:
        yield client


def accepted(hosts: Hosts, *names: str | bytes) -> bool:
    sent = [(b"host", name.encode() if isinstance(name, str) else name) for name in names]
    try:
        hosts.check({"headers": [(b"accept", b"*/*"), *sent]})
    except ProblemError as error:
        assert error.status == 421 and "CDMPP_ALLOWED_HOSTS" in error.problem.hint
        return False
    return True


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]"])
def test_names_of_this_machine_are_accepted(name: str) -> None:
    assert accepted(Hosts(None, "127.0.0.1"), name)


@pytest.mark.parametrize(
    "name",
    (
        *("attacker.example", "localhost.attacker.example", "localhost@attacker.example", "127.0.0.1.nip.example"),
        *("10.0.0.1:8000", "", "localhost:x", "localhost:8000:9", "::1", b"\xff", "[::1", "[localhost]"),
    ),
)
def test_other_names_are_refused(name: str | bytes) -> None:
    hosts = Hosts(None, "127.0.0.1")
    assert not accepted(hosts, name)
    assert not accepted(hosts, "localhost", name)
    assert not accepted(hosts)


def test_the_bound_address_is_accepted() -> None:
    assert accepted(Hosts(None, "10.0.0.7"), "10.0.0.7:8000") and accepted(Hosts(None, "fd00::7"), "[fd00::7]:8000")
    assert accepted(Hosts(None, "gpu1"), "gpu1:8000") and not accepted(Hosts(None, "gpu1"), "gpu2")


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_bound_to_every_address_no_foreign_name_is_accepted(bound: str) -> None:
    """A page can rebind a name, never an address."""
    hosts = Hosts(None, bound)
    assert all(accepted(hosts, name) for name in ("10.0.0.7:8000", "[fd00::7]", "localhost", socket.gethostname()))
    assert not accepted(hosts, "attacker.example") and not accepted(hosts, "10.0.0.7.attacker.example")


def test_names_and_patterns_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDMPP_ALLOWED_HOSTS", "cdmpp.internal, *.example.com,10.0.0.7")
    allowed = Settings().allowed_hosts
    assert allowed == ("cdmpp.internal", "*.example.com", "10.0.0.7")
    hosts = Hosts(allowed, "0.0.0.0")
    assert all(accepted(hosts, name) for name in ("cdmpp.internal:80", "a.example.com", "10.0.0.7"))
    assert not any(accepted(hosts, name) for name in ("example.com", "aexample.com", "localhost", "10.0.0.8"))
    assert accepted(Hosts(("*",), "0.0.0.0"), "anything")
    for wrong in ("http://a", "a:8000", "a b", "", "*a"):
        monkeypatch.setenv("CDMPP_ALLOWED_HOSTS", wrong)
        with pytest.raises(ValidationError):
            Settings()


def test_a_page_that_rebinds_its_name_reads_and_writes_nothing(client: TestClient) -> None:
    foreign = {"host": "attacker.example:8000"}
    for method, path, body in (
        ("POST", "/predict", BODY),
        ("POST", "/observe", {"observations": []}),
        ("GET", "/", None),
        ("GET", "/models", None),
        ("GET", "/models/", None),
        ("GET", "/openapi.json", None),
        ("GET", "/docs", None),
    ):
        refused = client.request(method, path, json=body, headers=foreign)
        problem(refused, 421, "unknown_host")
        assert "location" not in refused.headers
    for path in ("/healthz", "/readyz", "/metrics"):
        assert client.get(path, headers=foreign).status_code == 200
    assert client.post("/predict", json=BODY).status_code == 200


def test_no_slash_is_added_or_removed(client: TestClient) -> None:
    for path in ("/models/", "/predict/", "/docs/"):
        answer = client.get(path)
        problem(answer, 404, "not_found")
        assert "location" not in answer.headers


def test_docs_page_loads_only_local_files_under_the_content_policy(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.status_code == 200 and page.headers["content-security-policy"] == POLICY
    assert client.get("/").headers["content-security-policy"] == POLICY
    assert not re.search(r"//|<script>|style=", page.text.replace("<!doctype html>", ""))
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 4
    for path in loaded:
        answer = client.get(f"/{path}")
        assert answer.status_code == 200 and answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
    problem(client.get("/redoc"), 404, "not_found")
    problem(client.get("/docs/oauth2-redirect"), 404, "not_found")


@pytest.mark.browser
def test_documentation_works_in_a_browser() -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    requested: list[str] = []
    failed: list[Any] = []
    with running_server() as server, playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: failed.append(error))
        page.goto(f"http://127.0.0.1:{server.port}/docs")
        page.wait_for_selector(".opblock")
        assert page.locator(".opblock").count() > 20
        browser.close()
    assert failed == []
    assert {url.split("/")[2] for url in requested} == {f"127.0.0.1:{server.port}"}
