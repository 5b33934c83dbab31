"""Budget, progress and cancellation of searches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: A second of a budget lasts at most so many seconds of the clock, on a machine that does other work.
WALL = 4.0


@dataclass(frozen=True)
class Progress:
    """Progress of a search."""

    #: Seconds since the start.
    spent_s: float
    #: Share of the work or of the budget, 0 to 1.
    done: float
    #: Objective of the best plan so far and its lower bound, in the planner's unit (seconds, mostly).
    best: float | None = None
    bound: float | None = None
    #: Makes the best plan so far, an :class:`cdmpp.predict.requests.request.Answer`; None before there is one.
    answer: Callable[[], Any] | None = None


class SearchControl:
    """Budget and cancellation of a search, and a listener for its progress. Thread-safe.

    A search calls :meth:`report` in its loop. When :attr:`expired` is true, it returns the best plan so far.
    ``budget_s``: seconds of this process's CPU time from now, at most :data:`WALL` times as many of the clock; without
    it, the search ends when its work is done. ``listener``: called with a :class:`Progress` at most every ``every_s``
    seconds, in the thread of the search.
    """

    def __init__(
        self, budget_s: float | None = None, listener: Callable[[Progress], None] | None = None, every_s: float = 0.2
    ) -> None:
        self.budget_s = budget_s
        self.restart()
        self._listener, self._every_s = listener, every_s
        self._reported_at = time.monotonic()
        self._stopped = threading.Event()

    def restart(self) -> None:
        """Begin the budget now; earlier work, such as compilation, is not part of it."""
        self._started, self._started_at = time.process_time(), time.monotonic()

    def part(self, budget_s: float | None = None, reserve_s: float = 0.0) -> SearchControl:
        """A control for one part of this search, without a listener. It ends with this one at the latest.

        ``budget_s``: seconds from now that the part may take; default: what is left. ``reserve_s``: seconds of this
        budget that the part leaves.
        """
        return _PartControl(self, budget_s, reserve_s)

    @property
    def spent_s(self) -> float:
        """Seconds of CPU time since the start; of a process that hardly runs, a part of those of the clock."""
        return max(time.process_time() - self._started, (time.monotonic() - self._started_at) / WALL)

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called; then only the required parts of a plan are computed."""
        return self._stopped.is_set()

    @property
    def left_s(self) -> float:
        """Remaining seconds of the budget; 0 once it is spent, infinite without a budget."""
        if self._stopped.is_set():
            return 0.0
        return float("inf") if self.budget_s is None else max(self.budget_s - self.spent_s, 0.0)

    @property
    def expired(self) -> bool:
        """Whether the budget is spent, or :meth:`stop` was called."""
        return self.left_s <= 0.0

    def stop(self) -> None:
        """Ask the search to return the best plan so far."""
        self._stopped.set()

    def report(
        self,
        *,
        done: float | None = None,
        best: float | None = None,
        bound: float | None = None,
        answer: Callable[[], Any] | None = None,
    ) -> None:
        """Report progress; cheap enough for every iteration of a loop.

        ``done``: share of the work, 0 to 1; default: share of the budget. ``best``, ``bound``, ``answer``: as in
        :class:`Progress`. ``answer`` may be called later, while the search continues: it must keep references to data
        that does not change.
        """
        if self._listener is None:
            return
        now = time.monotonic()
        if now - self._reported_at < self._every_s:
            return
        self._reported_at = now
        spent = self.spent_s
        if done is None:
            done = 0.0 if not self.budget_s else spent / self.budget_s
        self._listener(Progress(spent, min(max(done, 0.0), 1.0), best, bound, answer))


class _PartControl(SearchControl):
    """Made by :meth:`SearchControl.part`."""

    def __init__(self, whole: SearchControl, budget_s: float | None, reserve_s: float) -> None:
        super().__init__(budget_s)
        self._whole, self._reserve_s = whole, reserve_s

    @property
    def left_s(self) -> float:
        return min(super().left_s, max(self._whole.left_s - self._reserve_s, 0.0))

    @property
    def stopped(self) -> bool:
        return super().stopped or self._whole.stopped
