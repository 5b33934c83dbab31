"""Choice of measurements of a new device, spread over contexts and sizes, without their latencies."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def spread_rows(context: Array, bytes_: Array, k: int, seed: int = 0) -> Array:
    """Positions of k rows: contexts in turn, and log2 of the bytes at even distances over all of them.

    Parameters
    ----------
    context, bytes_ : (n,)
        Context number and bytes of the rows to choose from; ``k`` is at most n.
    """
    rng = np.random.default_rng(seed)
    size = np.log2(bytes_)
    order = rng.permutation(np.unique(context))
    # The golden ratio's multiples spread evenly for every k.
    share = (rng.random() + np.arange(k) * 0.6180339887) % 1.0
    free = np.ones(len(context), dtype=np.bool_)
    chosen: list[int] = []
    for i in range(k):
        for turn in range(len(order)):
            members = np.flatnonzero(free & (context == order[(i + turn) % len(order)]))
            if len(members):
                break
        low, high = size[members].min(), size[members].max()
        best = int(members[np.abs(size[members] - (low + share[i] * (high - low))).argmin()])
        free[best] = False
        chosen.append(best)
    return np.array(sorted(chosen))
