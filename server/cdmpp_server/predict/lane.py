"""Waiting requests of several senders: in order of arrival for each sender, in equal shares between senders."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any

#: Rows of one sender that a batch takes before it turns to the next sender.
_TURN_ROWS = 16


@dataclass(eq=False)
class Ticket:
    """Place of a request in the queue, from its admission until its last row is taken."""

    #: Key or address.
    sender: str
    #: Rows that no batch has taken.
    rows: int
    #: Cost of these rows, in rows of a new operator.
    work: float
    #: Deadline.
    until: float
    #: Whether it waits in the lane of small requests.
    small: bool = False
    #: What waits; None while the request is still being read, when no batch can take its rows.
    owner: Any = None

    def take(self, rows: int) -> float:
        """Take rows; returns their work."""
        work = self.work * rows / self.rows
        self.rows -= rows
        self.work = self.work - work if self.rows else 0.0
        return work


@dataclass(eq=False)
class _Sender:
    tickets: deque[Ticket] = field(default_factory=deque)
    work: float = 0.0
    #: Rows taken so far, from a common start: the sender with the fewest is next.
    served: float = 0.0


class Lane:
    """Waiting requests, with their rows and their work in total."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}
        self._turns: list[tuple[float, int, _Sender]] = []
        self._number = count()
        self._served = 0.0
        self.rows = self.ready_rows = 0
        self.work = 0.0

    @property
    def senders(self) -> int:
        """Number of senders that wait."""
        return len(self._senders)

    def add(self, ticket: Ticket) -> None:
        """Append a request."""
        sender = self._senders.get(ticket.sender)
        if sender is None:
            # A sender that was idle has no claim to the share that it did not use.
            sender = self._senders[ticket.sender] = _Sender(served=self._served)
            heapq.heappush(self._turns, (sender.served, next(self._number), sender))
        sender.tickets.append(ticket)
        self._count(sender, ticket, 1)

    def remove(self, ticket: Ticket) -> None:
        """Remove a request."""
        sender = self._senders[ticket.sender]
        sender.tickets.remove(ticket)
        self._count(sender, ticket, -1)
        if not sender.tickets:
            del self._senders[ticket.sender]
        if not self._senders:
            self.work = 0.0  # no rounding error stays
            self._turns.clear()

    def ready(self, ticket: Ticket, rows: int, work: float, owner: Any) -> None:
        """Set the size of a request that has been read; batches may take its rows from now on."""
        sender = self._senders[ticket.sender]
        self._count(sender, ticket, -1)
        ticket.rows, ticket.work, ticket.owner = rows, work, owner
        self._count(sender, ticket, 1)

    def _count(self, sender: _Sender, ticket: Ticket, sign: int) -> None:
        sender.work += sign * ticket.work
        self.work += sign * ticket.work
        self.rows += sign * ticket.rows
        if ticket.owner is not None:
            self.ready_rows += sign * ticket.rows

    def take(self, room: int) -> list[tuple[Ticket, int, float]]:
        """Up to ``room`` rows of the requests that are ready: request, rows and work of each part."""
        parts: dict[int, tuple[Ticket, int, float]] = {}
        unready: list[tuple[float, int, _Sender]] = []
        while room and self._turns:
            turn = heapq.heappop(self._turns)
            sender = turn[2]
            if not sender.tickets:
                continue  # the sender has no waiting rows
            ticket = next((ticket for ticket in sender.tickets if ticket.owner is not None), None)
            if ticket is None:
                unready.append(turn)
                continue
            self._served = max(self._served, sender.served)
            rows = min(ticket.rows, room, _TURN_ROWS)
            self._count(sender, ticket, -1)
            work = ticket.take(rows)
            self._count(sender, ticket, 1)
            sender.served += rows
            room -= rows
            _, rows_before, work_before = parts.get(id(ticket), (ticket, 0, 0.0))
            parts[id(ticket)] = ticket, rows_before + rows, work_before + work
            if not ticket.rows:
                self.remove(ticket)
            if sender.tickets:
                heapq.heappush(self._turns, (sender.served, next(self._number), sender))
        for turn in unready:
            heapq.heappush(self._turns, turn)
        return list(parts.values())

    def work_until(self, sender: str, work: float) -> float:
        """Work of this lane that is completed before a new request of this much work finishes."""
        waiting = self._senders.get(sender)
        total_work = work + (waiting.work if waiting is not None else 0.0)
        return total_work + sum(min(other.work, total_work) for other in self._senders.values() if other is not waiting)

    def delayed(self, sender: str, work: float) -> Iterator[tuple[Ticket, float, float]]:
        """Requests that another request of this sender would delay.

        Yields each with the work that is done when it is finished, without and with the other request.
        """
        waiting = self._senders.get(sender)
        before = waiting.work if waiting is not None else 0.0
        others = [other for other in self._senders.values() if other is not waiting]
        sizes = sorted(other.work for other in others)
        sums = list(accumulate(sizes, initial=0.0))
        for other in others:
            done = 0.0
            for ticket in other.tickets:
                done += ticket.work
                if done > before:
                    smaller = bisect_right(sizes, done)
                    work_of_others = sums[smaller] + done * (len(sizes) - smaller)
                    yield ticket, work_of_others + before, work_of_others + min(before + work, done)
