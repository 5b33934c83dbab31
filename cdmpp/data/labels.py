"""Dictionary-encoded string columns: a code per row and each distinct string once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Labels:
    """A column of strings; the empty string stands for "not given".

    Attributes
    ----------
    codes : int32 array, one per row
        Index into ``names``.
    names : tuple of str
        Each distinct string once; some may be unused after :meth:`take`.
    """

    codes: Codes
    names: tuple[str, ...]

    @classmethod
    def constant(cls, name: str, rows: int) -> Labels:
        """One string for every row."""
        return cls(np.zeros(rows, dtype=np.int32), (name,))

    @classmethod
    def of(cls, values: Iterable[str]) -> Labels:
        """Encode strings, in order of first appearance."""
        index: dict[str, int] = {}
        codes = np.fromiter((index.setdefault(v, len(index)) for v in values), dtype=np.int32)
        return cls(codes, tuple(index))

    @classmethod
    def concat(cls, parts: Sequence[Labels]) -> Labels:
        """Rows of ``parts`` one after the other."""
        index: dict[str, int] = {}
        codes = [np.zeros(0, dtype=np.int32)]
        for part in parts:
            remap = np.array([index.setdefault(n, len(index)) for n in part.names], dtype=np.int32)
            codes.append(remap[part.codes] if len(part) else np.zeros(0, dtype=np.int32))
        return cls(np.concatenate(codes), tuple(index))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> str:
        return self.names[int(self.codes[row])]

    def array(self) -> NDArray[Any]:
        """The strings, one per row (object array)."""
        return np.array([*self.names, ""], dtype=object)[self.codes]

    def is_(self, name: str) -> Mask:
        """Rows that hold ``name``."""
        wanted = [code for code, known in enumerate(self.names) if known == name]
        return np.isin(self.codes, wanted) if len(wanted) != 1 else self.codes == wanted[0]

    def map(self, function: Callable[[str], str]) -> Labels:
        """Replace each distinct string; strings that become equal share one code."""
        index: dict[str, int] = {}
        remap = np.array([index.setdefault(function(n), len(index)) for n in self.names], dtype=np.int32)
        return Labels(remap[self.codes] if len(self) else self.codes, tuple(index))

    def take(self, rows: NDArray[Any]) -> Labels:
        """Rows by index or mask."""
        return Labels(self.codes[rows], self.names)

    def counts(self) -> dict[str, int]:
        """Number of occurrences of each string that occurs."""
        occurrences = np.bincount(self.codes, minlength=len(self.names))
        return {n: int(c) for n, c in zip(self.names, occurrences, strict=True) if c}

    def used(self) -> tuple[str, ...]:
        """The strings that occur."""
        return tuple(self.counts())
