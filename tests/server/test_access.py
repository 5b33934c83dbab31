"""API keys and rate limits: refusals, and storage of hashes only."""

import hmac
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from cdmpp.plan.registry import PLANNERS
from cdmpp_server.app import create_app
from cdmpp_server.operate.access import Keys, Rates, hash_key, new_key, sender_of
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings
from tests.server.conftest import BODY, problem, service
from tests.waiting import run_python

USER, USER_HASH = new_key()
ADMIN, ADMIN_HASH = new_key()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    keys = {"api_key_hashes": {"scheduler": USER_HASH}, "admin_key_hashes": [ADMIN_HASH]}
    with service(**keys, open_metrics=False) as client:
        yield client


def test_missing_or_unknown_key_is_refused(client: TestClient) -> None:
    for headers in ({}, bearer("wrong"), bearer(USER_HASH), {"authorization": f"Basic {USER}"}, bearer("")):
        for refused in (
            client.post("/predict", json=BODY, headers=headers),
            client.get("/models", headers=headers),
            client.get("/metrics", headers=headers),
            client.get("/nope", headers=headers),
        ):
            problem(refused, 401, "unauthorized")
            assert refused.headers["www-authenticate"].startswith("Bearer")


def test_every_known_key_is_accepted(client: TestClient) -> None:
    for key in (USER, ADMIN):
        assert client.post("/predict", json=BODY, headers=bearer(key)).status_code == 200
    assert client.get("/metrics", headers={"authorization": f"bearer {USER}"}).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/openapi.json", "/"])
def test_open_paths_need_no_key(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200


def test_schema_requires_a_key(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    predict = document["paths"]["/predict"]["post"]
    assert predict["security"] == [{"key": []}] and "401" in predict["responses"]
    assert "security" not in document["paths"]["/healthz"]["get"]


def test_default_schema_has_no_keys() -> None:
    document = create_app(Settings()).openapi()
    text = json.dumps(document)
    assert "securitySchemes" not in text and '"401"' not in text
    # Plans have a quota of jobs, which needs no setting.
    refusing = {path for path, methods in document["paths"].items() if "429" in json.dumps(methods)}
    assert refusing == {spec.path for spec in PLANNERS.values()}


def test_all_hashes_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    keys = Keys({"a": USER_HASH, "b": hash_key("b")}, {"c": ADMIN_HASH})
    genuine = hmac.compare_digest

    def compare(sent: str, known: str) -> bool:
        seen.append((sent, known))
        return genuine(sent, known)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert keys.find(f"Bearer {USER}") == ("a", False)
    assert len(seen) == 3
    assert keys.find("Bearer nothing") == (None, False)
    assert len(seen) == 6
    assert keys.find(f"Bearer {ADMIN}") == ("c", True)


def test_key_of_user_and_administrator_is_administrator() -> None:
    assert Keys({"a": ADMIN_HASH}, {"c": ADMIN_HASH}).find(f"Bearer {ADMIN}")[1]
    assert not Keys({}, {"c": ADMIN_HASH}).required


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer  ", "Bearer \udcff", "Bearer " + "x" * 10_000])
def test_malformed_headers_are_not_keys(header: str) -> None:
    assert Keys({"a": USER_HASH}, {}).find(header) == (None, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key_hashes": [USER]},
        {"api_key_hashes": {"bad name": USER_HASH}},
        {"admin_key_hashes": "x"},
        {"requests_per_s": 0},
        {"database": "mysql://user:secret@host/db"},
    ],
)
def test_invalid_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings(**fields)


def test_keys_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDMPP_API_KEY_HASHES", json.dumps({"scheduler": USER_HASH}))
    monkeypatch.setenv("CDMPP_ADMIN_KEY_HASHES", json.dumps([ADMIN_HASH]))
    chosen = Settings()
    assert chosen.api_key_hashes == {"scheduler": USER_HASH}
    assert chosen.admin_key_hashes == {ADMIN_HASH[:8]: ADMIN_HASH}


def test_hash_key_prints_a_key_and_its_hash() -> None:
    done = run_python("-m", "cdmpp_server", "hash-key")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert hash_key(lines["key"].strip()) == lines["hash"].strip()
    assert len(lines["key"].strip()) > 40


def limited(requests_per_s: float | None, items_per_s: float | None) -> tuple[Rates, SimpleNamespace]:
    """Rates by a clock whose time ``now`` the test sets."""
    clock = SimpleNamespace(now=100.0)
    return Rates(requests_per_s, items_per_s, clock=lambda: clock.now), clock


def refused(rates: Rates, sender: str) -> int:
    with pytest.raises(ProblemError) as error:
        rates.take(sender)
    assert error.value.status == 429
    return int(error.value.headers["retry-after"])


def test_requests_are_limited_per_sender() -> None:
    rates, clock = limited(2.0, None)
    rates.take("a")
    rates.take("a")
    assert refused(rates, "a") == 1
    rates.take("b")
    clock.now += 0.5
    rates.take("a")
    refused(rates, "a")
    clock.now += 1000
    rates.take("a")
    rates.take("a")
    refused(rates, "a")


def test_rate_below_one_still_allows_one_request() -> None:
    rates, clock = limited(0.1, None)
    rates.take("a")
    assert refused(rates, "a") == 10
    clock.now += 10
    rates.take("a")


def test_item_balance_may_be_negative_and_recovers() -> None:
    rates, clock = limited(None, 100.0)
    rates.take("a")
    rates.charge("a", 1100)
    assert refused(rates, "a") == 11  # 1,000 in debt at 100 a second, and one to ask with
    clock.now += 5
    refused(rates, "a")
    clock.now += 6
    rates.take("a")
    rates.charge("b", 5)
    rates.take("b")


def test_number_of_senders_is_bounded() -> None:
    rates = Rates(1.0, None, most=50)
    for i in range(1000):
        rates.take(f"sender {i}")
    assert len(rates) == 50
    refused(rates, "sender 999")


def test_no_limit_by_default() -> None:
    assert not Rates(None, None)
    assert Rates(1.0, None) and Rates(None, 1.0)


def test_sender_is_key_address_or_network() -> None:
    assert sender_of("scheduler", "10.0.0.1") == "key scheduler"
    assert sender_of(None, "10.0.0.1") == "10.0.0.1"
    assert sender_of(None, "2001:db8::1") == sender_of(None, "2001:db8::ffff") != sender_of(None, "2001:db9::1")
    assert sender_of(None, None) == sender_of(None, "testclient") == "unknown"


def test_rate_limits_apply_over_http() -> None:
    with service(items_per_s=1.0, requests_per_s=1000) as client:
        assert client.post("/predict", json={"items": BODY["items"] * 50}).status_code == 200
        refused = client.post("/predict", json=BODY)
        problem(refused, 429, "rate_limited")
        assert 40 <= int(refused.headers["retry-after"]) <= 50
        assert client.get("/healthz").status_code == 200
        assert "429" in client.get("/openapi.json").json()["paths"]["/predict"]["post"]["responses"]
