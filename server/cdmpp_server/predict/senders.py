"""History of senders: work of their last bodies, and the Retry-After of their refused requests."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from cdmpp.utils.lru import Lru

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

        Parameters
        ----------
        sender : str
        wait_s : float
            Seconds until there is room for it.
        work_s : float
            Seconds that it takes. The next refused request of this sender gets a Retry-After that is longer by this:
            otherwise all would be sent again at once, and most be refused again.
        now : float
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
