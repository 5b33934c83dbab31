"""The queue of the service: each request gets its own answers or its own error, whatever shares its batch."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.program import TensorProgram
from cdmpp_server.concurrency import Deadline
from cdmpp_server.predict.batcher import Batcher
from cdmpp_server.problems import ProblemError
from tests.waiting import PATIENCE_S, wait_until_async

LEVELS = (0.1, 0.9)


def query(rows: int, device: str = "t4") -> Query:
    return Query(TensorProgram.from_operator({"operator": "relu", "rows": rows, "cols": 64}), device)


def answer(name: str) -> Prediction:
    return Prediction(name, "0" * 32, "t4", "library", "kernel", None, "model")


class Recorder:
    """A predictor that returns program names, records batches, can hold up batches and can fail for one name.

    Without ``go``, batches of at least ``holds`` rows wait.
    """

    def __init__(self, breaks_on: str | None = None, holds: int = 0) -> None:
        self.batches: list[list[str]] = []
        self.entered, self.go = threading.Event(), threading.Event()
        self.breaks_on, self.holds = breaks_on, holds

    def predict_queries(self, queries: Sequence[Query], quantiles: Sequence[float]) -> list[Prediction]:
        names = [q.program.name for q in queries]
        self.batches.append(names)
        self.entered.set()
        assert len(names) < self.holds or self.go.wait(PATIENCE_S)
        if self.breaks_on in names:
            raise RuntimeError("a bug")
        return [answer(name) for name in names]


@asynccontextmanager
async def running(**limits: Any) -> AsyncIterator[Batcher]:
    batcher = Batcher(**{"max_batch_rows": 8, "max_queued_rows": 100, "max_wait_s": 0.0, **limits})
    async with batcher.running():
        yield batcher
        assert batcher.queued_rows == 0


def begin(batcher: Batcher, recorder: Recorder, *rows: int) -> asyncio.Task[list[Prediction]]:
    """A request with one query for each number of rows."""
    return asyncio.create_task(batcher.ask(recorder, [query(n) for n in rows], LEVELS, Deadline(PATIENCE_S)))


async def held(batcher: Batcher, rows: Sequence[int] = (1,), **options: Any) -> tuple[Recorder, Any]:
    """A recorder whose batch waits for ``go``, and the request of that batch."""
    recorder = Recorder(**options)
    first = begin(batcher, recorder, *rows)
    await asyncio.to_thread(recorder.entered.wait, PATIENCE_S)
    return recorder, first


def names(answers: Sequence[Prediction]) -> list[str]:
    return [a.name for a in answers]


@pytest.mark.slow
@settings(max_examples=40)
@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["t4", "l4", "nowhere"])), max_size=12),
            st.sampled_from([(0.1, 0.9), (0.5,)]),
            st.sampled_from(["stay", "stay", "cancel"]),
        ),
        min_size=1,
        max_size=8,
    ),
    batch=st.integers(1, 20),
    threads=st.integers(1, 2),
)
def test_other_requests_in_the_batch_change_no_answer(
    predictor: LatencyPredictor, requests: list[Any], batch: int, threads: int
) -> None:
    """Answers are equal to the last digit and in order; a cancelled request does not affect the others."""
    cases = [([query(*row) for row in rows], levels, fate) for rows, levels, fate in requests]
    fresh = LatencyPredictor(predictor.artifact)

    async def scenario() -> None:
        async with running(max_batch_rows=batch, max_queued_rows=1000, threads=threads) as batcher:
            tasks = [
                asyncio.create_task(batcher.ask(fresh, qs, levels, Deadline(PATIENCE_S))) for qs, levels, _ in cases
            ]
            await asyncio.sleep(0)
            for task, (_, _, fate) in zip(tasks, cases, strict=True):
                if fate == "cancel":
                    task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for answers, (queries, levels, fate) in zip(outcomes, cases, strict=True):
                if fate == "stay" or not queries:
                    assert answers == [predictor.predict_queries([q], levels)[0] for q in queries]
                else:
                    assert isinstance(answers, asyncio.CancelledError)

    asyncio.run(scenario())


async def test_requests_that_arrive_during_a_batch_form_the_next_one() -> None:
    async with running() as batcher:
        recorder, first = await held(batcher)
        others = [begin(batcher, recorder, n) for n in range(2, 7)]
        await wait_until_async(lambda: batcher.queued_rows == 5)
        recorder.go.set()
        await asyncio.gather(first, *others)
        assert [len(batch) for batch in recorder.batches] == [1, 5]


async def test_long_request_does_not_block_short_ones() -> None:
    async with running() as batcher:
        recorder, long = await held(batcher, range(1, 65), holds=8)
        short = [begin(batcher, recorder, 100 + n) for n in range(3)]
        # A short request is computed beside the batch of the long one, which waits.
        await short[0]
        assert [len(batch) for batch in recorder.batches][:2] == [8, 1]
        assert not long.done()
        recorder.go.set()
        for task, rows in zip((long, *short), (range(1, 65), [100], [101], [102]), strict=True):
            assert names(await task) == [query(n).program.name for n in rows]
        assert sum(map(len, recorder.batches)) == 64 + 3
        assert [len(batch) for batch in recorder.batches].count(8) >= 7


async def test_full_queue_refuses_requests_with_retry_after() -> None:
    async with running(max_queued_rows=20) as batcher:
        # An empty queue accepts a request of any size.
        recorder, first = await held(batcher, range(1, 30))
        with pytest.raises(ProblemError) as refused:
            await begin(batcher, recorder, 1)
        assert (refused.value.status, refused.value.problem.code) == (503, "overloaded")
        assert 1 <= int(refused.value.headers["retry-after"]) <= 60
        recorder.go.set()
        assert len(await first) == 29
        assert len(await begin(batcher, recorder, 1)) == 1


async def test_request_past_its_deadline_is_refused_and_not_computed() -> None:
    async with running() as batcher:
        recorder, first = await held(batcher)
        with pytest.raises(ProblemError) as refused:
            await batcher.ask(recorder, [query(2)], LEVELS, Deadline(0.02))
        assert (refused.value.status, refused.value.problem.code) == (504, "deadline_exceeded")
        cancelled = begin(batcher, recorder, 3)
        await wait_until_async(lambda: batcher.queued_rows == 1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert batcher.queued_rows == 0
        recorder.go.set()
        await first
        await begin(batcher, recorder, 4)
        assert [name for batch in recorder.batches for name in batch] == [query(n).program.name for n in (1, 4)]


async def test_answers_of_finished_batches_are_reported_even_if_the_request_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as batcher:
        recorder = Recorder()
        recorder.go.set()
        batches: list[tuple[int, list[str]]] = []
        loop = asyncio.get_running_loop()
        clock = loop.time

        def on_answers(start: int, answers: Sequence[Prediction]) -> None:
            batches.append((start, names(answers)))
            # The next batch takes longer than the request has.
            recorder.go.clear()
            monkeypatch.setattr(loop, "time", lambda: clock() + 2 * PATIENCE_S)

        queries = [query(n) for n in range(1, 13)]
        with pytest.raises(ProblemError) as refused:
            await batcher.ask(recorder, queries, LEVELS, Deadline(PATIENCE_S), on_answers)
        assert refused.value.status == 504
        assert batches == [(0, [q.program.name for q in queries[:8]])]
        recorder.go.set()


async def test_request_whose_deadline_has_passed_is_not_queued() -> None:
    async with running() as batcher:
        recorder = Recorder()
        with pytest.raises(ProblemError) as refused:
            await batcher.ask(recorder, [query(1)], LEVELS, Deadline(-1))
        assert refused.value.status == 504
        assert not recorder.batches


async def test_exception_reaches_only_the_request_that_caused_it() -> None:
    async with running() as batcher:
        recorder = Recorder(breaks_on=query(3).program.name)
        tasks = [begin(batcher, recorder, n) for n in (1, 2, 3, 4)]
        await asyncio.to_thread(recorder.entered.wait, PATIENCE_S)
        recorder.go.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[2], RuntimeError)
        assert [names(outcomes[i]) for i in (0, 1, 3)] == [[query(n).program.name] for n in (1, 2, 4)]


async def test_waiting_requests_are_refused_when_the_service_stops() -> None:
    batcher = Batcher(max_batch_rows=1, max_queued_rows=10, max_wait_s=0.0)
    async with batcher.running():
        recorder, first = await held(batcher)
        tasks = [first, begin(batcher, recorder, 2)]
        # The block ends before the event loop runs this.
        asyncio.get_running_loop().call_soon(recorder.go.set)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert names(outcomes[0]) == [query(1).program.name]  # the running batch is finished
    assert isinstance(outcomes[1], ProblemError) and outcomes[1].status == 503
