"""What was made before, by key, with a count of what was found."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

_NOTHING = object()


@dataclass
class Reuse:
    """Results by key; all of them go when there are too many.

    Attributes
    ----------
    most, most_bytes : int
        Results that are held, and the memory that they may take, as far as they say it (``nbytes``).
    hits, misses : int
    """

    most: int = 4096
    most_bytes: int = 1 << 28
    hits: int = 0
    misses: int = 0
    _held: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _bytes: int = 0

    def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of a key; made where it is not there."""
        found = self._held.get(key, _NOTHING)
        if found is not _NOTHING:
            self.hits += 1
            return found
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
    """As :meth:`Reuse.find`, where nothing is to be reused."""
    return make()
