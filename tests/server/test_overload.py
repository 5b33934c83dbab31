"""The queue when far more requests arrive than it can answer: a simulated worker in virtual time."""

import asyncio
import contextvars
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from httpx2 import Response

from cdmpp.predict.prediction import Prediction, Query
from cdmpp.programs.program import TensorProgram
from cdmpp_server.concurrency import Deadline
from cdmpp_server.operate.access import current_sender, sender_of
from cdmpp_server.predict.batcher import Batcher
from cdmpp_server.predict.lane import Ticket
from cdmpp_server.problems import ProblemError
from tests.server.conftest import JSON
from tests.waiting import VirtualTimeLoop

#: Fixed cost of a batch, and cost of a row.
FIXED_S, ROW_S = 0.016, 0.0005
BATCH = 256
CAPACITY_ROWS_PER_S = BATCH / (FIXED_S + BATCH * ROW_S)
DEADLINE_S = 10.0
LARGE = 200
QUERY = Query(TensorProgram.from_operator("relu:rows=64,cols=64"), "t4")
ANSWER = Prediction("relu", "0" * 32, "t4", "library", "kernel", None, "model")


class Worker(VirtualTimeLoop):
    """Event loop in which a batch takes as long as its rows cost; two at a time take twice as long."""

    def __init__(self) -> None:
        super().__init__()
        self.cost_s = 0.0
        self._running = 0
        self._results: list[tuple[Callable[..., object], Any]] | None = None

    def run_in_executor(self, executor: Executor | None, work: Callable[..., Any], *args: Any) -> Any:
        return self.create_task(self._compute(work, *args))

    async def _compute(self, work: Callable[..., Any], *args: Any) -> None:
        self._results = results = []
        work(*args)
        self._results = None
        self._running += 1
        await asyncio.sleep(self.cost_s * self._running)
        self._running -= 1
        for callback, arguments in results:
            callback(*arguments)

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        if self._results is None:
            return super().call_soon_threadsafe(callback, *args, context=context)
        self._results.append((callback, args))


class Predictor:
    """Costs vary from batch to batch, and one in twenty takes three times as long."""

    def __init__(self) -> None:
        self.random = random.Random(1)
        self.slowdown = 1.0

    def predict_queries(self, queries: Sequence[Query], quantiles: Sequence[float]) -> list[Prediction]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Worker)
        noise = self.random.uniform(0.8, 1.2) * (3 if self.random.random() < 0.05 else 1) * self.slowdown
        loop.cost_s = (FIXED_S + ROW_S * len(queries)) * noise
        return [ANSWER] * len(queries)


@dataclass
class Outcome:
    """What became of a request."""

    status: int
    seconds: float
    ended: float
    retry_after_s: float = 0.0


@dataclass
class Service:
    """The queue and the requests that were sent to it."""

    batcher: Batcher
    predictor: Predictor = field(default_factory=Predictor)

    async def send(self, rows: int) -> Outcome:
        """One request."""
        loop = asyncio.get_running_loop()
        began, status, retry_after_s = loop.time(), 200, 0.0
        try:
            await self.batcher.ask(self.predictor, [QUERY] * rows, (0.1, 0.9), Deadline(DEADLINE_S))
        except ProblemError as error:
            status, retry_after_s = error.status, float(error.headers["retry-after"])
        return Outcome(status, loop.time() - began, loop.time(), retry_after_s)

    async def load(self, rows: int, per_s: float, seconds: float, sender: str = "") -> list[Outcome]:
        """Requests at a fixed rate, whatever becomes of them."""
        context = contextvars.copy_context()
        context.run(current_sender.set, sender)
        tasks = []
        for _ in range(round(per_s * seconds)):
            tasks.append(asyncio.create_task(self.send(rows), context=context))
            await asyncio.sleep(1 / per_s)
        return await asyncio.gather(*tasks)


def simulate(scenario: Callable[[Service], Awaitable[None]]) -> None:
    async def main() -> None:
        batcher = Batcher(max_batch_rows=BATCH, max_queued_rows=20_000, max_wait_s=0.001)
        async with batcher.running():
            await scenario(Service(batcher))
            assert batcher.queued_rows == 0

    with asyncio.Runner(loop_factory=Worker) as runner:
        runner.run(main())


def count(outcomes: Sequence[Outcome], status: int) -> int:
    return sum(outcome.status == status for outcome in outcomes)


@pytest.mark.parametrize("warm", [True, False], ids=["after normal load", "from the start"])
def test_sixfold_overload(warm: bool) -> None:
    """Nothing admitted is thrown away, small requests are answered, and the service recovers at once."""

    async def scenario(service: Service) -> None:
        if warm:
            await service.load(LARGE, 0.7 * CAPACITY_ROWS_PER_S / LARGE, 10)
        loop = asyncio.get_running_loop()
        began, seconds = loop.time(), 30
        large = asyncio.create_task(service.load(LARGE, 6 * CAPACITY_ROWS_PER_S / LARGE, seconds))
        small = asyncio.create_task(service.load(1, 5, seconds))
        await asyncio.sleep(seconds)
        while (await service.send(1)).seconds > 3 * FIXED_S:
            await asyncio.sleep(0.05)
        assert loop.time() - began - seconds < 2
        answers, small_answers = await large, await small
        good = count(answers, 200)
        assert {outcome.status for outcome in answers} <= {200, 503, 504}
        assert all(outcome.seconds <= DEADLINE_S for outcome in answers if outcome.status == 200)
        assert count(answers, 504) <= 0.05 * (good + count(answers, 504))
        assert good * LARGE / (max(outcome.ended for outcome in answers) - began) >= 0.8 * CAPACITY_ROWS_PER_S / 1.1
        assert all(outcome.seconds == 0 and outcome.retry_after_s >= 1 for outcome in answers if outcome.status == 503)
        assert count(small_answers, 200) >= 0.95 * len(small_answers)
        assert max(outcome.seconds for outcome in small_answers if outcome.status == 200) < 1

    simulate(scenario)


def test_worker_that_becomes_slow_under_overload_keeps_what_it_admitted() -> None:
    async def scenario(service: Service) -> None:
        large = asyncio.create_task(service.load(LARGE, 6 * CAPACITY_ROWS_PER_S / LARGE, 40))
        await asyncio.sleep(15)
        service.predictor.slowdown = 3
        await asyncio.sleep(10)
        service.predictor.slowdown = 1
        answers = await large
        assert count(answers, 504) <= 0.05 * (count(answers, 200) + count(answers, 504))
        # The rate rises again: the last ten seconds are worth as much as the first fifteen.
        late = [outcome for outcome in answers if outcome.status == 200 and outcome.ended > 30]
        assert len(late) * LARGE > 0.6 * 10 * CAPACITY_ROWS_PER_S

    simulate(scenario)


def test_burst_that_can_be_answered_in_time_is_admitted() -> None:
    """5 s of work at once: no request is refused and none is late."""

    async def scenario(service: Service) -> None:
        await service.load(LARGE, 0.7 * CAPACITY_ROWS_PER_S / LARGE, 10)
        burst = [service.send(LARGE) for _ in range(round(4 * CAPACITY_ROWS_PER_S / LARGE))]
        assert {outcome.status for outcome in await asyncio.gather(*burst)} == {200}

    simulate(scenario)


def test_one_sender_cannot_take_the_queue_from_another() -> None:
    async def scenario(service: Service) -> None:
        flood = asyncio.create_task(service.load(LARGE, 6 * CAPACITY_ROWS_PER_S / LARGE, 40, "flood"))
        await asyncio.sleep(10)
        answers = await service.load(LARGE, 0.3 * CAPACITY_ROWS_PER_S / LARGE, 30, "modest")
        of_flood = await flood
        assert count(answers, 200) >= 0.95 * len(answers)
        # In its turn, and not behind the queue of the other.
        assert sorted(outcome.seconds for outcome in answers)[len(answers) // 2] < 1
        assert count(of_flood, 504) == 0
        assert count(of_flood, 200) * LARGE >= 0.5 * 40 * CAPACITY_ROWS_PER_S

    simulate(scenario)


def test_retry_after_is_the_time_after_which_a_request_is_admitted() -> None:
    """Of clients that come back when they are told to, nearly all are admitted then."""

    async def scenario(service: Service) -> None:
        attempts: list[int] = []

        async def client() -> None:
            for attempt in range(1, 20):
                outcome = await service.send(LARGE)
                if outcome.status == 200:
                    attempts.append(attempt)
                    return
                await asyncio.sleep(outcome.retry_after_s)

        await service.load(LARGE, 0.7 * CAPACITY_ROWS_PER_S / LARGE, 10)
        clients = round(25 * CAPACITY_ROWS_PER_S / LARGE)
        await asyncio.gather(*(client() for _ in range(clients)))
        assert len(attempts) == clients
        assert sum(attempt <= 2 for attempt in attempts) >= 0.9 * clients

    simulate(scenario)


def test_requests_that_are_being_read_count() -> None:
    """Otherwise all that arrive while a body is read would be admitted."""

    async def scenario(service: Service) -> None:
        # At first a row counts as a millisecond.
        with service.batcher.admitted(9000, 9000, Deadline(DEADLINE_S)):
            assert (await service.send(LARGE)).status == 503
            assert (await service.send(1)).status == 200
        assert (await service.send(LARGE)).status == 200

    simulate(scenario)


def body_of(rows: range, cols: int = 999) -> bytes:
    programs = ({"operator": "softmax", "rows": 7 + 2 * n, "cols": cols} for n in rows)
    return json.dumps({"items": [{"program": program, "device": "t4"} for program in programs]}).encode()


@contextmanager
def long_queue(client: TestClient, address: str) -> Iterator[None]:
    """A request from this address that waits, with far more work than a deadline allows."""

    def hold() -> AbstractContextManager[Ticket]:
        current_sender.set(sender_of(None, address))
        waiting = client.app.state.batcher.admitted(19_000, 1e12, Deadline(600))
        waiting.__enter__()
        return waiting

    waiting = client.portal.call(hold)
    try:
        yield
    finally:
        client.portal.call(waiting.__exit__, None, None, None)


def test_overloaded_service_refuses_a_request_before_parsing(client: TestClient) -> None:
    """Judged by the last bodies of its sender; small bodies are always read, and one in eight of the others."""

    def send(body: bytes) -> Response:
        return client.post("/predict", content=body, headers=JSON)

    for number in range(8):
        assert send(body_of(range(60 * number, 60 * (number + 1)))).status_code == 200
    malformed = b"[" * 5000
    with long_queue(client, "testclient"):
        responses = [send(malformed) for _ in range(8)]
        assert sorted(response.status_code for response in responses) == [400, *[503] * 7]
        assert all(int(r.headers["retry-after"]) >= 1 for r in responses if r.status_code == 503)
        assert send(b"[").status_code == 400
        assert send(body_of(range(1000, 1001))).status_code == 200
        assert send(body_of(range(1000, 1060))).status_code == 503
        assert send(body_of(range(60))).status_code == 503  # unread, although its answers are cached ...
        for _ in range(8):
            response = send(body_of(range(60)))
        assert response.status_code == 200  # ... until one of them was read
    assert send(malformed).status_code == 400
    assert send(body_of(range(1000, 1060))).status_code == 200


def test_refusal_does_not_wait_until_other_bodies_are_read(app: FastAPI, client: TestClient) -> None:
    """A sample of the items shows that the request will be refused; only admitted requests wait for their turn."""
    body, headers = body_of(range(60), 997), {**JSON, "x-request-timeout-s": "3"}
    turn = app.state.service._chunks
    client.portal.call(turn.acquire)
    try:
        with long_queue(client, "another"):
            # One in eight is read even if those before were refused unread.
            responses = [client.post("/predict", content=body, headers=headers) for _ in range(9)]
    finally:
        client.portal.call(turn.release)
    assert [response.status_code for response in responses] == [503] * 9
