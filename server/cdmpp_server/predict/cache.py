"""A dictionary that forgets what was used least recently, within a bound of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class ByteLru(Generic[V]):
    """Values by key, as many as fit. Safe between threads.

    Parameters
    ----------
    max_bytes : int
        Bound on the sum of the sizes that :meth:`put` is told; 0: nothing is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._free = max_bytes
        self._items: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes kept."""
        return self._max_bytes - self._free

    def get(self, key: Hashable) -> V | None:
        """The value, which counts as used now; None where there is none."""
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: V, size: int) -> None:
        """Keep a value of ``size`` bytes; one that is there already is replaced."""
        if size > self._max_bytes:
            return
        with self._lock:
            before = self._items.pop(key, None)
            if before is not None:
                self._free += before[1]
            self._items[key] = (value, size)
            self._free -= size
            while self._free < 0:
                self._free += self._items.popitem(last=False)[1][1]
