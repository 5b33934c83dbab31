"""Order and admission of the queue. Callers pass the time; it uses no clock and no event loop.

A batch takes requests in order of arrival, in equal shares between senders. A share of each batch is for small
requests, which therefore wait for one batch and not for the queue. A request is admitted if it would be finished in
time in this order, at the rate of the worst recent second, and if no admitted request would then miss its deadline.

While most requests are refused, the queue is kept short: a longer one would not get more of them answered, only each
of them later, and it would delay the requests after the overload.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from cdmpp.utils.lru import Lru
from cdmpp_server.predict.lane import Lane, Ticket

#: Cost of a row until the first batch is measured, in seconds.
FIRST_ROW_S = 1e-3
#: Rows whose cost equals the fixed cost of a batch. Measured on one core: 4.5 ms for 1 row, 57 ms for 256.
FIXED_ROWS = 32
#: Batches of this much time are averaged, because single batches vary too much to predict a queue of seconds.
_WINDOW_S = 1.0
#: A faster rate is used after this much time.
_RISE_S = 5.0
#: Time constant of the work that was refused lately, and how many times the capacity it has to be.
_REFUSED_S, _REFUSED_FACTOR = 2.0, 2.0


class Rate:
    """Estimate of the seconds per row of new work, from the batches of a loaded queue.

    The estimate follows a slower second at once and a faster one slowly, because an admission that counts on too high
    a rate cannot be taken back.

    ``full_rows``: batches from this size on are measured. A smaller batch counts only until the first of them, with its
    fixed cost taken off.
    """

    def __init__(self, full_rows: float) -> None:
        self.row_s = FIRST_ROW_S
        self._full_rows = full_rows
        self._measured = False
        self._recent: deque[tuple[float, float]] = deque()
        self._rows = self._seconds = 0.0

    def batch(self, rows: float, seconds: float) -> None:
        """Count a batch: its rows, and the time since it began or since another one ended."""
        if rows < self._full_rows:
            if not self._measured:
                self.row_s = seconds / (rows + FIXED_ROWS)
            return
        self._recent.append((rows, seconds))
        self._rows += rows
        self._seconds += seconds
        while self._seconds - self._recent[0][1] >= _WINDOW_S:
            old_rows, old_seconds = self._recent.popleft()
            self._rows -= old_rows
            self._seconds -= old_seconds
        recent_s = self._seconds / self._rows
        if recent_s > self.row_s or not self._measured:
            self.row_s = recent_s
        else:
            self.row_s += (recent_s - self.row_s) * min(1.0, seconds / _RISE_S)
        self._measured = True


class Refusals:
    """Work that was refused lately."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Count a refused request and the seconds that it would have taken."""
        self._seconds = self._left(now) + seconds
        self._at = now

    def many(self, now: float) -> bool:
        """Whether more than twice as much is refused as can be answered."""
        return self._left(now) > _REFUSED_FACTOR * _REFUSED_S

    def _left(self, now: float) -> float:
        return self._seconds * math.exp((self._at - now) / _REFUSED_S)


MAX_RETRY_AFTER_S = 60.0
#: Senders whose history is kept.
_MAX_SENDERS = 10_000
#: Bodies whose work is kept. Of so many requests in a row that would be refused unread, one is read.
_BODIES = 8
#: Smaller bodies are always read: that costs no more than a refusal.
_SMALL_BYTES = 4096


@dataclass
class _History:
    work_per_byte: deque[float] = field(default_factory=lambda: deque(maxlen=_BODIES))
    unread: int = 0
    promised: float = -math.inf


class Senders:
    """History of each sender."""

    def __init__(self) -> None:
        self._histories: Lru[_History] = Lru(_MAX_SENDERS)

    def learn(self, sender: str, body_bytes: int, work: float) -> None:
        """Keep the work of a body that was read; 0 if all its answers were cached."""
        self._history(sender).work_per_byte.append(work / max(1, body_bytes))

    def least_work(self, sender: str, body_bytes: int) -> float:
        """Estimated work of a body that was not read, from the recent body with least work per byte."""
        history = self._histories.get(sender)
        if body_bytes < _SMALL_BYTES or history is None or len(history.work_per_byte) < _BODIES:
            return 0.0
        return min(history.work_per_byte) * body_bytes

    def read_after_all(self, sender: str) -> bool:
        """Whether to read a body that would be refused unread: one in a few, because the sender may have changed."""
        history = self._history(sender)
        history.unread += 1
        return history.unread % _BODIES == 0

    def retry_after_s(self, sender: str, wait_s: float, work_s: float, now: float) -> float:
        """Seconds after which a refused request should be sent again.

        ``wait_s``: seconds until there is room for it. ``work_s``: seconds that it takes. The next refused request of
        this sender gets a Retry-After that is longer by this: otherwise all would be sent again at once, and most be
        refused again.
        """
        history = self._history(sender)
        at = min(max(history.promised, now + wait_s), now + MAX_RETRY_AFTER_S)
        history.promised = at + work_s
        return at - now

    def _history(self, sender: str) -> _History:
        history = self._histories.get(sender)
        if history is None:
            history = _History()
            self._histories.put(sender, history, 1)
        return history


#: Share of a batch for small requests while others wait, and the largest small request as a share of a batch.
SMALL_SHARE = 1 / 8
#: A request has to be finished within the first share of its time. The rest is for requests of other senders, which
#: may delay it up to the second share, and for errors of the prediction.
OWN_SHARE, DELAYED_SHARE = 0.7, 0.9
#: While most requests are refused, a request may wait for so long before its first row, in seconds.
STRAINED_S = 1.0
#: Small requests that arrive during a batch are computed beside it, for at most this share of the time.
BESIDE_SHARE = 0.2
#: Cost of a row whose figures are cached, in rows of a new operator. All other rows (new devices, cached features,
#: arrays, adapted models) cost 0.7 to 1.3 of a new operator, which the measured rate covers.
CACHED_WORK = 1 / 32


class RefusedError(Exception):
    """A request that would miss its deadline, or make another one miss it.

    ``retry_after_s``: seconds after which there is probably room for it.
    """

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"retry in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


@dataclass(eq=False)
class Batch:
    """Rows that are being computed: how many of which request, and their work together."""

    parts: list[tuple[Ticket, int]]
    work: float
    started: float
    large: bool

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(rows for _, rows in self.parts)


class AdmissionQueue:
    """Waiting requests: admission and order.

    ``max_queued_rows``: maximum waiting rows; with nothing waiting, a request of any size is admitted. ``threads``:
    batches that are computed at the same time.
    """

    def __init__(self, max_batch_rows: int, max_queued_rows: int, threads: int = 1) -> None:
        self._max_batch_rows, self._max_queued_rows, self._threads = max_batch_rows, max_queued_rows, threads
        self.small_rows = max(1, int(SMALL_SHARE * max_batch_rows))
        self._small, self._large = Lane(), Lane()
        self._rate, self._senders = Rate(max_batch_rows / 2), Senders()
        self._small_refused, self._large_refused = Refusals(), Refusals()
        self._running: list[Batch] = []
        self._beside: Batch | None = None
        self._beside_work, self._beside_from = 0.0, -math.inf
        self._ended = -math.inf

    @property
    def rows(self) -> int:
        """Rows that no batch has taken."""
        return self._small.rows + self._large.rows

    @property
    def ready_rows(self) -> int:
        """Rows of requests that have been read and that no batch has taken."""
        return self._small.ready_rows + self._large.ready_rows

    # -- admission --------------------------------------------------------------------------------------
    def admit(self, sender: str, rows: int, work: float, until: float, now: float) -> Ticket:
        """Add a request, which may still have to be read. Raises RefusedError: there is no room for it."""
        wait_s = self._wait_s(sender, rows, work, until - now, now)
        if wait_s > 0:
            raise self._refused(sender, rows, work, wait_s, now)
        ticket = Ticket(sender, rows, work, until, small=rows <= self.small_rows)
        self._lane(ticket).add(ticket)
        return ticket

    def check_unread(self, sender: str, body_bytes: int, left_s: float, now: float) -> None:
        """Refuse a request by the length of its body, if earlier bodies of its sender show that it would be refused.

        Raises RefusedError: the request would be refused.
        """
        work = self._senders.least_work(sender, body_bytes)
        wait_s = self._wait_s(sender, int(work), work, left_s, now) if work >= 1 else 0.0
        if wait_s > 0 and not self._senders.read_after_all(sender):
            raise self._refused(sender, int(work), work, wait_s, now)

    def learn(self, sender: str, body_bytes: int, work: float) -> None:
        """Keep the work of a body that was read, for :meth:`check_unread`."""
        self._senders.learn(sender, body_bytes, work)

    def ready(self, ticket: Ticket, rows: int, work: float, owner: Any) -> None:
        """A request has been read and has so many rows, which batches may take from now on."""
        if rows <= self.small_rows and not ticket.small:
            self._large.remove(ticket)
            ticket.small = True
            self._small.add(ticket)
        self._lane(ticket).ready(ticket, rows, work, owner)

    def remove(self, ticket: Ticket) -> None:
        """Remove the remaining rows of a request."""
        if ticket.rows:
            self._lane(ticket).remove(ticket)
            ticket.rows = 0

    def _wait_s(self, sender: str, rows: int, work: float, left_s: float, now: float) -> float:
        """Seconds after which a request would be admitted; 0: now."""
        if not self.rows:
            return 0.0
        small = rows <= self.small_rows
        finish_s = self._small_s if small else self._large_s
        wait_s = max(
            (self.rows + rows - self._max_queued_rows) * self._rate.row_s,
            finish_s(sender, work) - OWN_SHARE * left_s,
            finish_s(sender, 0) - STRAINED_S if self._refusals(rows).many(now) else 0.0,
        )
        return max(0.0, wait_s) if wait_s > 0 or small else self._delay_s(sender, work, now)

    def _delay_s(self, sender: str, work: float, now: float) -> float:
        """Seconds after which a large request would not make another one miss its deadline; 0: now."""
        wait_s = 0.0
        for ticket, before, after in self._large.delayed(sender, work):
            left_s = DELAYED_SHARE * (ticket.until - now)
            # A request that would be late anyway does not block others.
            if self._large_lane_s(before) <= left_s < self._large_lane_s(after):
                wait_s = max(wait_s, self._large_lane_s(before))
        return wait_s

    def _small_s(self, sender: str, work: float) -> float:
        """Predicted seconds until a small request would be finished."""
        ahead = self._small.work_until(sender, work)
        if self._large.work > 0:
            ahead = math.ceil(ahead / self.small_rows) * self._max_batch_rows
        return self._computed_s() + ahead * self._rate.row_s

    def _large_s(self, sender: str, work: float) -> float:
        return self._large_lane_s(self._large.work_until(sender, work))

    def _large_lane_s(self, work: float) -> float:
        """Predicted seconds until so much work is done, if small requests use their share."""
        return self._computed_s() + work / (1 - SMALL_SHARE) * self._rate.row_s

    def _computed_s(self) -> float:
        return sum(batch.work for batch in self._running) * self._rate.row_s / self._threads

    def _refused(self, sender: str, rows: int, work: float, wait_s: float, now: float) -> RefusedError:
        work_s = work * self._rate.row_s
        self._refusals(rows).add(work_s, now)
        senders = max(1, self._large.senders, self._small.senders)
        return RefusedError(self._senders.retry_after_s(sender, wait_s, work_s * senders, now))

    def _refusals(self, rows: int) -> Refusals:
        return self._small_refused if rows <= self.small_rows else self._large_refused

    def _lane(self, ticket: Ticket) -> Lane:
        return self._small if ticket.small else self._large

    # -- batches ----------------------------------------------------------------------------------------
    def batch(self, now: float) -> Batch:
        """The next rows to compute."""
        room = self._max_batch_rows
        parts = self._small.take(self.small_rows if self._large.ready_rows else room)
        large = self._large.take(room - sum(rows for _, rows, _ in parts))
        parts += large
        parts += self._small.take(room - sum(rows for _, rows, _ in parts))
        batch = _batch(parts, now, bool(large))
        self._running.append(batch)
        return batch

    def ended(self, batch: Batch, now: float) -> None:
        """A batch has been computed."""
        self._running.remove(batch)
        # Where several are computed at the same time, each counts from the end of the one before it.
        self._rate.batch(batch.work + self._beside_work, now - max(batch.started, self._ended))
        self._beside_work = 0.0
        self._ended = now

    def beside_in_s(self, now: float) -> float | None:
        """Seconds after which :meth:`beside` may be called; None: not before something changes."""
        busy = len(self._running) >= self._threads and any(batch.large for batch in self._running)
        if not busy or self._beside is not None or not self._small.ready_rows:
            return None
        return max(0.0, self._beside_from - now)

    def beside(self, now: float) -> Batch:
        """Small requests to compute beside a batch that takes long."""
        self._beside = _batch(self._small.take(self.small_rows), now, large=False)
        return self._beside

    def beside_ended(self, batch: Batch, now: float) -> None:
        """The batch of :meth:`beside` has been computed."""
        self._beside = None
        self._beside_work += batch.work
        self._beside_from = now + (now - batch.started) * (1 / BESIDE_SHARE - 1)


def _batch(parts: list[tuple[Ticket, int, float]], now: float, large: bool) -> Batch:
    return Batch([(ticket, rows) for ticket, rows, _ in parts], sum(work for *_, work in parts), now, large)
