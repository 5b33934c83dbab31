"""Rows per expert in a layer of experts, without measuring: from its sizes and how balanced its routing is.

Each of ``tokens`` tokens goes to ``topk`` of ``experts`` experts. ``balanced`` gives every expert the same number of
rows. ``power_law_a`` draws the share of expert i from a power law with exponent a; here the quantiles stand in for
the draws, so that equal sizes have equal loads. With expert parallelism, the rank with the highest load counts: the
i-th most loaded expert is placed on rank i modulo ``ep``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

Balance = Literal["balanced", "power_law_1.01", "power_law_1.2"]
BALANCES: tuple[str, ...] = get_args(Balance)

#: Largest and smallest number of rows of a tile of a grouped product.
MAX_TILE_ROWS, MIN_TILE_ROWS = 128, 16
#: Largest share of the tokens that one expert receives before normalisation, as in the measured tables.
_LARGEST_SHARE = 0.8

#: Most experts of a layer, and groups of a grouped product: their loads are computed one by one.
MAX_EXPERTS = 8192

#: Quantities of :func:`loads`, in order.
LOADS = ("rank_rows", "active", "largest", "tile_rows", "tiles")


def expert_rows(rows: int, tokens: int, experts: int, balance: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Rows of each expert, largest first, (experts,) float64; whole numbers that add up to ``rows``.

    Parameters
    ----------
    rows : int
        Tokens times top-k.
    tokens : int
        Most rows that one expert can receive.
    """
    if balance == "balanced":
        share = np.full(experts, 1.0 / experts)
    else:
        exponent = 1.0 - float(balance.rpartition("_")[2])
        top = max(_LARGEST_SHARE * tokens, 1.0 + 1e-9)
        quantile = (np.arange(experts) + 0.5) / experts
        share = ((top**exponent - 1.0) * quantile + 1.0) ** (1.0 / exponent)
        share /= share.sum()
    wanted = np.sort(np.minimum(share * rows, tokens))[::-1]
    # Rows that a capped expert cannot take go to the others; then round so that the sum stays.
    for _ in range(8):
        left = rows - wanted.sum()
        room = wanted < tokens
        if left < 1e-6 or not room.any():
            break
        wanted[room] = np.minimum(wanted[room] * (1.0 + left / max(wanted[room].sum(), 1e-9)), tokens)
    whole = np.floor(wanted + 1e-9)
    rest = round(float(rows - whole.sum()))
    if rest > 0:
        whole[np.argsort(whole - wanted, kind="stable")[:rest]] += 1.0
    return np.sort(whole)[::-1]


@lru_cache(maxsize=65536)
def _loads(rows: int, tokens: int, experts: int, ep: int, balance: str) -> tuple[int, int, int, int, int]:
    here = expert_rows(rows, tokens, experts, balance)[::ep]
    active = max(int((here > 0).sum()), 1)
    total, largest = max(int(here.sum()), 1), max(int(here[0]), 1)
    mean = total / active
    tile = MIN_TILE_ROWS
    while tile < min(mean, MAX_TILE_ROWS):
        tile *= 2
    tiles = max(int(np.ceil(here / tile).sum()), 1)
    return total, active, largest, tile, tiles


def loads(rows: Any, tokens: Any, experts: Any, ep: Any, balance: str) -> dict[str, Any]:
    """Loads of the rank with most rows.

    Parameters
    ----------
    rows, tokens, experts, ep : int or int64 arrays of one length
        ``rows``: tokens times top-k, over all ranks.

    Returns
    -------
    dict
        ``rank_rows``: rows on the rank; ``active``: its experts with at least one row; ``largest``: rows of its most
        loaded expert; ``tile_rows``: rows of a tile, a power of two near the mean load; ``tiles``: tiles of all
        experts. Integers, or int64 arrays.
    """
    if not isinstance(rows, np.ndarray):
        return dict(zip(LOADS, _loads(int(rows), int(tokens), int(experts), int(ep), balance), strict=True))
    table = np.stack(np.broadcast_arrays(rows, tokens, experts, ep), axis=1).astype(np.int64)
    distinct, inverse = np.unique(table, axis=0, return_inverse=True)
    values = np.array([_loads(*row, balance) for row in distinct.tolist()], dtype=np.int64).reshape(-1, len(LOADS))
    return dict(zip(LOADS, values[inverse.reshape(-1)].T, strict=True))
