"""An application as primitives (embed, search, prefill, decode, ...) on engines that batch (Teola)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cdmpp.plan.base.batch_curve import interpolate


@dataclass(frozen=True)
class Engine:
    """Runs primitives in batches.

    Attributes
    ----------
    name, device : str
        Engines on one device take turns.
    sizes, seconds : array, shape (points,)
        Seconds of a batch by its number of items.
    max_items : int
        Largest batch; a primitive with more items runs alone.
    """

    name: str
    device: str
    sizes: np.ndarray
    seconds: np.ndarray
    max_items: int

    def batch_s(self, items: float) -> float:
        """Seconds of a batch by its number of items."""
        return float(interpolate(self.sizes, self.seconds, items))

    def item_s(self) -> float:
        """Least seconds per item, at the most efficient batch size."""
        sizes = np.arange(1, self.max_items + 1)
        return float((interpolate(self.sizes, self.seconds, sizes) / sizes).min())


@dataclass(frozen=True)
class Primitive:
    """One step of a request: ``items`` for its engine, which starts after all of ``after``."""

    id: str
    engine: int
    items: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class Application:
    """Engines, and primitives in topological order that refer to them by index."""

    engines: tuple[Engine, ...]
    primitives: tuple[Primitive, ...]

    def depths(self) -> list[float]:
        """Seconds from the start of each primitive to the end of the request on idle engines."""
        out = [0.0] * len(self.primitives)
        for i in reversed(range(len(self.primitives))):
            primitive = self.primitives[i]
            out[i] += self.engines[primitive.engine].batch_s(primitive.items)
            for before in primitive.after:
                out[before] = max(out[before], out[i])
        return out

    def chained(self) -> Application:
        """A copy in which the primitives of a request run one after the other, as modules called in turn."""
        chain = tuple(replace(primitive, after=(i - 1,) if i else ()) for i, primitive in enumerate(self.primitives))
        return replace(self, primitives=chain)

    def bound_s(self, arrivals_s: Sequence[float]) -> float:
        """Lower bound of the mean latency: the longest path, or the busiest engine at its best batch size.

        The k-th request cannot end before k times the work of an engine on one request.
        """
        longest = max((depth for depth in self.depths()), default=0.0)
        n, first, mean = len(arrivals_s), min(arrivals_s), sum(arrivals_s) / len(arrivals_s)
        work: dict[str, float] = {}
        for primitive in self.primitives:
            engine = self.engines[primitive.engine]
            least_s = min(engine.item_s() * primitive.items, engine.batch_s(primitive.items))
            work[engine.device] = work.get(engine.device, 0.0) + least_s
        return max(longest, *(first + busy_s * (n + 1) / 2 - mean for busy_s in work.values()))
