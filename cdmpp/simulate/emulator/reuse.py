"""Cache of results by key, with counts of hits and misses."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

_NOTHING = object()


@dataclass
class Reuse:
    """Cache of results by key. It is emptied when it is full.

    Attributes
    ----------
    most, most_bytes : int
        Most results, and the most memory of results that have ``nbytes``.
    hits, misses : int
    """

    most: int = 4096
    most_bytes: int = 1 << 28
    hits: int = 0
    misses: int = 0
    _held: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _bytes: int = 0

    def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of a key; computed where it is not cached."""
        cached = self._held.get(key, _NOTHING)
        if cached is not _NOTHING:
            self.hits += 1
            return cached
        self.misses += 1
        made = make()
        size = getattr(made, "nbytes", 0)
        if len(self._held) >= self.most or self._bytes + size > self.most_bytes:
            self._held.clear()
            self._bytes = 0
        self._held[key] = made
        self._bytes += size
        return made


def anew(key: Hashable, make: Callable[[], Any]) -> Any:
    """As :meth:`Reuse.find`, without a cache."""
    return make()
