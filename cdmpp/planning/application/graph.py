"""An application as primitives (embed, search, prefill, decode, ...) on engines that batch (Teola)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cdmpp.compose.pricing import interpolate


@dataclass(frozen=True)
class Engine:
    """What runs primitives, several together.

    Attributes
    ----------
    name, device : str
        Engines of one device take turns.
    sizes, seconds : array, shape (points,)
        Seconds of a batch by its number of items.
    max_items : int
        Of a batch; a primitive with more runs alone.
    """

    name: str
    device: str
    sizes: np.ndarray
    seconds: np.ndarray
    max_items: int

    def batch_s(self, items: float) -> float:
        """Seconds of a batch of so many items."""
        return float(interpolate(self.sizes, self.seconds, items))

    def item_s(self) -> float:
        """Seconds an item at the most efficient batch size: nothing is faster."""
        sizes = np.arange(1, self.max_items + 1)
        return float((interpolate(self.sizes, self.seconds, sizes) / sizes).min())


@dataclass(frozen=True)
class Primitive:
    """One step of a request: ``items`` for its engine, once all of ``after`` are done."""

    id: str
    engine: int
    items: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class Application:
    """Primitives in topological order, and the engines that they name by index."""

    engines: tuple[Engine, ...]
    primitives: tuple[Primitive, ...]

    def depths(self) -> list[float]:
        """Seconds from the start of each primitive to the end of the request, with nothing in the way."""
        out = [0.0] * len(self.primitives)
        for i in reversed(range(len(self.primitives))):
            one = self.primitives[i]
            out[i] += self.engines[one.engine].batch_s(one.items)
            for before in one.after:
                out[before] = max(out[before], out[i])
        return out

    def chained(self) -> Application:
        """The same, one primitive of a request after the other: modules called in turn."""
        chain = tuple(replace(one, after=(i - 1,) if i else ()) for i, one in enumerate(self.primitives))
        return replace(self, primitives=chain)

    def bound_s(self, arrivals_s: Sequence[float]) -> float:
        """No policy has a lower mean latency: the longest path, or the busiest engine at its best batch size.

        When k requests are done, their items are; so the k-th is not done before k times an engine's work on
        one request.
        """
        longest = max((depth for depth in self.depths()), default=0.0)
        n, first, mean = len(arrivals_s), min(arrivals_s), sum(arrivals_s) / len(arrivals_s)
        work: dict[str, float] = {}
        for one in self.primitives:
            engine = self.engines[one.engine]
            work[engine.device] = work.get(engine.device, 0.0) + min(
                engine.item_s() * one.items, engine.batch_s(one.items)
            )
        return max(longest, *(first + each * (n + 1) / 2 - mean for each in work.values()))
