"""``python -m benchmarks.serving.overload``: the service under a load of several times its capacity.

Server and client share the machine, on loopback; the server has its default settings. Requests of 200 new operators
arrive in an open loop at six times the capacity, each on a new connection. A closed loop on another service measures
the capacity before. Requests of one new operator arrive beside them. Writes ``benchmarks/results/overload.json`` and
prints a table with the goals.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.serving.load import Answer, Connection, Tally
from benchmarks.serving.process import Served, running
from benchmarks.serving.queries import bodies, distinct
from cdmpp_server.settings import Settings

RESULT = Path(__file__).parents[1] / "results" / "overload.json"
#: Single requests within this multiple of their 99th percentile without load, or within 50 ms, take their normal time.
NORMAL_FACTOR, NORMAL_S = 2.0, 0.05
#: Answers in a row that have to take their normal time, and the pause between them.
IN_A_ROW, PAUSE_S = 5, 0.05
#: Seconds after which the client gives up on an answer: such a request is lost.
PATIENCE_S = 60.0
#: Largest (or smallest, marked True) value of each figure.
GOALS: dict[str, tuple[float, bool]] = {
    "lost": (0, False),
    "late": (0, False),
    "too_late_share": (0.05, False),
    "refused_p99_s": (0.3, False),
    "recovery_s": (2.0, False),
    "small_answered_share": (0.95, True),
    "goodput_share": (0.8, True),
}


async def capacity(port: int, queries: Iterator[bytes], seconds: float, connections: int = 16) -> float:
    """Requests answered a second by connections that wait for each answer.

    They open one after the other: one worker would accept all that open at once.
    """
    answered = 0
    ends = time.perf_counter() + seconds

    async def work(delay_s: float) -> None:
        nonlocal answered
        await asyncio.sleep(delay_s)
        connection = Connection(port)
        await connection.post("/predict", b"{}")
        while time.perf_counter() < ends:
            answer = await connection.post("/predict", next(queries))
            answered += answer.status == 200
            if answer.status != 200:
                await asyncio.sleep(0.1)
        await connection.close()

    started = time.perf_counter()
    await asyncio.gather(*(work(0.02 * number) for number in range(connections)))
    return answered / (time.perf_counter() - started)


async def arrivals(port: int, queries: list[bytes], rate: float, seconds: float, started: float) -> Tally:
    """Send one request every ``1 / rate`` seconds on a new connection, whatever the server does."""
    tally, tasks = Tally(), set()

    async def send(body: bytes) -> None:
        connection = Connection(port)
        tally.answers.append(await connection.post("/predict", body, PATIENCE_S))
        await connection.close()

    for number, body in enumerate(queries[: int(rate * seconds)]):
        if (wait := started + number / rate - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(send(body))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    tally.wall_s = time.perf_counter() - started
    return tally


async def recovery(port: int, queries: Iterator[bytes], normal_s: float, limit_s: float = 60.0) -> float:
    """Seconds until :data:`IN_A_ROW` single requests in a row take their normal time; infinite after the limit."""
    connection, began = Connection(port), time.perf_counter()
    first, good = began, 0
    while good < IN_A_ROW and time.perf_counter() - began < limit_s:
        sent = time.perf_counter()
        answer = await connection.post("/predict", next(queries), PATIENCE_S)
        first = sent if good == 0 else first
        good = good + 1 if answer.status == 200 and answer.seconds <= normal_s else 0
        await asyncio.sleep(PAUSE_S)
    await connection.close()
    return first - began if good == IN_A_ROW else float("inf")


async def overload(
    port: int, large: list[bytes], small: list[bytes], probes: Iterator[bytes], options: argparse.Namespace, rate: float
) -> tuple[Tally, Tally, float, float]:
    """Large and small requests beside each other; their answers, the normal time, and the recovery."""
    calm = [await Connection(port).post("/predict", next(probes)) for _ in range(options.probes)]
    normal_s = max(NORMAL_S, NORMAL_FACTOR * quantile(calm, 0.99))
    started = time.perf_counter()
    load = asyncio.gather(
        arrivals(port, large, rate, options.seconds, started),
        arrivals(port, small, options.small_rate, options.seconds, started),
    )
    await asyncio.sleep(max(0.0, started + options.seconds - time.perf_counter()))
    recovered_s = await recovery(port, probes, normal_s)
    answers = await load
    return answers[0], answers[1], normal_s, recovered_s


def quantile(answers: list[Answer], share: float) -> float:
    """Quantile of the seconds of answers; 0 without any."""
    times = sorted(answer.seconds for answer in answers)
    return times[min(int(share * len(times)), len(times) - 1)] if times else 0.0


def measured_capacity(port: int, options: argparse.Namespace) -> float:
    """Requests answered a second: the better of two runs; the first also fills caches."""
    source = bodies(distinct(0), options.items)
    ready = iter(list(itertools.islice(source, int(500 * options.capacity_seconds) + 100)))
    requests_per_s = max(asyncio.run(capacity(port, ready, options.capacity_seconds)) for _ in range(2))
    if not requests_per_s:
        raise SystemExit("no request was answered in the closed loop")
    return requests_per_s


def measure(served: Served, options: argparse.Namespace, requests_per_s: float) -> dict[str, Any]:
    """The overload of a new service, and the recovery."""
    queries = distinct(0)
    source = bodies(queries, options.items)
    rate = options.factor * requests_per_s
    large = list(itertools.islice(source, int(rate * options.seconds)))
    small = list(itertools.islice(bodies(queries, 1), int(options.small_rate * options.seconds)))
    gc.collect()
    gc.freeze()
    got, got_small, normal_s, recovery_s = asyncio.run(
        overload(served.port, large, small, bodies(queries, 1), options, rate)
    )
    deadline_s = Settings.model_fields["deadline_s"].default
    refused = [answer for answer in got.answers + got_small.answers if answer.status == 503]
    answered = [answer for answer in got.answers if answer.status == 200]
    too_late = got.count(504)
    in_time = [answer for answer in answered if answer.seconds <= deadline_s]
    everything = got.answers + got_small.answers
    return {
        "workers": options.workers,
        "items": options.items,
        "seconds": options.seconds,
        "capacity_requests_per_s": requests_per_s,
        "offered_requests_per_s": len(got.answers) / options.seconds,
        "last_answer_s": got.wall_s,
        "requests": len(got.answers),
        "answered": len(answered),
        "refused": got.count(503),
        "too_late": too_late,
        "lost": sum(answer.status not in (200, 503, 504) for answer in everything),
        "late": sum(answer.status == 200 and answer.seconds > deadline_s for answer in everything),
        "too_late_share": too_late / max(1, len(answered) + too_late),
        "refused_without_retry_after": sum(not answer.retry_after for answer in refused),
        "refused_p50_s": quantile(refused, 0.5),
        "refused_p99_s": quantile(refused, 0.99),
        "answered_p50_s": quantile(answered, 0.5),
        "answered_p99_s": quantile(answered, 0.99),
        "normal_s": normal_s,
        "recovery_s": recovery_s,
        "small": len(got_small.answers),
        "small_answered": got_small.count(200),
        "small_answered_share": got_small.count(200) / max(1, len(got_small.answers)),
        "small_p50_s": quantile([answer for answer in got_small.answers if answer.status == 200], 0.5),
        "small_p99_s": quantile([answer for answer in got_small.answers if answer.status == 200], 0.99),
        "goodput_share": len(in_time) / got.wall_s / requests_per_s,
    }


def table(figures: dict[str, Any]) -> list[str]:
    """Markdown lines of the figures with goals."""
    names = {
        "lost": "lost requests",
        "late": "answers after the deadline",
        "too_late_share": "504, share of admitted",
        "refused_p99_s": "refusals, 99th percentile",
        "recovery_s": "recovery after the load",
        "small_answered_share": "small requests answered",
        "goodput_share": "answers in time over capacity",
    }
    lines = ["| figure | goal | measured | |", "| --- | ---: | ---: | --- |"]
    for key, (goal, smallest) in GOALS.items():
        value = figures[key]
        met = value >= goal if smallest else value <= goal
        shown, wanted = (
            (f"{100 * value:.1f} %", f"{100 * goal:.0f} %")
            if key.endswith("_share")
            else (f"{value:.2f} s", f"{goal:g} s")
            if key.endswith("_s")
            else (f"{value}", f"{goal}")
        )
        lines.append(f"| {names[key]} | {'≥' if smallest else '≤'} {wanted} | {shown} | {'met' if met else 'missed'} |")
    return lines


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of the overload")
    parser.add_argument("--factor", type=float, default=6.0, help="offered load over capacity")
    parser.add_argument("--items", type=int, default=200, help="new operators of a large request")
    parser.add_argument("--small-rate", type=float, default=5.0, help="small requests a second")
    parser.add_argument("--capacity-seconds", type=float, default=10.0, help="duration of each of two closed loops")
    parser.add_argument("--probes", type=int, default=100, help="single requests that define the normal time")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}
    with running("--workers", str(options.workers)) as served:
        requests_per_s = measured_capacity(served.port, options)
    # Another service, which knows neither its own speed nor the bodies of the sender.
    with running("--workers", str(options.workers)) as served:
        result |= measure(served, options, requests_per_s)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print("\n".join(table(result)))


if __name__ == "__main__":
    main()
