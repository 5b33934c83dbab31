"""Places of one sender: jobs, adapted models, observations and rows of running errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, func, select, text

from cdmpp_server.app import create_app
from cdmpp_server.database import database_url
from cdmpp_server.observe import store as records
from cdmpp_server.observe.store import Observation, ObservationStore
from cdmpp_server.observe.tables import observations
from cdmpp_server.operate.access import new_key
from cdmpp_server.settings import Settings
from tests.server.conftest import LINEAR, problem
from tests.server.test_jobs import job_store
from tests.server.test_store import observation

pytestmark = pytest.mark.slow

KEYS = {name: new_key() for name in ("first", "second")}
SEARCH: dict[str, Any] = {
    "models": [{"stages": 2, "micro_batches": 2, "forward_s": 1, "backward_s": 2}],
    "ranks": 2,
    "budget_s": 600,
}
DEVICE = "l4"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """A service with two keys that runs no jobs."""
    settings = Settings(
        model=None,
        database=str(tmp_path / "s.sqlite"),
        api_key_hashes={name: hash for name, (_, hash) in KEYS.items()},
        adapted_dir=tmp_path / "adapted",
        max_adapted=4,
        job_workers=0,
        max_jobs=8,
        warm_plans=False,
    )
    with TestClient(create_app(settings)) as client:
        yield client


def post(client: TestClient, sender: str, path: str, **body: Any) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEYS[sender][0]}"}
    return client.post(path, content=json.dumps(body), headers=headers)


def test_one_key_cannot_take_all_places_of_jobs(client: TestClient) -> None:
    taken = [post(client, "first", "/pipeline/search", **SEARCH) for _ in range(2)]
    assert [response.status_code for response in taken] == [202, 202]
    refused = post(client, "first", "/pipeline/search", **SEARCH)
    assert problem(refused, 429, "quota_exceeded")["detail"].startswith("2 jobs of this sender")
    assert refused.headers["retry-after"] == "10"
    assert post(client, "second", "/pipeline/search", **SEARCH).status_code == 202
    # A removed job gives its place back.
    headers = {"authorization": f"Bearer {KEYS['first'][0]}"}
    assert client.delete(f"/jobs/{taken[0].json()['job_id']}", headers=headers).status_code == 204
    assert post(client, "first", "/pipeline/search", **SEARCH).status_code == 202


def test_list_of_jobs_has_only_those_of_the_sender(client: TestClient) -> None:
    def listed(sender: str, query: str = "") -> Any:
        return client.get(f"/jobs{query}", headers={"authorization": f"Bearer {KEYS[sender][0]}"})

    assert listed("second").json() == {"jobs": []}
    ids = [
        post(client, sender, "/pipeline/search", **SEARCH).json()["job_id"] for sender in ("first", "second", "first")
    ]
    newest, oldest = listed("first").json()["jobs"]
    assert [newest["job_id"], oldest["job_id"]] == [ids[2], ids[0]]
    assert [job["job_id"] for job in listed("second").json()["jobs"]] == [ids[1]]
    assert listed("first", "?limit=1").json() == {"jobs": [newest]}
    # A list entry equals the job without its answer. Another sender that has the id may read the job.
    job = client.get(f"/jobs/{ids[2]}", headers={"authorization": f"Bearer {KEYS['second'][0]}"}).json()
    assert job == {**newest, "answer": None, "error": None} and newest["state"] == "queued"
    assert problem(listed("first", "?limit=1001"), 422, "invalid_request")["errors"][0]["path"] == "limit"
    problem(client.get("/jobs"), 401, "unauthorized")


def adapt(client: TestClient, sender: str, by: float) -> str:
    programs = [{**LINEAR, "k": k} for k in (256, 512, 1024)]
    items = [{"program": program, "device": DEVICE} for program in programs]
    results = post(client, sender, "/predict", items=items).json()["results"]
    records = [{"program": p, "latency_s": by * r["latency_s"]} for p, r in zip(programs, results, strict=True)]
    response = post(client, sender, "/adapt", device=DEVICE, records=records)
    assert response.status_code == 200, response.text
    name: str = response.json()["adapted_model"]
    return name


def is_known(client: TestClient, sender: str, model: str) -> bool:
    items = [{"program": LINEAR, "device": DEVICE}]
    return bool(post(client, sender, "/predict", items=items, model=model).status_code == 200)


def test_adapted_models_of_one_key_do_not_evict_those_of_another(client: TestClient) -> None:
    own = adapt(client, "first", 1.5)
    others = [adapt(client, "second", 2.0 + by / 10) for by in range(8)]
    assert len({own, *others}) == 9
    assert is_known(client, "first", own)
    assert [is_known(client, "second", name) for name in others] == [False] * 5 + [True] * 3
    # Whoever knows the id may use the model.
    assert is_known(client, "second", own)
    # The same on disk.
    with TestClient(create_app(client.app.state.settings)) as again:
        assert [is_known(again, "first", name) for name in (own, others[0], others[-1])] == [True, False, True]


def sent_by(sender: str, number: int, shared: bool = False, device: str | None = None) -> Observation:
    sent = observation(1e-4, device or f"{sender}{number}", n=number)
    return Observation(sent.predicted, sent.latency_s, sender, shared)


def counts(database: str) -> dict[str, int]:
    engine = create_engine(database_url(database))
    with engine.connect() as connection:
        query = select(observations.c.sender, func.count()).group_by(observations.c.sender)
        numbers = {sender: count for sender, count in connection.execute(query)}
    engine.dispose()
    return numbers


def test_rows_of_running_errors_are_bounded_by_sender(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RUNNING", 12)
    store = ObservationStore(database)
    for number in range(4):
        store.add([sent_by("", number, shared=True, device=f"real{number}"), sent_by("friend", number)])
    for start in range(0, 60, 20):
        store.add([sent_by("attacker", number) for number in range(start, start + 20)])
    shown = [summary.device for summary in store.summaries()]
    store.close()
    assert {f"real{n}" for n in range(4)} | {f"friend{n}" for n in range(4)} <= set(shown)
    attackers = {name for name in shown if name.startswith("attacker")}
    assert len(shown) == 12 and len(attackers) == 4 and attackers <= {f"attacker{n}" for n in range(40, 60)}


def test_stored_observations_are_bounded_by_sender(database: str) -> None:
    store = ObservationStore(database, max_observations=100)
    store.add([sent_by("friend", number, device="t4") for number in range(30)])
    last: list[str] = []
    for start in range(0, 600, 60):
        last = [s.id for s in store.add([sent_by("attacker", start + n, device="t4") for n in range(60)])]
    assert counts(database) == {"friend": 30, "attacker": 70}
    # The newest stay. Running errors count what was removed, too.
    engine = create_engine(database_url(database))
    with engine.connect() as connection:
        assert set(last) <= set(connection.execute(select(observations.c.id)).scalars())
    engine.dispose()
    assert [summary.figures.count for summary in store.summaries()] == [630]
    store.close()


def test_receipt_counts_once(database: str) -> None:
    store = ObservationStore(database)
    sent = sent_by("a", 1)
    sent.predicted.__dict__["receipt"] = "r" * 16
    other = Observation(sent.predicted, 5e-4)
    first, again, different = store.add([sent, sent, other])
    assert (first.new, again.new, different.new) == (True, False, False)
    assert first.id == again.id == different.id and different.latency_s == sent.latency_s
    assert [stored.new for stored in store.add([other, sent])] == [False, False]
    assert [summary.figures.count for summary in store.summaries()] == [1]
    store.close()


#: The tables of the version before, with one measurement whose prediction was invented.
BEFORE = """
CREATE TABLE cdmpp_schema (version INTEGER NOT NULL PRIMARY KEY);
INSERT INTO cdmpp_schema VALUES (1);
CREATE TABLE cdmpp_observations (id VARCHAR(32) NOT NULL PRIMARY KEY, program_hash VARCHAR(32) NOT NULL,
  device TEXT NOT NULL, device_digest VARCHAR(16) NOT NULL, backend VARCHAR(16) NOT NULL, protocol VARCHAR(16) NOT NULL,
  framework VARCHAR(16), model_id TEXT NOT NULL, predicted_s {double} NOT NULL, lower_s {double} NOT NULL,
  upper_s {double} NOT NULL, latency_s {double} NOT NULL, received_at {double} NOT NULL);
INSERT INTO cdmpp_observations VALUES ('1', '2', 't4', '3', 'library', 'kernel', NULL, 'm', 1, 1, 1, 1, 1);
CREATE TABLE cdmpp_running (device TEXT NOT NULL, device_digest VARCHAR(16) NOT NULL, model_id TEXT NOT NULL,
  number BIGINT NOT NULL, total {double} NOT NULL, squares {double} NOT NULL, relative_error {double} NOT NULL,
  covered BIGINT NOT NULL, recent {bytes} NOT NULL, reference_count INTEGER NOT NULL, reference_total {double} NOT NULL,
  reference_squares {double} NOT NULL, last_at {double} NOT NULL, PRIMARY KEY (device, device_digest, model_id));
INSERT INTO cdmpp_running VALUES ('poisoned', '3', 'm', 2, 0, 0, 3e21, 0, {zeros}, 0, 0, 0, 1);
INSERT INTO cdmpp_running VALUES ('t4', '3', 'm', 2, 0, 0, 0.5, 0, {zeros}, 0, 0, 0, 2);
CREATE TABLE cdmpp_jobs (id VARCHAR(32) NOT NULL PRIMARY KEY, kind VARCHAR(64) NOT NULL, state VARCHAR(16) NOT NULL,
  request {bytes} NOT NULL, prices {bytes} NOT NULL, budget_s {double}, progress {double} NOT NULL, best {double},
  bound {double}, answer TEXT, error TEXT, created_at {double} NOT NULL, updated_at {double} NOT NULL,
  owner VARCHAR(32), lease_until {double}, attempts INTEGER NOT NULL);
INSERT INTO cdmpp_jobs VALUES ('{job}', 'cluster', 'queued', {empty}, {empty}, 1, 0, NULL, NULL, NULL, NULL, 1, 1, NULL,
  NULL, 0);
"""


def test_database_of_the_version_before_is_upgraded(database: str) -> None:
    url = database_url(database)
    is_sqlite = url.get_dialect().name == "sqlite"
    if is_sqlite:
        Path(database).parent.mkdir()
    types = {"double": "DOUBLE PRECISION", "bytes": "BLOB" if is_sqlite else "BYTEA"}
    empty, zeros = ("x''", "x'" + 32 * "0" + "'") if is_sqlite else ("'\\x'::bytea", "'\\x" + 32 * "0" + "'::bytea")
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in BEFORE.format(**types, empty=empty, zeros=zeros, job="0" * 32).split(";")[:-1]:
            connection.execute(text(statement))
    engine.dispose()
    store = ObservationStore(database)
    assert [summary.device for summary in store.summaries()] == ["t4"]
    assert store.add([sent_by("a", 1)])[0].new
    assert counts(database) == {"": 1, "a": 1}
    other = ObservationStore(database)
    other.check()
    assert store.signer is not None and other.signer is not None
    queue = job_store(store)
    leased = queue.take("worker")
    assert leased is not None and leased.id == "0" * 32
    queue.add("a", b"", b"", 1.0, "a")
    store.close()
    other.close()
