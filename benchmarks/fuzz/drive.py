"""Sending the cases over several connections, checks of every answer, and watching the service's memory."""

from __future__ import annotations

import http.client
import json
import math
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.fuzz.cases import Surface
from benchmarks.serving.process import Served
from cdmpp.errors import DataError
from cdmpp.predict.bulk import MEDIA_TYPE, FeatureAnswers

#: Statuses that a request may be answered with, and those of a service that is busy.
STATUSES = frozenset({200, 202, 400, 404, 408, 409, 413, 415, 422, 429})
BUSY = frozenset({503, 504})
#: Seconds past the service's own deadline within which the answer must have come.
GRACE_S = 5.0


def problems(status: int, media: str, body: bytes, cases: int) -> list[str]:
    """Problems of an answer; empty if there are none."""
    if status not in STATUSES | BUSY:
        return [f"status {status}: {body[:300]!r}"]
    if media == MEDIA_TYPE and status == 200:
        return _features(body)
    try:
        reply = json.loads(body, parse_constant=_refuse)
    except ValueError as error:
        return [f"status {status}, not JSON ({error}): {body[:200]!r}"]
    if status not in (200, 202):
        fields = ("status", "code", "detail")
        good = media == "application/problem+json" and all(field in reply for field in fields)
        return [] if good and reply["status"] == status else [f"status {status}, no problem: {body[:300]!r}"]
    if "model_id" in reply and "explanation" in reply:
        return []  # a plan, which its own tests check
    results = reply.get("results")
    if cases > 1 and (not isinstance(results, list) or len(results) != cases):
        return [f"{cases} items, other results: {body[:200]!r}"]
    answers = [*(results or []), *(reply.get("points") or [])]
    programs = reply.get("programs")  # of /adapt: a number
    for program in programs if isinstance(programs, list) else []:
        answers += program.get("answers") or []
    return [wrong for answer in answers if (wrong := _result(answer))]


def _features(body: bytes) -> list[str]:
    try:
        answers = FeatureAnswers.from_bytes(body)
    except DataError as error:
        return [f"an invalid binary answer: {error.message}"]
    figures = np.stack([answers.lower_s, answers.latency_s, answers.upper_s])
    if not (np.isfinite(figures) & (figures > 0)).all() or (np.diff(figures, axis=0) < 0).any():
        return [f"invalid figures: {figures.T.tolist()[:4]}"]
    return []


def _result(result: dict[str, Any]) -> str:
    if "error" in result:
        error = result["error"]
        code = error.get("code")
        if not code or code == "internal_error" or not error.get("message") or len(error["message"]) > 2000:
            return f"an error without a reason: {str(error)[:300]}"
        if "Traceback" in error["message"]:
            return f"a traceback: {str(error)[:300]}"
        return ""
    if "latency_s" in result:
        figures = [result[key] for key in ("lower_s", "latency_s", "upper_s")]
        if not all(math.isfinite(f) and f > 0 for f in figures) or figures != sorted(figures):
            return f"invalid figures: {figures}"
    return ""


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


#: A request that has no answer by then is lost.
_LOST_S = 60.0


@dataclass
class Finding:
    """Something that must not be, and how to see it again."""

    surface: str
    seed: str
    what: str


@dataclass
class FuzzReport:
    """Counts and findings of a run."""

    #: By surface name.
    cases: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    #: Error codes, of items and of requests.
    codes: Counter[str] = field(default_factory=Counter)
    #: Seconds by surface name.
    slowest_s: dict[str, float] = field(default_factory=dict)
    #: Share of the run, bytes of the service's process, and bytes of all its processes.
    resident: list[tuple[float, int, int]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def total(self) -> int:
        """All cases."""
        return sum(self.cases.values())


@dataclass
class FuzzRun:
    """One fuzz run against a running service."""

    served: Served
    surfaces: Sequence[Surface]
    #: How many mutated inputs.
    cases: int
    seed: int
    #: The run ends then, however many cases are left.
    seconds: float
    connections: int = 4
    #: The service's own limit for an answer.
    deadline_s: float = 10.0
    report: FuzzReport = field(default_factory=FuzzReport)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> FuzzReport:
        """Send everything; the findings are in the report."""
        self._measure(0.0)
        started = time.monotonic()
        tasks = self._tasks()
        until = started + self.seconds
        threads = [threading.Thread(target=self._work, args=(tasks, until)) for _ in range(self.connections)]
        for thread in threads:
            thread.start()
        marks = [i / 8 for i in range(1, 8)]
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
            if marks and self.report.total() >= marks[0] * self.cases:
                self._measure(marks.pop(0))
        for thread in threads:
            thread.join()
        self.report.seconds = time.monotonic() - started
        self._measure(1.0)
        if self.served.ask("GET", "/healthz")[0] != 200 or self.served.process.poll() is not None:
            self._found("service", "", "it is not alive at the end")
        if self.served.ask("GET", "/readyz")[0] != 200:
            self._found("service", "", "it is not ready at the end")
        return self.report

    def _tasks(self) -> queue.SimpleQueue[tuple[Surface, str]]:
        """Seeds of requests, all surfaces mixed; enough of each for its share."""
        plan: list[tuple[Surface, str]] = []
        for surface in self.surfaces:
            wanted = surface.share * self.cases / sum(s.share for s in self.surfaces)
            each = surface.make(random.Random(0)).cases
            count = max(1, round(wanted / each))
            plan += [(surface, f"{self.seed}:{surface.name}:{i}") for i in range(count)]
        random.Random(self.seed).shuffle(plan)
        tasks: queue.SimpleQueue[tuple[Surface, str]] = queue.SimpleQueue()
        for task in plan:
            tasks.put(task)
        return tasks

    def _work(self, tasks: queue.SimpleQueue[tuple[Surface, str]], until: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=_LOST_S)
        while time.monotonic() < until:
            try:
                surface, seed = tasks.get_nowait()
            except queue.Empty:
                break
            try:
                self._one(connection, surface, seed)
            except Exception as error:
                connection.close()
                self._found(surface.name, seed, f"no answer: {type(error).__name__}: {error}")
        connection.close()

    def _one(self, connection: http.client.HTTPConnection, surface: Surface, seed: str) -> None:
        request = surface.make(random.Random(seed))
        started = time.monotonic()
        connection.request("POST", request.path, request.body, {"Content-Type": request.media})
        response = connection.getresponse()
        body = response.read()
        seconds = time.monotonic() - started
        media = (response.headers.get("content-type") or "").partition(";")[0]
        wrong = problems(response.status, media, body, request.cases)
        if seconds > (surface.limit_s or self.deadline_s) + GRACE_S:
            wrong.append(f"answered after {seconds:.1f} s")
        for what in wrong[:3]:
            self._found(surface.name, seed, what)
        with self._lock:
            report = self.report
            report.cases[surface.name] += request.cases if response.status == 200 else 1
            report.requests[surface.name] += 1
            report.statuses[response.status] += 1
            report.slowest_s[surface.name] = max(report.slowest_s.get(surface.name, 0.0), seconds)
            report.codes.update(_codes(body) if media.endswith("json") else ())

    def _found(self, surface: str, seed: str, what: str) -> None:
        with self._lock:
            self.report.findings.append(Finding(surface, seed, what))

    def _measure(self, share: float) -> None:
        served = self.served
        self.report.resident.append((share, served.resident_bytes(only_server=True), served.resident_bytes()))


def _codes(body: bytes) -> list[str]:
    try:
        answer = json.loads(body)
    except ValueError:
        return []
    if not isinstance(answer, dict):
        return []
    if "code" in answer:
        return [str(answer["code"])]
    results = answer.get("results")
    if not isinstance(results, list):
        return []
    return [str(r["error"].get("code")) for r in results if isinstance(r, dict) and isinstance(r.get("error"), dict)]
