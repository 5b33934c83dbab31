"""What Prometheus scrapes: requests, batches, caches, queue, domains, errors, observations.

One process keeps its figures in memory. Workers keep theirs in files of a common folder
(prometheus_client's multiprocess mode, chosen by ``PROMETHEUS_MULTIPROC_DIR`` before the library is
imported), so that whichever worker is scraped answers for all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter as Count
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from cdmpp import __version__
from cdmpp.devices import known

#: The folder that workers share; prometheus_client's own name.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
MEDIA_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = tuple(float(2**power) for power in range(15))
#: A device that a client described is counted under this name: labels must stay few.
OTHER_DEVICE = "other"


class Metrics:
    """All metrics of one application. Cheap to call, safe between threads."""

    def __init__(self) -> None:
        # When a counter was made is half of the lines otherwise, and nobody asks.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it carries no annotations
        # An application's own: a process may hold several, and tests do.
        self.registry = registry = CollectorRegistry()
        self._request_seconds = Histogram(
            "cdmpp_request_seconds",
            "Time from a request's head to the end of its answer.",
            ["method", "route", "status"],
            registry=registry,
            buckets=_SECONDS,
        )
        # By labels: the library's own look-up takes a lock and checks every time.
        self._request_children: dict[tuple[str, str, int], Histogram] = {}
        self._in_flight = Gauge(
            "cdmpp_requests_in_flight", "Requests being answered.", registry=registry, multiprocess_mode="livesum"
        )
        self._refusals = Counter(
            "cdmpp_refusals", "Requests answered with a problem, by its code.", ["code"], registry=registry
        )
        self._items = Counter("cdmpp_items", "Predicted items by domain.", ["domain"], registry=registry)
        self._out_of_domain = Counter(
            "cdmpp_out_of_domain_items",
            "Predicted items out of the model's domain, by device.",
            ["device"],
            registry=registry,
        )
        self._item_errors = Counter(
            "cdmpp_item_errors", "Items answered with an error, by its code.", ["code"], registry=registry
        )
        self._batch_rows = Histogram("cdmpp_batch_rows", "Rows computed together.", registry=registry, buckets=_ROWS)
        self._batch_seconds = Histogram(
            "cdmpp_batch_seconds", "Time to compute a batch.", registry=registry, buckets=_SECONDS
        )
        self._queue_rows = Gauge(
            "cdmpp_queue_rows", "Rows that wait to be computed.", registry=registry, multiprocess_mode="livesum"
        )
        self._hits = Counter("cdmpp_cache_hits", "Found in a cache.", ["cache"], registry=registry)
        self._misses = Counter("cdmpp_cache_misses", "Not found in a cache.", ["cache"], registry=registry)
        self._model = Gauge(
            "cdmpp_model_info",
            "1 for the loaded model.",
            ["model_id", "version"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._observations = Counter(
            "cdmpp_observations", "Measured latencies that were accepted and kept.", registry=registry
        )
        self._store_up = Gauge(
            "cdmpp_store_up",
            "1 while the database of observations can be used.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._sandbox_queue = Gauge(
            "cdmpp_sandbox_queue",
            "Programs that wait for the process that reads them.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._sandbox_restarts = Counter(
            "cdmpp_sandbox_restarts", "Times that process was started anew.", registry=registry
        )
        self._plans = Counter(
            "cdmpp_plans",
            "Requests for plans by kind, and what became of them.",
            ["kind", "outcome"],
            registry=registry,
        )
        self._jobs = Counter(
            "cdmpp_jobs", "Jobs that were submitted here, and those that ended here.", ["state"], registry=registry
        )
        self._sandbox_restarts_seen = 0
        self._model_id: str | None = None
        self._devices = frozenset(spec.name for spec in known())
        if not os.environ.get(FOLDER_VARIABLE):
            ProcessCollector(registry=registry)

    def started(self) -> None:
        """A request came in."""
        self._in_flight.inc()

    def ended(self, method: str, route: str, status: int, seconds: float, code: str | None) -> None:
        """It was answered; ``code`` is its problem's."""
        self._in_flight.dec()
        labels = (method, route, status)
        child = self._request_children.get(labels)
        if child is None:
            child = self._request_children[labels] = self._request_seconds.labels(method, route, str(status))
        child.observe(seconds)
        if code is not None:
            self._refusals.labels(code).inc()

    def items(self, answered: Iterable[tuple[str, str]], errors: Iterable[str] = ()) -> None:
        """Items of one request: (device name, domain) of each answer, and the code of each error."""
        for (device, domain), count in Count(answered).items():
            self._items.labels(domain).inc(count)
            if domain == "out":
                name = device if device in self._devices else OTHER_DEVICE
                self._out_of_domain.labels(name).inc(count)
        for code, count in Count(errors).items():
            self._item_errors.labels(code).inc(count)

    def batch(self, rows: int, seconds: float) -> None:
        """A batch was computed."""
        self._batch_rows.observe(rows)
        self._batch_seconds.observe(seconds)

    def cache(self, name: str, hits: int, misses: int) -> None:
        """So many lookups in the cache of this name."""
        if hits:
            self._hits.labels(name).inc(hits)
        if misses:
            self._misses.labels(name).inc(misses)

    def model(self, model_id: str) -> None:
        """This is the loaded model now."""
        if self._model_id is not None and self._model_id != model_id:
            # Removing a label would leave its value in the files of the other workers.
            self._model.labels(self._model_id, __version__).set(0)
        self._model_id = model_id
        self._model.labels(model_id, __version__).set(1)

    def observed(self, count: int) -> None:
        """So many observations were kept."""
        self._observations.inc(count)

    def store(self, up: bool) -> None:
        """Whether the database could be used."""
        self._store_up.set(int(up))

    def plan(self, kind: str, outcome: str) -> None:
        """A plan was answered: ``outcome`` is "done", "job" or the code of its problem."""
        self._plans.labels(kind, outcome).inc()

    def job(self, state: str) -> None:
        """A job was submitted, or came to an end."""
        self._jobs.labels(state).inc()

    def sample(self, queued_rows: int, sandbox_queued: int, sandbox_restarts: int) -> None:
        """State that is looked at from time to time; ``sandbox_restarts`` counts from the start."""
        self._queue_rows.set(queued_rows)
        self._sandbox_queue.set(sandbox_queued)
        if sandbox_restarts > self._sandbox_restarts_seen:
            self._sandbox_restarts.inc(sandbox_restarts - self._sandbox_restarts_seen)
            self._sandbox_restarts_seen = sandbox_restarts

    def text(self) -> bytes:
        """All of them in Prometheus' text format, of all workers where there are several."""
        registry = self.registry
        if os.environ.get(FOLDER_VARIABLE):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it carries no annotations
        return generate_latest(registry)


@contextmanager
def shared_by_workers() -> Iterator[None]:
    """A folder for the metrics of the processes that are started inside the block.

    They must not be forked from this one: prometheus_client decides when it is imported.
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
    """Forget what a worker was busy with (its counts stay); inside :func:`shared_by_workers`."""
    mark_process_dead(pid)  # type: ignore[no-untyped-call]  # it carries no annotations
