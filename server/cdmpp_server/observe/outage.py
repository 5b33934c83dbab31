"""Errors of the database: every refused call becomes one exception, and an outage a few lines of the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from cdmpp_server.observe.tables import SchemaVersionError

_log = logging.getLogger(__name__)
#: Minimum time between two lines about failed calls, in seconds.
SAY_AGAIN_S = 60.0


class StoreUnavailableError(Exception):
    """The database cannot be reached, read or written; nothing of the call was stored."""


class AsUnavailable:
    """Context that converts errors of the database to :class:`StoreUnavailableError`. Safe between threads.

    The log gets the original message of the first failure, at most one more line per :data:`SAY_AGAIN_S` with the
    number of failures, and one line when calls succeed again.

    Parameters
    ----------
    verb : str
        What the calls do: "read" or "written".
    clock : callable
        Returns monotonic seconds.
    """

    def __init__(self, verb: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._verb, self._clock = verb, clock
        self._lock = threading.Lock()
        self._said_at: float | None = None
        self._unsaid = 0
        self._out = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            if self._out:
                self._back()
        elif isinstance(error, SQLAlchemyError | OSError | SchemaVersionError):
            # `orig` omits the statement and its parameters, which are long.
            self._failed(getattr(error, "orig", None) or error)
            raise StoreUnavailableError(f"the database cannot be {self._verb}") from error

    def _failed(self, cause: BaseException) -> None:
        with self._lock:
            now = self._clock()
            if self._said_at is not None and now - self._said_at < SAY_AGAIN_S:
                self._unsaid += 1
                return
            before = f" ({self._unsaid} more calls failed since the last such line)" if self._unsaid else ""
            self._said_at, self._unsaid, self._out = now, 0, True
        _log.error("the database cannot be %s: %s%s", self._verb, str(cause).replace("\n", " ")[:500], before)

    def _back(self) -> None:
        with self._lock:
            if not self._out:
                return
            self._out, failed = False, self._unsaid
            self._unsaid = 0
        _log.warning("the database can be %s again; %d more calls had failed", self._verb, failed)
