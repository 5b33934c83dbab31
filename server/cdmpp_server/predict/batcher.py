"""Micro-batching: queries of many requests computed together, each request by its own deadline.

While a batch is computed the next one gathers, so under load batches grow by themselves; only a small
batch right behind another waits a moment for company. Every waiting request gets its share of each
batch: a request of ten thousand rows does not hold up one of a single row.

An answer does not depend on who shares the batch: the predictor computes in chunks of a fixed shape.
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
#: A batch of this size computes as well as a larger one: it waits for nobody.
_WORTH_WAITING_ROWS = 32
#: A request is taken only where the rows before it need no more than this share of its time, at the present
#: rate: one that would be late in the end is better told at once, before it costs anything.
_SHARE_OF_DEADLINE = 0.5


class Predicts(Typed):
    """What the queue needs of a predictor; called in a thread."""

    def predict_queries(self, queries: Sequence[Query], quantiles: Sequence[float]) -> list[Prediction]:
        """Answers in order, an error in its row."""
        ...


class PredictsFeatures(Typed):
    """The same for rows as arrays."""

    def predict_features(self, queries: FeatureQueries) -> FeatureAnswers:
        """Answers in order."""
        ...


class _Waiting:
    """A request in the queue."""

    def __init__(self, group: Hashable, asked: Any, compute: _Compute, on_answers: OnAnswers | None = None) -> None:
        self.group, self.asked, self.rows, self.compute = group, asked, len(asked), compute
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
            return  # the request has gone; the others of the batch have their answers all the same
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


#: Told the first row's position and the answers of a batch's part, in the thread that computed them.
OnAnswers = Callable[[int, Sequence[Prediction]], None]
#: Answers to the parts of a batch that belong to one group, each as its request wants them; in a thread.
_Compute = Callable[[list[_Part]], list[Any]]


class Batcher:
    """The queue. All methods belong to one event loop; use it inside :meth:`running`.

    Parameters
    ----------
    max_batch_rows : int
        Rows computed together.
    max_queued_rows : int
        Rows that may wait; a request that would make them more is refused (503). One that finds the queue
        empty is taken whatever its size.
    max_wait_s : float
        How long a small batch right behind another waits for company.
    threads : int
        Batches computed at a time.
    on_batch : callable, optional
        Told the rows of each batch and the seconds that it took.
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
        self._rows_per_s = 1000.0  # until batches tell

    @property
    def queued_rows(self) -> int:
        """Rows that wait and that no batch has taken."""
        return self._queued_rows

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute in threads of its own until the block ends; what still waits then is refused."""
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
        """Answers in the order of the queries; ``on_answers`` hears those of each batch before.

        It hears them also where the request is refused later on: whoever keeps them finds the same request,
        sent again, begun.

        Raises
        ------
        ProblemError
            503 at once when the queue is full, 504 at the deadline. Then, and when the caller is cancelled,
            what no batch has taken yet is not computed any more.
        """
        if not queries:
            return []
        wanted = tuple(levels)

        def compute(parts: list[_Part]) -> list[Sequence[Prediction]]:
            asked = [part.owner.asked[part.start : part.end] for part in parts]
            answers = predictor.predict_queries(list(chain.from_iterable(asked)), wanted)
            if len(answers) != sum(map(len, asked)):
                raise RuntimeError(f"{len(answers)} answers to {sum(map(len, asked))} queries")
            ends = list(accumulate(map(len, asked), initial=0))
            pieces: list[Sequence[Prediction]] = [answers[start:end] for start, end in pairwise(ends)]
            for part, piece in zip(parts, pieces, strict=True):
                if part.owner.on_answers is not None:
                    part.owner.on_answers(part.start, piece)
            return pieces

        # Whatever else a request asks of the same model at the same levels is computed together with this.
        group = (id(predictor), wanted)
        pieces = await self._wait(_Waiting(group, queries, compute, on_answers), deadline)
        return list(chain.from_iterable(pieces))

    async def ask_features(
        self, predictor: PredictsFeatures, queries: FeatureQueries, deadline: Deadline
    ) -> FeatureAnswers:
        """The same for rows as arrays, at least one.

        Raises
        ------
        ProblemError
            503, 504.
        CdmppError
            A row is none that the predictor can answer.
        """

        def compute(parts: list[_Part]) -> list[FeatureAnswers]:
            rows = (np.arange(part.start, part.end) for part in parts)
            return [predictor.predict_features(queries.take(each)) for each in rows]

        pieces = await self._wait(_Waiting(object(), queries, compute), deadline)
        return FeatureAnswers.concat(pieces)

    async def _wait(self, waiting: _Waiting, deadline: Deadline) -> list[Any]:
        """Queue a request until its rows have been computed; its pieces in order."""
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
        """Refuse (503) what would wait too long; from any thread.

        For callers that want to know before they read what was sent: under overload reading what cannot be
        answered would take the time of what can.
        """
        left_s = max(deadline.left_s(), 0.0)
        if self._queued_rows > _SHARE_OF_DEADLINE * left_s * self._rows_per_s + self._max_batch_rows:
            raise self._full()

    def _full(self) -> ProblemError:
        seconds = max(1, math.ceil(self._queued_rows / self._rows_per_s))
        return ProblemError(
            "overloaded",
            f"{self._queued_rows} items wait to be computed",
            "come back after the seconds of Retry-After, or send fewer items",
            headers={"retry-after": str(min(seconds, 60))},
        )

    def _next_batch(self) -> list[_Part]:
        """Rows of as many requests as wait, first come first served, each with its share at least."""
        room = self._max_batch_rows
        share = max(1, room // max(1, len(self._queue)))
        parts: list[_Part] = []
        while self._queue and room:
            parts.append(self._queue.popleft().take(min(share, room)))
            room -= parts[-1].rows
        for part in parts:  # what others left of their share
            more = part.owner.take(room)
            part.end = more.end
            room -= more.rows
        self._queued_rows -= sum(part.rows for part in parts)
        # Behind those that this batch had no room for.
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
            if rows >= _WORTH_WAITING_ROWS:  # a batch of one says nothing of the rate under load
                self._rows_per_s += 0.2 * (rows / max(ended - started, 1e-6) - self._rows_per_s)


def _compute(loop: asyncio.AbstractEventLoop, parts: list[_Part]) -> None:
    """Answer a batch, in a thread; equal queries of different requests are the predictor's matter."""
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
                # A bug that one request met is not its neighbours': each alone.
                _log.warning("a batch of %d requests failed; each is computed alone", len(group))
                for part in group:
                    _compute(loop, [part])
            continue
        for part, answer in zip(group, answers, strict=True):
            loop.call_soon_threadsafe(part.owner.deliver, part, answer)
