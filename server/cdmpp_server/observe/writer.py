"""Group commit: concurrent writes of one process share a transaction, because a commit waits for the disk."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from cdmpp_server.observe.outage import StoreUnavailableError
from cdmpp_server.observe.records import Observation, Stored

#: Maximum number of observations in one transaction.
MAX_ROWS = 20_000


class FullError(Exception):
    """The queue of observations is full."""


class Writer:
    """A thread that writes all waiting observations in one transaction.

    Parameters
    ----------
    add : callable
        :meth:`cdmpp_server.observe.store.Store.add`.
    max_waiting : int
        Maximum number of waiting observations; a larger call is accepted if nothing waits.
    """

    def __init__(self, add: Callable[[Sequence[Observation]], list[Stored]], max_waiting: int) -> None:
        self._add, self._max_waiting = add, max_waiting
        self._waiting: deque[tuple[Sequence[Observation], Future[list[Stored]]]] = deque()
        self._rows = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="observations", daemon=True)
        self._thread.start()

    async def write(self, observed: Sequence[Observation]) -> list[Stored]:
        """Store observations and return their results once they are on disk.

        Raises
        ------
        FullError
            Too many observations wait.
        StoreUnavailableError
            The database cannot be written; none of the observations was stored.
        """
        future: Future[list[Stored]] = Future()
        with self._changed:
            if self._closed:
                raise StoreUnavailableError("the service is being stopped")
            if self._rows and self._rows + len(observed) > self._max_waiting:
                raise FullError(f"{self._rows} observations wait to be written")
            self._waiting.append((observed, future))
            self._rows += len(observed)
            self._changed.notify()
        # Shielded: observations are written even if the client disconnects.
        return await asyncio.shield(asyncio.wrap_future(future))

    def close(self) -> None:
        """Write the waiting observations, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                calls = [self._waiting.popleft()]
                rows = len(calls[0][0])
                while self._waiting and rows + len(self._waiting[0][0]) <= MAX_ROWS:
                    calls.append(self._waiting.popleft())
                    rows += len(calls[-1][0])
            error: Exception | None = None
            results: list[Stored] = []
            try:
                results = self._add([observation for observed, _ in calls for observation in observed])
            except Exception as failure:
                error = failure
            # Before the callers continue: their rows no longer take room in the queue.
            with self._changed:
                self._rows -= rows
            for observed, future in calls:
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(results[: len(observed)])
                    results = results[len(observed) :]
