"""``python -m benchmarks.serving [--seconds 10]``: the service's figures on this machine.

Server and client share the machine, on loopback. Items a second and the tail of single requests are beside those of
the predictor in this process. Queries are repeated ones, as a scheduler sends them, or new ones. Writes
``benchmarks/results/serving.json`` and prints a table.

Load comes from asyncio connections: closed loops that wait for an answer, and an open loop that does not. Their
HTTP/1.1 client is small: a general one takes longer for a request than the server does, and both share two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.process import Served, running
from cdmpp import LatencyPredictor
from cdmpp.predict.prediction import Query
from cdmpp.programs.frontends.load import program_from_request

#: The server closes a connection after 5 idle seconds. A request that crosses that would look lost.
_IDLE_S = 2.0
#: Longest wait for an answer.
_LIMIT_S = 60.0


@dataclass
class ServedAnswer:
    """Outcome of one request; ``status`` is 0 if no answer came."""

    status: int
    seconds: float
    body: bytes = b""


@dataclass
class Tally:
    """Answers of a load."""

    answers: list[ServedAnswer] = field(default_factory=list)
    wall_s: float = 0.0

    def count(self, status: int) -> int:
        """Answers with this status."""
        return sum(a.status == status for a in self.answers)

    def seconds(self, share: float, status: int = 200) -> float:
        """Quantile of the seconds of answers with this status."""
        times = sorted(a.seconds for a in self.answers if a.status == status)
        return times[min(int(share * len(times)), len(times) - 1)]


class Connection:
    """One keep-alive connection; opened anew when the server has closed it or may do so soon."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._used = 0.0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: bytes) -> ServedAnswer:
        """Send one request."""
        started = time.perf_counter()
        if started - self._used > _IDLE_S:
            await self.close()
        try:
            async with asyncio.timeout(_LIMIT_S):
                status, text = await self._exchange(path, body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            await self.close()
            return ServedAnswer(0, time.perf_counter() - started)
        self._used = time.perf_counter()
        return ServedAnswer(status, time.perf_counter() - started, text)

    async def _exchange(self, path: str, body: bytes) -> tuple[int, bytes]:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        assert self._reader is not None
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        lower = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(lower.partition(b"content-length:")[2].partition(b"\r\n")[0])
        text = await self._reader.readexactly(length)
        if b"connection: close" in lower:
            await self.close()
        return int(lower.split(None, 2)[1]), text

    async def close(self) -> None:
        """Close; the next request opens it again."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def closed_loop(port: int, path: str, bodies: Iterator[bytes], *, connections: int, seconds: float) -> Tally:
    """Every connection sends its next request when it has the answer to the last, for so many seconds."""
    tally, started = Tally(), time.perf_counter()

    async def work() -> None:
        connection = Connection(port)
        while time.perf_counter() - started < seconds and (body := next(bodies, None)) is not None:
            tally.answers.append(await connection.post(path, body))
        await connection.close()

    await asyncio.gather(*(work() for _ in range(connections)))
    tally.wall_s = time.perf_counter() - started
    return tally


async def open_loop(port: int, path: str, bodies: Iterator[bytes], *, rate: float, seconds: float) -> Tally:
    """Requests at a fixed rate, whatever the server does; seconds count from when each was due."""
    tally, free, tasks = Tally(), [], set()
    started = time.perf_counter()

    async def send(body: bytes, due: float) -> None:
        connection = free.pop() if free else Connection(port)
        answer = await connection.post(path, body)
        answer.seconds = time.perf_counter() - due
        tally.answers.append(answer)
        free.append(connection)

    for number in range(int(rate * seconds)):
        due = started + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(send(next(bodies), due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    tally.wall_s = time.perf_counter() - started
    for connection in free:
        await connection.close()
    return tally


#: Two that the model was trained on and two that ask their peers, which is more work.
DEVICES = ("t4", "l4", "a100-pcie-40gb", "h100-sxm5-80gb")


def program(kind: int, size: int, width: int, batch: int = 1) -> dict[str, Any]:
    """One of four operators."""
    return (
        {"operator": "linear", "m": size, "n": width, "k": 1024, "dtype": "float16"},
        {"operator": "softmax", "rows": size, "cols": width},
        {"operator": "add", "rows": size, "cols": width},
        {"operator": "attention_encoder", "batch": batch, "q_len": size, "heads": 16, "kv_heads": 4, "head_dim": 64},
    )[kind]


def repeated(count: int = 256) -> list[dict[str, Any]]:
    """Different queries, always the same ones: four operators in many sizes on four devices."""
    return [
        {"id": str(i), "program": program(i % 4, 64 * (i // 16 + 1), 4096), "device": DEVICES[i // 4 % 4]}
        for i in range(count)
    ]


def distinct(start: int = 0) -> Iterator[dict[str, Any]]:
    """Queries of which no two have the same program, without end; ``start`` keeps callers apart."""
    for i in itertools.count(start):
        number, more = i // 4 % 2048, i // 8192
        sizes = (1 + number, 1024 + 8 * more, 1 + more)
        yield {"program": program(i % 4, *sizes), "device": DEVICES[number % 4]}


def bodies(queries: Iterator[dict[str, Any]], items: int) -> Iterator[bytes]:
    """Request bodies of so many items each."""
    while batch := list(itertools.islice(queries, items)):
        yield json.dumps({"items": batch}).encode()


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


RESULT = Path(__file__).parents[1] / "results" / "serving.json"


def main() -> None:
    """Run the parts and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each load")
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    results: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
    for workers in options.workers:
        with running("--workers", str(workers)) as served:
            results[f"workers_{workers}"] = {
                "cold": cold(served, options.seconds, options.connections),
                "warm": warm(served, options.seconds, options.connections),
                "single": single(served, options.seconds, 200.0),
            }
    results["in_process"] = in_process(options.seconds)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results)))


def table(figures: dict[str, Any]) -> list[str]:
    """Markdown lines."""
    lines = ["| what | figure |", "| --- | ---: |"]
    for name, part in figures.items():
        if name.startswith("workers_"):
            label = f"{name.removeprefix('workers_')} worker(s)"
            lines += [
                f"| {label}: warm, batches of 256 | **{part['warm']['items_per_s']:,.0f}** items/s |",
                f"| {label}: new operators, the same | **{part['cold']['items_per_s']:,.0f}** items/s |",
                f"| {label}: one item a request, 200 requests a second, p50 / p99 | "
                f"{1e3 * part['single']['p50_s']:.1f} / **{1e3 * part['single']['p99_s']:.1f}** ms |",
            ]
    if "in_process" in figures:
        part = figures["in_process"]
        lines.append(
            f"| predictor in this process: warm / new | {part['warm_items_per_s']:,.0f} / "
            f"{part['cold_items_per_s']:,.0f} items/s |"
        )
    return lines


if __name__ == "__main__":
    main()
