"""Writers of one process share transactions: a commit waits for the disk, and many can wait for one."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from cdmpp_server.observe.store import Observation, StoreUnavailableError

#: Observations of one transaction; those that come meanwhile go into the next one.
MAX_ROWS = 20_000


class FullError(Exception):
    """As many observations wait to be written as may."""


class Writer:
    """A thread that writes what waits, all of it in one transaction.

    Parameters
    ----------
    add : callable
        :meth:`cdmpp_server.observe.store.Store.add`.
    max_waiting : int
        Observations that may wait; one call with more than these is still taken when nothing waits.
    """

    def __init__(self, add: Callable[[Sequence[Observation]], list[str]], max_waiting: int) -> None:
        self._add, self._max_waiting = add, max_waiting
        self._waiting: deque[tuple[Sequence[Observation], Future[list[str]]]] = deque()
        self._rows = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="observations", daemon=True)
        self._thread.start()

    async def write(self, observed: Sequence[Observation]) -> list[str]:
        """Identities of the observations, once they are on the disk.

        Raises
        ------
        FullError
            Too many wait.
        StoreUnavailableError
            The database cannot be written; none of them was kept.
        """
        future: Future[list[str]] = Future()
        with self._changed:
            if self._closed:
                raise StoreUnavailableError("the service is being stopped")
            if self._rows and self._rows + len(observed) > self._max_waiting:
                raise FullError(f"{self._rows} observations wait to be written")
            self._waiting.append((observed, future))
            self._rows += len(observed)
            self._changed.notify()
        # Shielded: what a client that went away has sent is written like the rest.
        return await asyncio.shield(asyncio.wrap_future(future))

    def close(self) -> None:
        """Write what waits, then end the thread."""
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
            try:
                ids = self._add([observation for observed, _ in calls for observation in observed])
            except Exception as error:
                for _, future in calls:
                    future.set_exception(error)
            else:
                start = 0
                for observed, future in calls:
                    future.set_result(ids[start : start + len(observed)])
                    start += len(observed)
            with self._changed:
                self._rows -= rows
