"""Micro-batching: queries of several requests are computed together, within the deadline of each request.

The next batch collects queries while one is computed, so batches grow under load. Only a small batch right after
another waits for more queries. Every waiting request gets a share of each batch: a request of ten thousand rows does
not block a request of one row.

A prediction does not depend on the other queries of the batch: the predictor computes in chunks of a fixed shape.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any
from typing import Protocol as Typed

import numpy as np

from cdmpp.features.bulk import FeatureAnswers, FeatureQueries
from cdmpp.prediction import Prediction, Query
from cdmpp_server.deadline import Deadline
from cdmpp_server.problems import ProblemError

_log = logging.getLogger(__name__)
#: A batch of this size is as efficient as a larger one, so it does not wait for more rows.
_WORTH_WAITING_ROWS = 32
#: A request is accepted only if the rows before it need at most this share of its time, at the current rate: a
#: request that would miss its deadline is refused at once, before it costs anything.
_SHARE_OF_DEADLINE = 0.5


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


class _Waiting:
    """A request in the queue."""

    def __init__(self, group: Hashable, queries: Any, compute: _Compute, on_answers: OnAnswers | None = None) -> None:
        self.group, self.queries, self.rows, self.compute = group, queries, len(queries), compute
        self.on_answers = on_answers
        self.future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.taken = 0
        self._missing = self.rows
        self._pieces: list[tuple[int, Any]] = []

    @property
    def left(self) -> int:
        """Rows that no batch has taken yet."""
        return self.rows - self.taken

    def take(self, rows: int) -> _Part:
        start = self.taken
        self.taken = min(self.rows, start + rows)
        return _Part(self, start, self.taken)

    def deliver(self, part: _Part, answers: Any) -> None:
        if self.future.done():
            return  # the request has ended; the other requests of the batch are not affected
        self._pieces.append((part.start, answers))
        self._missing -= part.rows
        if self._missing == 0:
            self.future.set_result([piece for _, piece in sorted(self._pieces, key=itemgetter(0))])

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Part:
    """Rows of one request in a batch."""

    def __init__(self, owner: _Waiting, start: int, end: int) -> None:
        self.owner, self.start, self.end = owner, start, end

    @property
    def rows(self) -> int:
        return self.end - self.start


#: Called with the position of the first row and the predictions of a part, in the thread that computed them.
OnAnswers = Callable[[int, Sequence[Prediction]], None]
#: Computes the parts of a batch that belong to one group; called in a thread.
_Compute = Callable[[list[_Part]], list[Any]]


class Batcher:
    """The queue. All methods belong to one event loop; use it inside :meth:`running`.

    Parameters
    ----------
    max_batch_rows : int
        Maximum rows of a batch.
    max_queued_rows : int
        Maximum waiting rows; a request beyond it is refused (503). With an empty queue, a request of any size is
        accepted.
    max_wait_s : float
        Time for which a small batch right after another waits for more rows, in seconds.
    threads : int
        Batches that are computed at the same time.
    on_batch : callable, optional
        Called with the rows and the seconds of each batch.
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
        self._max_batch_rows, self._max_queued_rows = max_batch_rows, max_queued_rows
        self._max_wait_s, self._threads, self._on_batch = max_wait_s, threads, on_batch
        self._queue: deque[_Waiting] = deque()
        self._queued_rows = 0
        self._work = asyncio.Event()
        self._rows_per_s = 1000.0  # until batches are measured

    @property
    def queued_rows(self) -> int:
        """Waiting rows that are not in a batch yet."""
        return self._queued_rows

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute in separate threads until the block ends; requests that still wait then are refused."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="predict") as executor:
            tasks = [asyncio.create_task(self._serve(executor)) for _ in range(self._threads)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    with suppress(asyncio.CancelledError):
                        await task
                for waiting in self._queue:
                    waiting.fail(ProblemError("overloaded", "the service is being stopped"))

    async def ask(
        self,
        predictor: Predicts,
        queries: Sequence[Query],
        levels: Sequence[float],
        deadline: Deadline,
        on_answers: OnAnswers | None = None,
    ) -> list[Prediction]:
        """Predictions in the order of the queries; ``on_answers`` is called with those of each batch.

        It is called also if the request misses its deadline later, so that a repeated request can continue.

        Raises
        ------
        ProblemError
            503 at once when the queue is full, 504 at the deadline. Then, and when the caller is cancelled,
            rows that are not in a batch yet are not computed.
        """
        if not queries:
            return []
        wanted = tuple(levels)

        def compute(parts: list[_Part]) -> list[Sequence[Prediction]]:
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
        pieces = await self._wait(_Waiting(group, queries, compute, on_answers), deadline)
        return list(chain.from_iterable(pieces))

    async def ask_features(
        self, predictor: PredictsFeatures, queries: FeatureQueries, deadline: Deadline
    ) -> FeatureAnswers:
        """Predictions of rows as arrays, at least one row.

        Raises
        ------
        ProblemError
            503, 504.
        CdmppError
            A row cannot be predicted.
        """

        def compute(parts: list[_Part]) -> list[FeatureAnswers]:
            rows = (np.arange(part.start, part.end) for part in parts)
            return [predictor.predict_features(queries.take(part)) for part in rows]

        pieces = await self._wait(_Waiting(object(), queries, compute), deadline)
        return FeatureAnswers.concat(pieces)

    async def _wait(self, waiting: _Waiting, deadline: Deadline) -> list[Any]:
        """Queue a request until its rows are computed; returns its pieces in order."""
        if deadline.left_s() <= 0:
            raise deadline.exceeded()
        if self._queued_rows and self._queued_rows + waiting.rows > self._max_queued_rows:
            raise self._full()
        self.admit(deadline)
        self._queue.append(waiting)
        self._queued_rows += waiting.rows
        self._work.set()
        try:
            async with asyncio.timeout_at(deadline.at):
                return await waiting.future
        except TimeoutError:
            raise deadline.exceeded() from None
        finally:
            if waiting.left:
                self._queued_rows -= waiting.left
                self._queue.remove(waiting)

    def admit(self, deadline: Deadline) -> None:
        """Refuse (503) a request that would wait too long; from any thread.

        Callers use it before they read a body: under overload, reading requests that will be refused would take
        time from the others.
        """
        left_s = max(deadline.left_s(), 0.0)
        if self._queued_rows > _SHARE_OF_DEADLINE * left_s * self._rows_per_s + self._max_batch_rows:
            raise self._full()

    def _full(self) -> ProblemError:
        seconds = max(1, math.ceil(self._queued_rows / self._rows_per_s))
        return ProblemError(
            "overloaded",
            f"{self._queued_rows} items are waiting in the queue",
            "retry after the seconds of Retry-After, or send fewer items",
            headers={"retry-after": str(min(seconds, 60))},
        )

    def _next_batch(self) -> list[_Part]:
        """Rows of the waiting requests, first come first served, each with at least its share."""
        room = self._max_batch_rows
        share = max(1, room // max(1, len(self._queue)))
        parts: list[_Part] = []
        while self._queue and room:
            parts.append(self._queue.popleft().take(min(share, room)))
            room -= parts[-1].rows
        for part in parts:  # room that other requests did not need
            more = part.owner.take(room)
            part.end = more.end
            room -= more.rows
        self._queued_rows -= sum(part.rows for part in parts)
        # Behind the requests that this batch had no room for.
        self._queue.extend(part.owner for part in parts if part.owner.left)
        return parts

    async def _serve(self, executor: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        ended = -math.inf
        while True:
            while not self._queue:
                self._work.clear()
                await self._work.wait()
            if self._queued_rows < _WORTH_WAITING_ROWS and loop.time() - ended < self._max_wait_s:
                await asyncio.sleep(self._max_wait_s)
                if not self._queue:
                    continue
            parts = self._next_batch()
            rows = sum(part.rows for part in parts)
            started = loop.time()
            await loop.run_in_executor(executor, _compute, loop, parts)
            ended = loop.time()
            if self._on_batch is not None:
                self._on_batch(rows, ended - started)
            if rows >= _WORTH_WAITING_ROWS:  # the rate of a small batch is not the rate under load
                self._rows_per_s += 0.2 * (rows / max(ended - started, 1e-6) - self._rows_per_s)


def _compute(loop: asyncio.AbstractEventLoop, parts: list[_Part]) -> None:
    """Compute a batch, in a thread; the predictor merges equal queries of different requests."""
    groups: dict[Hashable, list[_Part]] = {}
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
                    _compute(loop, [part])
            continue
        for part, answer in zip(group, answers, strict=True):
            loop.call_soon_threadsafe(part.owner.deliver, part, answer)
