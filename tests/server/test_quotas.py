"""Places of one sender: jobs, adapted models, observations and rows of running errors."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from cdmpp_server.database import database_url
from cdmpp_server.observe import store as records
from cdmpp_server.observe.store import Observation, ObservationStore
from cdmpp_server.operate.access import new_key
from tests.server.conftest import LINEAR, execute, problem, service, stored
from tests.server.test_jobs import job_store
from tests.server.test_store import observation

pytestmark = pytest.mark.slow

KEYS = {name: new_key() for name in ("first", "second")}
MODEL = {"stages": 2, "micro_batches": 2, "forward_s": 1, "backward_s": 2}
SEARCH: dict[str, Any] = {"models": [MODEL], "ranks": 2, "budget_s": 600}
DEVICE = "l4"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of a service with two keys that runs no jobs."""
    keys = {name: hash for name, (_, hash) in KEYS.items()}
    places = {"adapted_dir": tmp_path / "adapted", "max_adapted": 4, "job_workers": 0, "max_jobs": 8}
    return {"database": str(tmp_path / "s.sqlite"), "api_key_hashes": keys, **places}


@pytest.fixture
def client(settings: dict[str, Any]) -> Iterator[TestClient]:
    with service(**settings) as client:
        yield client


def bearer(sender: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[sender][0]}"}


def post(client: TestClient, sender: str, path: str, **body: Any) -> Any:
    return client.post(path, json=body, headers=bearer(sender))


def test_one_key_cannot_take_all_places_of_jobs(client: TestClient) -> None:
    taken = [post(client, "first", "/pipeline/search", **SEARCH) for _ in range(2)]
    assert [response.status_code for response in taken] == [202, 202]
    refused = post(client, "first", "/pipeline/search", **SEARCH)
    assert problem(refused, 429, "quota_exceeded")["detail"].startswith("2 jobs of this sender")
    assert refused.headers["retry-after"] == "10"
    assert post(client, "second", "/pipeline/search", **SEARCH).status_code == 202
    # A removed job gives its place back.
    assert client.delete(f"/jobs/{taken[0].json()['job_id']}", headers=bearer("first")).status_code == 204
    assert post(client, "first", "/pipeline/search", **SEARCH).status_code == 202


def test_list_of_jobs_has_only_those_of_the_sender(client: TestClient) -> None:
    def listed(sender: str, query: str = "") -> Any:
        return client.get(f"/jobs{query}", headers=bearer(sender))

    assert listed("second").json() == {"jobs": []}
    senders = ("first", "second", "first")
    ids = [post(client, sender, "/pipeline/search", **SEARCH).json()["job_id"] for sender in senders]
    newest, oldest = listed("first").json()["jobs"]
    assert [newest["job_id"], oldest["job_id"]] == [ids[2], ids[0]]
    assert [job["job_id"] for job in listed("second").json()["jobs"]] == [ids[1]]
    assert listed("first", "?limit=1").json() == {"jobs": [newest]}
    # A list entry equals the job without its answer. Another sender that has the id may read the job.
    job = client.get(f"/jobs/{ids[2]}", headers=bearer("second")).json()
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
    return response.json()["adapted_model"]


def is_known(client: TestClient, sender: str, model: str) -> bool:
    items = [{"program": LINEAR, "device": DEVICE}]
    return post(client, sender, "/predict", items=items, model=model).status_code == 200


def test_adapted_models_of_one_key_do_not_evict_those_of_another(client: TestClient, settings: dict[str, Any]) -> None:
    job = adapt(client, "first", 1.5)
    others = [adapt(client, "second", 2.0 + by / 10) for by in range(8)]
    assert len({job, *others}) == 9
    assert is_known(client, "first", job)
    assert [is_known(client, "second", name) for name in others] == [False] * 5 + [True] * 3
    # Whoever knows the id may use the model.
    assert is_known(client, "second", job)
    # The same on disk.
    with service(**settings) as again:
        assert [is_known(again, "first", name) for name in (job, others[0], others[-1])] == [True, False, True]


def sent_by(sender: str, number: int, shared: bool = False, device: str | None = None) -> Observation:
    sent = observation(1e-4, device or f"{sender}{number}", n=number)
    return Observation(sent.predicted, sent.latency_s, sender, shared)


def counts(database: str) -> dict[str, int]:
    return Counter(row.sender for row in stored(database).values())


def test_rows_of_running_errors_are_bounded_by_sender(store: ObservationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RUNNING", 12)
    for number in range(4):
        store.add([sent_by("", number, shared=True, device=f"real{number}"), sent_by("friend", number)])
    for start in range(0, 60, 20):
        store.add([sent_by("attacker", number) for number in range(start, start + 20)])
    shown = [summary.device for summary in store.summaries()]
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
    assert set(last) <= set(stored(database))
    assert [summary.figures.count for summary in store.summaries()] == [630]
    store.close()


def test_receipt_counts_once(store: ObservationStore) -> None:
    sent = sent_by("a", 1)
    sent.predicted.__dict__["receipt"] = "r" * 16
    other = Observation(sent.predicted, 5e-4)
    first, again, different = store.add([sent, sent, other])
    assert (first.new, again.new, different.new) == (True, False, False)
    assert first.id == again.id == different.id and different.latency_s == sent.latency_s
    assert [stored.new for stored in store.add([other, sent])] == [False, False]
    assert [summary.figures.count for summary in store.summaries()] == [1]


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
    is_sqlite = database_url(database).get_dialect().name == "sqlite"
    if is_sqlite:
        Path(database).parent.mkdir()
    types = {"double": "DOUBLE PRECISION", "bytes": "BLOB" if is_sqlite else "BYTEA"}
    empty, zeros = ("x''", "x'" + 32 * "0" + "'") if is_sqlite else ("'\\x'::bytea", "'\\x" + 32 * "0" + "'::bytea")
    statements = BEFORE.format(**types, empty=empty, zeros=zeros, job="0" * 32).split(";")[:-1]
    execute(database, *map(text, statements))
    store = ObservationStore(database)
    assert [summary.device for summary in store.summaries()] == ["t4"]
    assert store.add([sent_by("a", 1)])[0].new
    assert counts(database) == {"": 1, "a": 1}
    other = ObservationStore(database)
    other.check()
    assert store.signer is not None and other.signer is not None
    queue = job_store(store)
    assert queue.take("worker").id == "0" * 32
    queue.add("a", b"", b"", 1.0, "a")
    store.close()
    other.close()
