"""Metrics for Prometheus: counts, bounded labels, and aggregation over workers."""

import os
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cdmpp_server.operate.metrics import FOLDER_VARIABLE, Metrics, shared_by_workers
from tests.server.conftest import ITEM, JSON, LINEAR, service
from tests.waiting import run_python


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples by name and labels."""
    families = text_string_to_metric_families(text)
    return {labelled(s.name, **s.labels): s.value for family in families for s in family.samples}


def labelled(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted(labels.items()))


@pytest.mark.slow
def test_requests_items_and_refusals_are_counted(tmp_path: Path) -> None:
    # A separate application, so that its counters start at zero.
    with service(database=str(tmp_path / "s.sqlite")) as client:
        changes = ({}, {"program": {**LINEAR, "m": 77}}, {"backend": "tvm"})
        wrong = ({"program": {"operator": "liner"}}, {"device": "t5"})
        items = [{**ITEM, **change} for change in (*changes, *wrong)]
        results = client.post("/predict", json={"items": items}).json()["results"]
        client.post("/predict", json={"items": items[:1]})
        client.post("/predict", content=b"{", headers=JSON)
        for path in ("/nope/1", "/nope/2"):
            client.get(path)
        client.request("BREW", "/predict")
        observations = [{"prediction_id": result["prediction_id"], "latency_s": 1e-4} for result in results[:3]]
        client.post("/observe", json={"observations": [*observations, observations[0]]})
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    seen = samples(answer.text)
    count = "cdmpp_request_seconds_count"
    assert seen[labelled(count, method="POST", route="/predict", status="200")] == 2
    assert seen[labelled(count, method="POST", route="/predict", status="400")] == 1
    assert seen[labelled(count, method="GET", route="none", status="404")] == 2
    assert seen[labelled(count, method="other", route="/predict", status="405")] == 1
    assert seen[labelled("cdmpp_refusals_total", code="malformed_json")] == 1
    assert seen[labelled("cdmpp_refusals_total", code="not_found")] == 2
    assert seen[labelled("cdmpp_observations_total")] == 3, "one was sent twice"
    assert seen[labelled("cdmpp_store_up")] == 1
    assert seen[labelled("cdmpp_requests_in_flight")] == 1, "the scrape itself"
    assert seen[labelled("cdmpp_queue_rows")] == 0
    assert seen[labelled("cdmpp_item_errors_total", code="unsupported_operator")] == 1
    assert seen[labelled("cdmpp_item_errors_total", code="unknown_device")] == 1
    by_domain = {dict(labels)["domain"]: value for (name, labels), value in seen.items() if name == "cdmpp_items_total"}
    assert by_domain == Counter(result["domain"] for result in [*results[:3], results[0]])
    assert seen[labelled("cdmpp_batch_rows_sum")] == 3
    assert seen[labelled("cdmpp_batch_rows_count")] >= 1
    assert seen[labelled("cdmpp_batch_seconds_count")] >= 1
    assert seen[labelled("cdmpp_cache_hits_total", cache="answers")] == 1
    assert seen[labelled("cdmpp_cache_misses_total", cache="answers")] >= 3
    (model,) = [labels for (name, labels) in seen if name == "cdmpp_model_info"]
    assert dict(model)["model_id"] == results[0]["model_id"]
    assert any(name.startswith("process_resident_memory") for name, _ in seen)


def test_number_of_labels_is_bounded() -> None:
    metrics = Metrics()
    metrics.items([(f"my-device-{i}", "out") for i in range(1000)] + [("t4", "out"), ("l4", "in")])
    seen = samples(metrics.text().decode())
    assert seen[labelled("cdmpp_out_of_domain_items_total", device="other")] == 1000
    assert seen[labelled("cdmpp_out_of_domain_items_total", device="t4")] == 1
    assert seen[labelled("cdmpp_items_total", domain="in")] == 1
    assert len([1 for name, _ in seen if name == "cdmpp_out_of_domain_items_total"]) == 2


def test_reload_leaves_one_model_info(tmp_path: Path) -> None:
    metrics = Metrics()
    for model_id in ("a", "a", "b"):
        metrics.model(model_id)
    seen = samples(metrics.text().decode())
    values = {dict(labels)["model_id"]: v for (name, labels), v in seen.items() if name == "cdmpp_model_info"}
    assert values == {"a": 0, "b": 1}


def test_sandbox_restarts_are_counted_incrementally() -> None:
    metrics = Metrics()
    for restarts in (0, 2, 2, 5):
        metrics.sample(7, 3, restarts)
    seen = samples(metrics.text().decode())
    assert seen[labelled("cdmpp_sandbox_restarts_total")] == 5
    assert seen[labelled("cdmpp_sandbox_queue")] == 3
    assert seen[labelled("cdmpp_queue_rows")] == 7


WORKER = """
import sys
from cdmpp_server.operate.metrics import Metrics
metrics = Metrics()
metrics.batch(32, 0.01)
metrics.started(); metrics.ended("POST", "/predict", 200, 0.01, None)
metrics.started()
metrics.sample(5, 0, 1)
metrics.model("m")
print(metrics.text().decode())
sys.stdin.read()
"""


@pytest.mark.slow
def test_scrape_of_any_worker_covers_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    # A separate process acts as supervisor: prometheus_client reads the variable when it is imported.
    code = f"""
import os, pathlib, subprocess, sys
from cdmpp_server.operate.metrics import FOLDER_VARIABLE, shared_by_workers, worker_ended
with shared_by_workers():
    # The file of a worker that is just creating it.
    pathlib.Path(os.environ[FOLDER_VARIABLE], "counter_1.db").touch()
    workers = [
        subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    for worker in workers:  # all have written when each has printed
        while b"cdmpp_sandbox_restarts_total" not in (line := worker.stdout.readline()):
            assert line, "a worker has failed"
    workers[0].communicate()
    worker_ended(workers[0].pid)
    code = "from cdmpp_server.operate.metrics import Metrics; print(Metrics().text().decode())"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    for worker in workers[1:]:
        worker.communicate()
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    seen = samples(done.stdout)
    assert seen[labelled("cdmpp_batch_rows_count")] == 3, "counts of an ended worker stay"
    assert seen[labelled("cdmpp_request_seconds_count", method="POST", route="/predict", status="200")] == 3
    assert seen[labelled("cdmpp_sandbox_restarts_total")] == 3
    assert seen[labelled("cdmpp_queue_rows")] == 10, "what it was busy with does not"
    assert seen[labelled("cdmpp_requests_in_flight")] == 2
    models = [v for (name, _), v in seen.items() if name == "cdmpp_model_info"]
    assert models == [1]


def test_metrics_folder_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with shared_by_workers():
        folder = Path(os.environ[FOLDER_VARIABLE])
        assert folder.is_dir()
    assert not folder.exists() and FOLDER_VARIABLE not in os.environ
