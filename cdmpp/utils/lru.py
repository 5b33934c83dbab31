"""A bounded cache that drops the least recently used entry."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Lru(Generic[Value]):
    """Values by key, as many as fit into a total weight. Safe to share between threads.

    ``max_weight``: bound on the sum of the weights, for example in bytes; 0 keeps nothing.
    """

    def __init__(self, max_weight: int) -> None:
        self._max_weight, self._weight = max_weight, 0
        self._items: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def weight(self) -> int:
        """Sum of the weights of the entries."""
        return self._weight

    def get(self, key: Hashable) -> Value | None:
        """The value of a key, marked as used; None where there is none."""
        with self._lock:
            item = self._items.get(key)
            if item is None:
                return None
            self._items.move_to_end(key)
            return item[0]

    def put(self, key: Hashable, value: Value, weight: int) -> None:
        """Store a value, replacing an older one; a value heavier than ``max_weight`` is not stored."""
        with self._lock:
            old = self._items.pop(key, None)
            if old is not None:
                self._weight -= old[1]
            if weight > self._max_weight:
                return
            self._items[key] = (value, weight)
            self._weight += weight
            while self._weight > self._max_weight:
                self._weight -= self._items.popitem(last=False)[1][1]

    def values(self) -> list[Value]:
        """The stored values, least recently used first."""
        with self._lock:
            return [value for value, _ in self._items.values()]
