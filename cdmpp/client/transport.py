"""HTTP of the clients: calls, responses, and which failures are retried."""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cdmpp.errors import DeadlineExceededError, MissingDependencyError, ServiceError, install_hint

try:
    import httpx2
except ModuleNotFoundError:
    raise MissingDependencyError(
        "a client of a service needs the package httpx2, which is not installed", hint=install_hint("client")
    ) from None

__all__ = ["JSON", "Attempts", "HttpAnswer", "HttpCall", "Steps", "httpx2", "options"]

JSON = "application/json"
TIMEOUT_HEADER = "x-request-timeout-s"
#: First and longest wait between attempts, in seconds; each wait is drawn from the upper half of its range.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
#: Status codes of an overloaded or restarting service, or of a proxy in front of it.
_LATER = (429, 502, 503)
#: A proxy sends this code also when the service received the request and only the response was lost.
_BROKEN_OFF = (502,)
#: Errors before the request was sent, so that a second attempt cannot count twice.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_TIMED_OUT = (httpx2.ReadTimeout, httpx2.WriteTimeout, TimeoutError)


@dataclass(frozen=True)
class HttpCall:
    """One request."""

    method: str
    path: str
    body: bytes | None = None
    #: Media type of the body.
    media: str = JSON
    params: Sequence[tuple[str, str]] = ()
    #: Not idempotent: sent again only if the first attempt certainly had no effect.
    once: bool = False
    #: Further headers.
    headers: Sequence[tuple[str, str]] = ()
    #: Seconds to wait before sending.
    after_s: float = 0.0
    #: Time limit of the whole operation, if this is its first call; default: the client's.
    limit_s: float | None = None


@dataclass(frozen=True)
class HttpAnswer:
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: bytes


T = TypeVar("T")
#: An operation: yields calls and receives their responses.
Steps = Generator[HttpCall, HttpAnswer, T]


class Attempts:
    """Retry policy of one operation of the service at ``url``.

    ``timeout_s``: time limit of all attempts together. ``retries``: further attempts after the first, for each call.
    """

    def __init__(self, url: str, timeout_s: float, retries: int) -> None:
        self._url, self._timeout_s, self._retries = url, timeout_s, retries
        self._ends = time.monotonic() + timeout_s
        self._failed = 0

    def actions(self, steps: Steps[T]) -> Generator[HttpCall | float, HttpAnswer | Exception | None, T]:
        """Calls to send and seconds to wait until an operation is done.

        A call receives its response or the error of the transport, and a wait receives None.
        """
        try:
            call = next(steps)
            if call.limit_s is not None:
                self._timeout_s, self._ends = call.limit_s, time.monotonic() + call.limit_s
            while True:
                answer = yield from self._attempts(call)
                call = steps.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result

    def _attempts(self, call: HttpCall) -> Generator[HttpCall | float, HttpAnswer | Exception | None, HttpAnswer]:
        self._failed = 0
        if call.after_s:
            yield min(call.after_s, self.left_s())
        while True:
            answer = yield call
            if isinstance(answer, HttpAnswer):
                wait_s = self._after_answer(answer, call)
                if wait_s is None:
                    return answer
            else:
                assert answer is not None
                wait_s = self._after_error(answer, call)
            yield wait_s

    def left_s(self) -> float:
        """Remaining seconds.

        Raises DeadlineExceededError: no time is left.
        """
        left = self._ends - time.monotonic()
        if left <= 0:
            raise self._too_late()
        return left

    def _too_late(self) -> DeadlineExceededError:
        """The error for an operation that ran out of time."""
        return DeadlineExceededError(
            f"no answer from {self._url} within {self._timeout_s:g} s",
            hint="send fewer items, or create the client with a longer timeout_s",
        )

    def options(self, call: HttpCall) -> dict[str, Any]:
        """Arguments of httpx2 for a call; a header has the remaining time, after which the service stops computing."""
        left_s = self.left_s()
        media = {} if call.body is None else {"content-type": call.media}
        return {
            "content": call.body,
            "params": list(call.params) or None,
            "headers": {TIMEOUT_HEADER: f"{left_s:.3f}", **media, **dict(call.headers)},
            "timeout": left_s,
        }

    def _after_answer(self, answer: HttpAnswer, call: HttpCall) -> float | None:
        """Seconds to wait before another attempt; None if this response is final."""
        if answer.status not in _LATER or (call.once and answer.status in _BROKEN_OFF):
            return None
        return self._wait(_retry_after_s(answer.headers))

    def _after_error(self, error: Exception, call: HttpCall) -> float:
        """Seconds to wait before another attempt.

        Raises DeadlineExceededError, ServiceError: there is no further attempt.
        """
        if isinstance(error, _TIMED_OUT):
            raise self._too_late() from None
        repeatable = not call.once or isinstance(error, _NOT_SENT)
        wait = self._wait(0.0) if repeatable else None
        if wait is None:
            may = "" if repeatable else "; it may have been received"
            raise ServiceError(
                f"no answer from {self._url} ({_reason(error)}){may}",
                hint="check that the service runs there: GET /readyz",
            ) from None
        return wait

    def _wait(self, at_least_s: float) -> float | None:
        """Seconds to wait; None when no attempts are left or the next would be too late."""
        if self._failed >= self._retries:
            return None
        step = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**self._failed)
        self._failed += 1
        # Random, so that clients that were refused together do not retry together.
        wait = at_least_s + step * random.uniform(0.5, 1.0)
        return wait if wait < self._ends - time.monotonic() else None


def _retry_after_s(headers: Mapping[str, str]) -> float:
    # A date is possible too; the service here sends seconds.
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0.0


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def options(url: str, api_key: str | None, transport: Any) -> dict[str, Any]:
    """Arguments of httpx2's clients.

    Raises ServiceError: ``url`` is not an HTTP URL.
    """
    headers = {"accept": "*/*", "user-agent": "cdmpp-client"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):
        parsed = httpx2.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServiceError(f"{url!r} is not the URL of a service", hint="for example http://127.0.0.1:8000")
    return {
        "base_url": parsed,
        "headers": headers,
        # Each attempt gets the remaining time of the operation.
        "timeout": None,
        "follow_redirects": False,
        "limits": httpx2.Limits(max_connections=100, max_keepalive_connections=20),
        **({} if transport is None else {"transport": transport}),
    }
