"""Endurance: memory over many requests, overload, and kill -9 under load."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.serving.load import Connection, Tally, closed_loop, open_loop
from benchmarks.serving.process import Served, running
from benchmarks.serving.queries import bodies, distinct, program, repeated

#: New queries that fill every cache of the service at its default bounds.
FILLING = 70_000


def memory(served: Served, requests: int, limit_s: float) -> dict[str, Any]:
    """Resident memory over many requests, one in ten of them new, after the bounded caches were filled."""
    known = itertools.cycle([json.dumps({"items": [item]}).encode() for item in repeated(256)])
    new = bodies(distinct(9_000_000), 1)
    sent = 0

    def mixed(count: int) -> Iterator[bytes]:
        for number in range(count):
            yield next(new) if number % 10 == 0 else next(known)

    empty = served.resident_bytes()
    filling = bodies(itertools.islice(distinct(60_000_000), FILLING), 256)
    filled = asyncio.run(closed_loop(served.port, "/predict", filling, connections=2, seconds=limit_s))
    if filled.count(200) != len(filled.answers):
        raise SystemExit("a request that fills the caches was not answered with 200")
    started, samples = time.monotonic(), [served.resident_bytes()]
    step = requests // 10
    while sent < requests and time.monotonic() - started < limit_s:
        tally = asyncio.run(closed_loop(served.port, "/predict", mixed(step), connections=4, seconds=limit_s))
        if tally.count(200) != len(tally.answers):
            raise SystemExit("a request of the endurance run was not answered with 200")
        sent += len(tally.answers)
        samples.append(served.resident_bytes())
    return {
        "requests": sent,
        "empty_bytes": empty,
        "resident_bytes": samples,
        "growth": max(samples) / samples[0] - 1,
        "requests_per_s": sent / (time.monotonic() - started),
    }


def overload(served: Served, seconds: float, items: int = 64, factor: float = 5.0) -> dict[str, Any]:
    """Capacity with new items in closed loops, then so many times as many requests a second."""
    source = bodies(distinct(20_000_000), items)
    base = asyncio.run(closed_loop(served.port, "/predict", source, connections=8, seconds=max(seconds / 2, 3.0)))
    capacity = base.count(200) / base.wall_s
    rate = factor * capacity
    # Made before: the client shares the cores with the server.
    prepared = list(itertools.islice(source, int(rate * seconds) + 1))
    tally = asyncio.run(open_loop(served.port, "/predict", iter(prepared), rate=rate, seconds=seconds, limit_s=30))
    recovered = _recovery(served)
    known = sum(tally.count(status) for status in (200, 503, 504))
    return {
        "capacity_requests_per_s": capacity,
        "offered_requests_per_s": rate,
        "offered_over_s": tally.wall_s,
        "requests": len(tally.answers),
        "answered": tally.count(200),
        "refused": tally.count(503),
        "too_late": tally.count(504),
        "lost": len(tally.answers) - known,
        "refusals_with_retry_after": sum(a.retry_after for a in tally.answers if a.status == 503),
        "longest_s": max(a.seconds for a in tally.answers),
        "recovered_after_s": recovered,
    }


def _recovery(served: Served) -> float:
    """Seconds until ten single new items in a row are answered within 50 ms each."""
    queries, started, good = bodies(distinct(40_000_000), 1), time.perf_counter(), 0
    first = started
    while good < 10 and time.perf_counter() - started < 30:
        began = time.perf_counter()
        answer = asyncio.run(closed_loop(served.port, "/predict", iter([next(queries)]), connections=1, seconds=5))
        quick = answer.count(200) == 1 and time.perf_counter() - began < 0.05
        if good == 0 and quick:
            first = began
        good = good + 1 if quick else 0
    return first - started if good == 10 else float("inf")


def kill_nine(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """kill -9 while observations arrive; all that was accepted with 200 has to be there after a restart."""
    settings = {"CDMPP_DATABASE": str(folder / "observations.sqlite")}
    accepted: set[str] = set()
    sent, number = 0, itertools.count()

    def batches() -> Iterator[bytes]:
        for i in number:
            rows = [
                {"program": program(0, 1 + (8 * i + j) % 4096, 1024), "device": "t4", "latency_s": 1e-4}
                for j in range(8)
            ]
            yield json.dumps({"observations": rows}).encode()

    for _ in range(rounds):
        with running(environment=settings) as served:
            timer = threading.Timer(seconds, served.kill)
            timer.start()
            tally = asyncio.run(_until_dead(served.port, batches()))
            timer.join()
        sent += 8 * len(tally.answers)
        for answer in tally.answers:
            if answer.status == 200:
                results = json.loads(answer.body)["results"]
                accepted |= {str(result["observation_id"]) for result in results}
    with running(environment=settings) as served:
        _, summary = served.ask("GET", "/observe")
    stored = sum(row["count"] for row in summary["devices"])
    return {
        "rounds": rounds,
        "sent": sent,
        "accepted": len(accepted),
        "stored": stored,
        "lost": max(0, len(accepted) - stored),
    }


async def _until_dead(port: int, source: Iterator[bytes]) -> Tally:
    tally, dead = Tally(), False

    async def work() -> None:
        nonlocal dead
        connection = Connection(port)
        while not dead:
            answer = await connection.post("/observe", next(source), 10.0, keep=True)
            tally.answers.append(answer)
            dead = dead or answer.status == 0

    await asyncio.gather(*(work() for _ in range(4)))
    return tally
