"""Cost of a row under load, bounded by the worst recent second, and how much work is refused."""

from __future__ import annotations

import math
from collections import deque

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

    Parameters
    ----------
    full_rows : float
        Batches from this size on are measured. A smaller batch counts only until the first of them, with its fixed
        cost taken off.
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
