"""``python -m benchmarks.serving.large_bodies``: answers of ``/healthz`` while large bodies arrive, all at once.

Two loads: requests of new operators just small enough to be read in the event loop, and bodies of 16 MB of empty lists.
Server and client share the machine, on loopback; the server has its default settings.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence

from benchmarks.serving.load import Connection
from benchmarks.serving.process import running
from benchmarks.serving.queries import bodies, distinct

#: Bytes and number of the bodies of each load.
READ_INLINE, READ_BYTES = 30, 63_000
LISTS, LIST_BYTES = 12, 16_000_000


async def longest_s(port: int, load: Sequence[bytes]) -> tuple[float, dict[int, int]]:
    """Seconds of the slowest ``/healthz``, each on a new connection; answers of the load by status."""
    done = asyncio.gather(*(Connection(port).post("/predict", body, 60.0) for body in load))
    longest = 0.0
    while not done.done():
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await reader.read()
        writer.close()
        longest = max(longest, time.perf_counter() - began)
        await asyncio.sleep(0.005)
    statuses: dict[int, int] = {}
    for answer in await done:
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
    return longest, statuses


def main() -> None:
    """Measure and print."""
    queries = distinct(0)
    size = len(next(bodies(queries, 200))) // 200
    inline = list(itertools.islice(bodies(queries, READ_BYTES // size), READ_INLINE))
    lists = [b'{"items":[' + b"[]," * (LIST_BYTES // 3) + b"[]]}"] * (LISTS // 2)
    lists += [b"[" + b"[]," * (LIST_BYTES // 3) + b"[]]"] * (LISTS // 2)
    for name, load in (("bodies of 63 KB", inline), ("bodies of 16 MB", lists)):
        with running() as served:
            asyncio.run(longest_s(served.port, [next(bodies(queries, 1))]))
            before = served.resident_bytes()
            longest, statuses = asyncio.run(longest_s(served.port, load))
            figures = {"load": name, "largest_bytes": max(map(len, load)), "healthz_max_s": round(longest, 3)}
            print(json.dumps({**figures, "statuses": statuses, "memory": served.resident_bytes() / before}))


if __name__ == "__main__":
    main()
