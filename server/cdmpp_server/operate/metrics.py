"""Prometheus metrics: requests, batches, caches, queues, domains, errors, observations, plans and jobs.

A single process keeps them in memory. Several workers keep them in files of a common folder, so that a
scrape of any worker returns the metrics of all. This is prometheus_client's multiprocess mode, which
``PROMETHEUS_MULTIPROC_DIR`` enables before the library is imported.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter as Count
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from cdmpp import __version__
from cdmpp.devices import known
from cdmpp.predict.prediction import Prediction

#: prometheus_client's environment variable with the folder that the workers share.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
MEDIA_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = tuple(float(2**power) for power in range(15))
#: Label of devices that clients describe themselves: the number of labels must be bounded.
OTHER_DEVICE = "other"


class Metrics:
    """All metrics of one application. Cheap to call, thread-safe."""

    def __init__(self) -> None:
        # Creation times of counters would be half of the lines.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it carries no annotations
        # One registry per application: a process may hold several, as the tests do.
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        live_sum = partial(gauge, multiprocess_mode="livesum")
        self._request_seconds = histogram(
            "cdmpp_request_seconds",
            "Seconds from a request's header to the end of its response.",
            ["method", "route", "status"],
            buckets=_SECONDS,
        )
        # Cached by labels: the library's look-up takes a lock.
        self._request_children: dict[tuple[str, str, int], Histogram] = {}
        self._in_flight = live_sum("cdmpp_requests_in_flight", "Requests in progress.")
        self._refusals = counter("cdmpp_refusals", "Requests refused with a problem, by its code.", ["code"])
        self._connections = live_sum("cdmpp_connections", "Open connections.")
        self._refused_connections = counter(
            "cdmpp_connections_refused",
            "Connections refused because of their number, of descriptors, or of the bytes or time of a header.",
            ["reason"],
        )
        self._refused_connections_seen: dict[str, int] = {}
        self._items = counter("cdmpp_items", "Predicted items by domain.", ["domain"])
        out_of_domain = "Predicted items outside the model's domain, by device."
        self._out_of_domain = counter("cdmpp_out_of_domain_items", out_of_domain, ["device"])
        self._item_errors = counter("cdmpp_item_errors", "Items with an error, by its code.", ["code"])
        self._batch_rows = histogram("cdmpp_batch_rows", "Rows in a batch.", buckets=_ROWS)
        self._batch_seconds = histogram("cdmpp_batch_seconds", "Seconds to compute a batch.", buckets=_SECONDS)
        self._queue_rows = live_sum("cdmpp_queue_rows", "Rows that wait for a batch.")
        self._hits = counter("cdmpp_cache_hits", "Cache hits.", ["cache"])
        self._misses = counter("cdmpp_cache_misses", "Cache misses.", ["cache"])
        labels = ["model_id", "version"]
        self._model = gauge("cdmpp_model_info", "1 for the loaded model.", labels, multiprocess_mode="livemax")
        self._observations = counter("cdmpp_observations", "Measured latencies that were stored.")
        available = "1 while the database is available."
        self._store_up = gauge("cdmpp_store_up", available, multiprocess_mode="livemin")
        self._sandbox_queue = live_sum("cdmpp_sandbox_queue", "Groups of programs that wait for a reading worker.")
        self._sandbox_restarts = counter("cdmpp_sandbox_restarts", "Reading workers that were replaced.")
        self._plans = counter("cdmpp_plans", "Requests for plans, by kind and outcome.", ["kind", "outcome"])
        finished = "Jobs submitted to and finished by this service, by state."
        self._jobs = counter("cdmpp_jobs", finished, ["state"])
        self._sandbox_restarts_seen = 0
        self._model_id: str | None = None
        self._devices = frozenset(spec.name for spec in known())
        if not os.environ.get(FOLDER_VARIABLE):
            ProcessCollector(registry=registry)

    def started(self) -> None:
        """Count a request that has arrived."""
        self._in_flight.inc()

    def ended(self, method: str, route: str, status: int, seconds: float, code: str | None) -> None:
        """Count a request that has ended; ``code`` is the code of its problem."""
        self._in_flight.dec()
        labels = (method, route, status)
        child = self._request_children.get(labels)
        if child is None:
            child = self._request_children[labels] = self._request_seconds.labels(method, route, str(status))
        child.observe(seconds)
        if code is not None:
            self._refusals.labels(code).inc()

    def predictions(self, predictions: Sequence[Prediction]) -> None:
        """Count the predictions and errors of one request."""
        self.items(
            [(p.device, p.domain) for p in predictions if p.error is None and p.domain is not None],
            [p.error.code for p in predictions if p.error is not None],
        )

    def items(self, answered: Iterable[tuple[str, str]], errors: Iterable[str] = ()) -> None:
        """Count the items of one request: (device name, domain) of each prediction, and the code of each error."""
        for (device, domain), count in Count(answered).items():
            self._items.labels(domain).inc(count)
            if domain == "out":
                name = device if device in self._devices else OTHER_DEVICE
                self._out_of_domain.labels(name).inc(count)
        for code, count in Count(errors).items():
            self._item_errors.labels(code).inc(count)

    def batch(self, rows: int, seconds: float) -> None:
        """Count a computed batch."""
        self._batch_rows.observe(rows)
        self._batch_seconds.observe(seconds)

    def cache(self, name: str, hits: int, misses: int) -> None:
        """Count look-ups in the named cache."""
        if hits:
            self._hits.labels(name).inc(hits)
        if misses:
            self._misses.labels(name).inc(misses)

    def model(self, model_id: str) -> None:
        """Set the loaded model."""
        if self._model_id is not None and self._model_id != model_id:
            # A removed label would keep its value in the files of the other workers.
            self._model.labels(self._model_id, __version__).set(0)
        self._model_id = model_id
        self._model.labels(model_id, __version__).set(1)

    def observed(self, count: int) -> None:
        """Count stored observations."""
        self._observations.inc(count)

    def store(self, up: bool) -> None:
        """Set whether the database is available."""
        self._store_up.set(int(up))

    def plan(self, kind: str, outcome: str) -> None:
        """Count a request for a plan; ``outcome`` is "done", "job" or the code of its problem."""
        self._plans.labels(kind, outcome).inc()

    def job(self, state: str) -> None:
        """Count a job that was submitted or has ended."""
        self._jobs.labels(state).inc()

    def sample(self, queued_rows: int, sandbox_queued: int, sandbox_restarts: int) -> None:
        """Set the sampled state; ``sandbox_restarts`` counts from the start of the service."""
        self._queue_rows.set(queued_rows)
        self._sandbox_queue.set(sandbox_queued)
        if sandbox_restarts > self._sandbox_restarts_seen:
            self._sandbox_restarts.inc(sandbox_restarts - self._sandbox_restarts_seen)
            self._sandbox_restarts_seen = sandbox_restarts

    def connections(self, number: int, refused: Mapping[str, int]) -> None:
        """Set the open connections and the refused ones by reason, which count from the start of the process."""
        self._connections.set(number)
        for reason, count in refused.items():
            before = self._refused_connections_seen.get(reason, 0)
            if count > before:
                self._refused_connections.labels(reason).inc(count - before)
                self._refused_connections_seen[reason] = count

    def text(self) -> bytes:
        """Return the metrics of all workers in Prometheus' text format."""
        registry = self.registry
        if os.environ.get(FOLDER_VARIABLE):
            registry = CollectorRegistry()
            _AllWorkers(registry)  # type: ignore[no-untyped-call]  # it carries no annotations
        return generate_latest(registry)


class _AllWorkers(MultiProcessCollector):
    """Metrics of all workers, without files that are still empty.

    A worker that starts creates a file first and gives it a size afterwards; the library fails on such a file.
    """

    def collect(self) -> Iterable[Metric]:
        files = []
        for file in Path(self._path).glob("*.db"):
            with suppress(FileNotFoundError):  # the gauges of a worker that has just ended
                if file.stat().st_size:
                    files.append(str(file))
        merged: Iterable[Metric] = self.merge(files)  # type: ignore[no-untyped-call]  # it carries no annotations
        return merged


@contextmanager
def shared_by_workers() -> Iterator[None]:
    """Create a folder for the metrics of the processes that are started inside the block.

    They must not be forked from this process: prometheus_client reads the variable when it is imported.
    """
    folder = Path(tempfile.mkdtemp(prefix="cdmpp-metrics-"))
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER_VARIABLE]
        else:
            os.environ[FOLDER_VARIABLE] = before
        shutil.rmtree(folder, ignore_errors=True)


def worker_ended(pid: int) -> None:
    """Remove the gauges of a worker that has ended; its counters stay. Use inside :func:`shared_by_workers`."""
    mark_process_dead(pid)  # type: ignore[no-untyped-call]  # it carries no annotations
