"""Micro-batching: queries of several requests are computed together, within the deadline of each request.

The next batch collects queries while one is computed, so batches grow under load. Only a small batch right after
another waits for more queries. :mod:`cdmpp_server.predict.admission` has the order of the requests and decides which
are admitted; small ones that arrive during a long batch are computed beside it.

A prediction does not depend on the other queries of the batch: the predictor computes in chunks of a fixed shape.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any
from typing import Protocol as Typed

import numpy as np

from cdmpp.predict.bulk import FeatureAnswers, FeatureQueries
from cdmpp.predict.prediction import Prediction, Query
from cdmpp_server.concurrency import Deadline
from cdmpp_server.operate.access import current_sender
from cdmpp_server.predict.admission import AdmissionQueue, Batch, RefusedError
from cdmpp_server.predict.lane import Ticket
from cdmpp_server.problems import ProblemError

_log = logging.getLogger(__name__)

#: Called with the position of the first row and the predictions of a part, in the thread that computed them.
OnAnswers = Callable[[int, Sequence[Prediction]], None]
#: Computes the parts of a batch that belong to one group; called in a thread.
Compute = Callable[[list["Part"]], list[Any]]


class Waiting:
    """A request in the queue."""

    def __init__(self, group: Hashable, queries: Any, compute: Compute, on_answers: OnAnswers | None = None) -> None:
        self.group, self.queries, self.rows, self.compute = group, queries, len(queries), compute
        self.on_answers = on_answers
        self.future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.taken = 0
        self._missing = self.rows
        self._pieces: list[tuple[int, Any]] = []

    def take(self, rows: int) -> Part:
        start = self.taken
        self.taken = start + rows
        return Part(self, start, self.taken)

    def deliver(self, part: Part, answers: Any) -> None:
        if self.future.done():
            return  # the request has ended; the other requests of the batch are not affected
        self._pieces.append((part.start, answers))
        self._missing -= part.rows
        if self._missing == 0:
            self.future.set_result([piece for _, piece in sorted(self._pieces, key=itemgetter(0))])

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Part:
    """Rows of one request in a batch."""

    def __init__(self, owner: Waiting, start: int, end: int) -> None:
        self.owner, self.start, self.end = owner, start, end

    @property
    def rows(self) -> int:
        return self.end - self.start


def compute_batch(loop: asyncio.AbstractEventLoop, parts: list[Part]) -> None:
    """Compute a batch, in a thread; the predictor merges equal queries of different requests."""
    groups: dict[Hashable, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.owner.group, []).append(part)
    for group in groups.values():
        try:
            answers = group[0].owner.compute(group)
        except Exception as error:
            if len(group) == 1:
                loop.call_soon_threadsafe(group[0].owner.fail, error)
            else:
                # One request may have caused the failure: compute each separately.
                _log.warning("a batch of %d requests failed; each is computed separately", len(group))
                for part in group:
                    compute_batch(loop, [part])
            continue
        for part, answer in zip(group, answers, strict=True):
            loop.call_soon_threadsafe(part.owner.deliver, part, answer)


#: A batch of this size is as efficient as a larger one, so it does not wait for more rows.
_WORTH_WAITING_ROWS = 32


class Predicts(Typed):
    """Interface of a predictor for the queue; called in a thread."""

    def predict_queries(self, queries: Sequence[Query], quantiles: Sequence[float]) -> list[Prediction]:
        """Predictions in order, with errors in place."""
        ...


class PredictsFeatures(Typed):
    """Interface of a predictor for rows as arrays."""

    def predict_features(self, queries: FeatureQueries) -> FeatureAnswers:
        """Predictions in order."""
        ...


class Batcher:
    """The queue. All methods belong to one event loop; use it inside :meth:`running`.

    ``max_queued_rows``: waiting rows, beyond which a request is refused (503); with an empty queue, a request of any
    size is accepted. ``max_wait_s``: time for which a small batch right after another waits for more rows. ``threads``:
    batches that are computed at the same time. ``on_batch``: called with the rows and the seconds of each batch.
    """

    def __init__(
        self,
        *,
        max_batch_rows: int,
        max_queued_rows: int,
        max_wait_s: float,
        threads: int = 1,
        on_batch: Callable[[int, float], None] | None = None,
    ) -> None:
        self._max_wait_s, self._threads, self._on_batch = max_wait_s, threads, on_batch
        self._queue = AdmissionQueue(max_batch_rows, max_queued_rows, threads)
        self._waiting: set[Waiting] = set()
        self._work, self._small_work = asyncio.Event(), asyncio.Event()

    @property
    def queued_rows(self) -> int:
        """Rows of admitted requests that are not in a batch yet."""
        return self._queue.rows

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute in separate threads until the block ends; requests that still wait then are refused."""
        with ThreadPoolExecutor(self._threads + 1, thread_name_prefix="predict") as executor:
            tasks = [asyncio.create_task(self._serve(executor)) for _ in range(self._threads)]
            tasks.append(asyncio.create_task(self._serve_beside(executor)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    with suppress(asyncio.CancelledError):
                        await task
                # Requests whose last rows are being computed still get them.
                for waiting in [waiting for waiting in self._waiting if waiting.taken < waiting.rows]:
                    waiting.fail(ProblemError("overloaded", "the service is being stopped"))

    def check_unread(self, body_bytes: int, deadline: Deadline) -> None:
        """Refuse (503) a request before its body is read, if earlier bodies of its sender predict a refusal.

        Reading a request that will be refused would take time from the others.
        """
        try:
            self._queue.check_unread(current_sender.get(), body_bytes, deadline.left_s(), _now())
        except RefusedError as refused:
            raise self._overloaded(refused) from None

    @contextmanager
    def admitted(self, rows: int, work: float, deadline: Deadline) -> Iterator[Ticket]:
        """Give a request its place in the queue while it is read; pass the place to :meth:`ask`.

        ``work``: cost of the rows, in rows of a new operator.
        Raises ProblemError: 503 if it would miss its deadline or delay others beyond theirs; 504 if its deadline has
        passed.
        """
        if deadline.left_s() <= 0:
            raise deadline.exceeded()
        try:
            ticket = self._queue.admit(current_sender.get(), rows, work, deadline.at, _now())
        except RefusedError as refused:
            raise self._overloaded(refused) from None
        try:
            yield ticket
        finally:
            self._queue.remove(ticket)

    def learn(self, body_bytes: int, work: float) -> None:
        """Keep the work of a body of the current sender, for :meth:`check_unread`."""
        self._queue.learn(current_sender.get(), body_bytes, work)

    async def ask(
        self,
        predictor: Predicts,
        queries: Sequence[Query],
        levels: Sequence[float],
        deadline: Deadline,
        on_answers: OnAnswers | None = None,
        place: tuple[Ticket, float] | None = None,
    ) -> list[Prediction]:
        """Predictions in the order of the queries; ``on_answers`` is called with those of each batch.

        It is called also if the request misses its deadline later, so that a repeated request can continue.
        ``place`` is a ticket of :meth:`admitted` and the work of the queries; without it the request is admitted here.

        Raises ProblemError: 503 at once if the request is not admitted, 504 at the deadline. Then, and when the caller
        is cancelled, rows that are not in a batch yet are not computed.
        """
        if not queries:
            return []
        wanted = tuple(levels)

        def compute(parts: list[Part]) -> list[Sequence[Prediction]]:
            batch = [part.owner.queries[part.start : part.end] for part in parts]
            answers = predictor.predict_queries(list(chain.from_iterable(batch)), wanted)
            if len(answers) != sum(map(len, batch)):
                raise RuntimeError(f"{len(answers)} answers to {sum(map(len, batch))} queries")
            ends = list(accumulate(map(len, batch), initial=0))
            pieces: list[Sequence[Prediction]] = [answers[start:end] for start, end in pairwise(ends)]
            for part, piece in zip(parts, pieces, strict=True):
                if part.owner.on_answers is not None:
                    part.owner.on_answers(part.start, piece)
            return pieces

        # Requests to the same model with the same quantiles are computed together.
        group = (id(predictor), wanted)
        pieces = await self._wait(Waiting(group, queries, compute, on_answers), deadline, place)
        return list(chain.from_iterable(pieces))

    async def ask_features(
        self, predictor: PredictsFeatures, queries: FeatureQueries, deadline: Deadline
    ) -> FeatureAnswers:
        """Predictions of rows as arrays, at least one row.

        Raises ProblemError: 503, 504; CdmppError: a row cannot be predicted.
        """

        def compute(parts: list[Part]) -> list[FeatureAnswers]:
            rows = (np.arange(part.start, part.end) for part in parts)
            return [predictor.predict_features(queries.take(part)) for part in rows]

        pieces = await self._wait(Waiting(object(), queries, compute), deadline)
        return FeatureAnswers.concat(pieces)

    async def _wait(self, waiting: Waiting, deadline: Deadline, place: tuple[Ticket, float] | None = None) -> list[Any]:
        """Queue a request until its rows are computed; returns its pieces in order."""
        if place is None:
            with self.admitted(waiting.rows, waiting.rows, deadline) as ticket:
                return await self._wait(waiting, deadline, (ticket, waiting.rows))
        self._queue.ready(place[0], waiting.rows, place[1], waiting)
        self._waiting.add(waiting)
        self._work.set()
        self._small_work.set()
        try:
            async with asyncio.timeout_at(deadline.at):
                return await waiting.future
        except TimeoutError:
            raise deadline.exceeded() from None
        finally:
            self._waiting.discard(waiting)
            self._queue.remove(place[0])

    def _overloaded(self, refused: RefusedError) -> ProblemError:
        return ProblemError(
            "overloaded",
            f"{self._queue.rows} items are waiting in the queue",
            "retry after the seconds of Retry-After, or send fewer items",
            headers={"retry-after": str(max(1, math.ceil(refused.retry_after_s)))},
        )

    async def _serve(self, executor: ThreadPoolExecutor) -> None:
        ended = -math.inf
        while True:
            while not self._queue.ready_rows:
                self._work.clear()
                await self._work.wait()
            if self._queue.ready_rows < _WORTH_WAITING_ROWS and _now() - ended < self._max_wait_s:
                await asyncio.sleep(self._max_wait_s)
                if not self._queue.ready_rows:
                    continue
            batch = self._queue.batch(_now())
            self._small_work.set()
            await self._run(executor, batch)
            ended = _now()
            self._queue.ended(batch, ended)

    async def _serve_beside(self, executor: ThreadPoolExecutor) -> None:
        while True:
            self._small_work.clear()
            wait_s = self._queue.beside_in_s(_now())
            if wait_s is None:
                await self._small_work.wait()
            elif wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                batch = self._queue.beside(_now())
                await self._run(executor, batch)
                self._queue.beside_ended(batch, _now())

    async def _run(self, executor: ThreadPoolExecutor, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        parts = [ticket.owner.take(rows) for ticket, rows in batch.parts]
        started = _now()
        await loop.run_in_executor(executor, compute_batch, loop, parts)
        if self._on_batch is not None:
            self._on_batch(batch.rows, _now() - started)


def _now() -> float:
    return asyncio.get_running_loop().time()
