"""Load from asyncio connections: closed loops that wait for an answer, and an open loop that does not.

A small HTTP/1.1 client of its own: a general one takes longer for a request than the server does, and both
share two cores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

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
