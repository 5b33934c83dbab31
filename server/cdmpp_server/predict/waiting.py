"""Requests in the queue of predictions, and the computation of a batch of their rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any

from cdmpp.predict.prediction import Prediction

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
