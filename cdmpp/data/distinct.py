"""Stable 64-bit hashes of integer rows, and the distinct rows among many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import DataError

U64 = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: U64) -> U64:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), on an array; arithmetic modulo 2^64."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_rows(seed: int, columns: Sequence[NDArray[np.int64]]) -> U64:
    """Hash rows of integers, column by column: the same on every machine and numpy version.

    ``h = splitmix64(seed)``, then ``h = splitmix64(h xor splitmix64(column))`` for each column in order.
    """
    if not columns:
        raise ValueError("no columns to hash")
    state = splitmix64(np.full(len(columns[0]), seed, dtype=np.uint64))
    for column in columns:
        state = splitmix64(state ^ splitmix64(column.astype(np.int64).view(np.uint64)))
    return state


def distinct_rows(columns: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the distinct rows.

    Returns
    -------
    first : int64 array
        Row at which each distinct row first appears, ascending.
    inverse : int64 array
        For every row, which distinct row it is.
    """
    keys = hash_rows(0, columns)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    for column in columns:  # one chance in 10^8 for a million rows, but a wrong shape would be silent
        if not np.array_equal(column[first][inverse], column):
            raise DataError("two different shapes have the same 64-bit hash", hint="split the table in two")
    rank = np.empty(len(first), dtype=np.int64)
    order = np.argsort(first, kind="stable")
    rank[order] = np.arange(len(first))
    return first[order].astype(np.int64), rank[inverse]
