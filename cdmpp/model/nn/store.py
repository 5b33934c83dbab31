"""Encoded programs by key, in buckets of equal padded leaf count.

The bucket of a program depends only on its leaf count, so a prediction does not depend on the other programs of the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.features.encode import EncodedPrograms
from cdmpp.features.schema import WIDTH
from cdmpp.model.nn.inputs import SUMMARY_COLUMNS, summarise

Array = np.ndarray[Any, np.dtype[Any]]

#: Padded leaf counts; longer programs are padded to a multiple of the last.
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def bucket_of(leaves: int) -> int:
    """Padded leaf count of a program with this many leaves."""
    for size in BUCKETS:
        if leaves <= size:
            return size
    return -(-leaves // BUCKETS[-1]) * BUCKETS[-1]


@dataclass(frozen=True)
class Bucket:
    """Programs padded to one leaf count: leaves (n, size, width), positions and mask (n, size)."""

    leaves: Array
    positions: Array
    mask: Array


class ProgramStore:
    """Encoded programs, looked up by key (0 .. count-1).

    Parameters
    ----------
    count : int
    width : int
        Columns of a leaf. Operators have no schedule; their schedule columns are 0.
    """

    def __init__(self, count: int, width: int = WIDTH) -> None:
        self.width = width
        self.summary = np.zeros((count, len(SUMMARY_COLUMNS)), dtype=np.float32)
        self.bucket = np.zeros(count, dtype=np.int32)
        self.slot = np.zeros(count, dtype=np.int64)
        self._parts: dict[int, list[Bucket]] = {}
        self._sizes: dict[int, int] = {}
        self.buckets: dict[int, Bucket] = {}

    def add(self, keys: Array, encoded: EncodedPrograms) -> None:
        """Store programs under their keys, without columns from ``width`` on."""
        encoded = encoded.narrow(self.width)
        count, real = encoded.leaves.shape[:2]
        size = bucket_of(real)
        leaves = np.zeros((count, size, self.width), dtype=np.float32)
        leaves[:, :real, : encoded.leaves.shape[2]] = encoded.leaves
        positions = np.zeros((count, size), dtype=np.int32)
        positions[:, :real] = encoded.positions
        mask = np.zeros((count, size), dtype=bool)
        mask[:, :real] = True
        start = self._sizes.get(size, 0)
        self._sizes[size] = start + count
        self._parts.setdefault(size, []).append(Bucket(leaves, positions, mask))
        self.bucket[keys] = size
        self.slot[keys] = np.arange(start, start + count)
        self.summary[keys] = summarise(encoded)

    def finish(self) -> None:
        """Join the added programs; call once before reading :attr:`buckets`."""
        for size in list(self._parts):
            parts = self._parts.pop(size)
            self.buckets[size] = (
                parts[0]
                if len(parts) == 1
                else Bucket(*(np.concatenate([getattr(p, f) for p in parts]) for f in ("leaves", "positions", "mask")))
            )
