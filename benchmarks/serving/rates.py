"""Items a second and the tail of single requests, beside the predictor in this process."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

from benchmarks.serving.load import Tally, closed_loop, open_loop
from benchmarks.serving.process import Served
from benchmarks.serving.queries import bodies, distinct, repeated
from cdmpp import LatencyPredictor
from cdmpp.predict.prediction import Query
from cdmpp.programs.frontends.load import program_from_request

ITEMS = 256


def warm(served: Served, seconds: float, connections: int) -> dict[str, Any]:
    """The same 256 items in each request: every answer is cached."""
    body = json.dumps({"items": repeated(ITEMS)}).encode()
    status, answer = served.ask("POST", "/predict", json.loads(body))
    if status != 200 or any("error" in result for result in answer["results"]):
        raise SystemExit(f"/predict answered {status}: {str(answer)[:300]}")
    load = closed_loop(served.port, "/predict", itertools.repeat(body), connections=connections, seconds=seconds)
    return _figures(asyncio.run(load))


def cold(served: Served, seconds: float, connections: int, start: int = 0) -> dict[str, Any]:
    """New operators in batches of 256."""
    ready = bodies(distinct(start), ITEMS)
    # Made before the clock runs: the client's own work is not the server's.
    prepared = iter(list(itertools.islice(ready, int(seconds * 40))))
    load = closed_loop(served.port, "/predict", prepared, connections=connections, seconds=seconds)
    return _figures(asyncio.run(load))


def single(served: Served, seconds: float, rate: float) -> dict[str, Any]:
    """Requests of one item at a fixed rate; every fourth is new to the server."""
    new = bodies(distinct(3_000_000), 1)
    known = itertools.cycle([json.dumps({"items": [item]}).encode() for item in repeated(ITEMS)])

    def mixed() -> Any:
        for number in itertools.count():
            yield next(new) if number % 4 == 0 else next(known)

    tally = asyncio.run(open_loop(served.port, "/predict", mixed(), rate=rate, seconds=seconds))
    if tally.count(200) != len(tally.answers):
        raise SystemExit("a single request was not answered with 200")
    return {
        "rate_per_s": rate,
        "requests": len(tally.answers),
        "p50_s": tally.seconds(0.5),
        "p99_s": tally.seconds(0.99),
        "most_s": tally.seconds(1.0),
    }


def in_process(seconds: float) -> dict[str, Any]:
    """The same queries to a predictor in this process, without HTTP."""
    predictor = LatencyPredictor.load()

    def queries(items: list[dict[str, Any]]) -> list[Query]:
        return [Query(program_from_request(item["program"]), item["device"]) for item in items]

    new = distinct(6_000_000)
    batches = [list(itertools.islice(new, ITEMS)) for _ in range(int(seconds * 60))]
    rates = {}
    known = repeated(ITEMS)
    predictor.predict_queries(queries(known))
    for name, source in (("cold", iter(batches)), ("warm", itertools.repeat(known))):
        started, count = time.perf_counter(), 0
        for batch in source:
            predictor.predict_queries(queries(batch))
            count += len(batch)
            if time.perf_counter() - started > seconds:
                break
        rates[f"{name}_items_per_s"] = count / (time.perf_counter() - started)
    return rates


def _figures(tally: Tally) -> dict[str, Any]:
    """Figures of requests that must all have been answered."""
    for answer in tally.answers:
        if answer.status != 200 or b'"error"' in answer.body or answer.body.count(b'"latency_s"') != ITEMS:
            raise SystemExit(f"a request was answered {answer.status}: {answer.body[:300]!r}")
    items_per_s = ITEMS * len(tally.answers) / tally.wall_s
    return {"items_per_s": items_per_s, "request_s": tally.seconds(0.5), "request_p99_s": tally.seconds(0.99)}
