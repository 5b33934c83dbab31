"""A search's budget, its progress, and the wish of somebody else that it end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """How far a search is.

    Attributes
    ----------
    spent_s : float
        Seconds since it began.
    done : float
        Share of the work or of the budget, 0 to 1.
    best, bound : float or None
        Objective of the best answer so far and its lower bound, in the planner's unit (seconds, mostly).
    answer : callable or None
        Makes the best answer so far, as JSON values; None before there is one.
    """

    spent_s: float
    done: float
    best: float | None = None
    bound: float | None = None
    answer: Callable[[], dict[str, Any]] | None = None


class SearchControl:
    """Tells a search when to end, and others how far it is. Safe between threads.

    Parameters
    ----------
    budget_s : float, optional
        Seconds from now; without one the search ends by itself.
    listener : callable, optional
        Given a :class:`Progress` at most every ``every_s`` seconds, in the search's thread.
    every_s : float

    Notes
    -----
    A search calls :meth:`report` in its loop and ends, with the best that it has, once :attr:`expired`.
    """

    def __init__(
        self, budget_s: float | None = None, listener: Callable[[Progress], None] | None = None, every_s: float = 0.2
    ) -> None:
        self.budget_s = budget_s
        self._began = time.monotonic()
        self._listener, self._every_s = listener, every_s
        self._told_at = self._began
        self._stopped = threading.Event()

    @property
    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left, 0 at least; infinite without a budget."""
        if self._stopped.is_set():
            return 0.0
        return float("inf") if self.budget_s is None else max(self.budget_s - self.spent_s, 0.0)

    @property
    def expired(self) -> bool:
        """Whether the budget is spent, or :meth:`stop` was called."""
        return self.left_s <= 0.0

    def stop(self) -> None:
        """Ask the search to end with the best that it has."""
        self._stopped.set()

    def report(
        self,
        *,
        done: float | None = None,
        best: float | None = None,
        bound: float | None = None,
        answer: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Say how far the search is; cheap enough for every turn of a loop.

        Parameters
        ----------
        done : float, optional
            Share of the work, 0 to 1; default: of the budget.
        best, bound, answer
            As in :class:`Progress`. ``answer`` is called later or never, while the search goes on: it
            must hold on to what it needs.
        """
        if self._listener is None:
            return
        now = time.monotonic()
        if now - self._told_at < self._every_s:
            return
        self._told_at = now
        spent = now - self._began
        if done is None:
            done = 0.0 if not self.budget_s else spent / self.budget_s
        self._listener(Progress(spent, min(max(done, 0.0), 1.0), best, bound, answer))
