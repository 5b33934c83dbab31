"""Names of narrow types in the public tables, and the groups of rows that share types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import IntColumn
from cdmpp.data.table import Flags
from cdmpp.programs.elements import canonical_dtype


class Types(NamedTuple):
    """Types of a product as a specification keeps them (:mod:`cdmpp.programs.elements`)."""

    dtype: str
    weight_dtype: str | None = None
    scaling: str | None = None

    @property
    def flags(self) -> dict[str, str | None]:
        """The structural fields."""
        return {"weight_dtype": self.weight_dtype, "scaling": self.scaling}


FP8, FP4 = "float8_e4m3", "float4_e2m1"

#: Dense layers of serving frameworks and of aiter.
LINEAR: dict[str, Types] = {
    "fp8": Types(FP8, None, "channel"),
    "fp8_static": Types(FP8, None, "tensor"),
    "fp8_block": Types(FP8, None, "block128"),
    "fp8_blockscale": Types(FP8, None, "block128"),
    "nvfp4": Types(FP4, None, "nvfp4"),
    "a4w4_mxfp4": Types(FP4, None, "mx32"),
    "int8_wo": Types("bfloat16", "int8", "channel"),
    "int4_wo": Types("bfloat16", "int4", "block128"),
    "sq": Types("int8", None, "channel"),
}
#: Layers of experts.
EXPERTS: dict[str, Types] = {
    "fp8": Types(FP8, None, "tensor"),
    "fp8_block": Types(FP8, None, "block128"),
    "nvfp4": Types(FP4, None, "nvfp4"),
    "int4_wo": Types("bfloat16", "int4", "block128"),
    "w4a16_mxfp4": Types("bfloat16", FP4, "mx32"),
    "w4a8_mxfp4_mxfp8": Types(FP8, FP4, "mx32"),
    "w4afp8": Types(FP8, "int4", "block128"),
}


def plain(name: str) -> Types:
    """Types of a bare product; a name that is no type stays as it is, and its rows have an unknown type."""
    return Types(str(canonical_dtype(name)))


def typed_groups(
    operator: str,
    rows: Mask,
    labels: Labels,
    types: Mapping[str, Types],
    sizes: Mapping[str, IntColumn],
    flags: Flags | None = None,
) -> Iterator[Group]:
    """One group for each name of a type that occurs among ``rows``; ``types`` lacks the bare ones."""
    for name in labels.names:
        chosen = rows & labels.is_(name)
        if chosen.any():
            own = types.get(name) or plain(name)
            yield Group(operator, chosen, sizes, {**own.flags, **(flags or {})}, dtype=own.dtype)


def joined(*columns: Labels) -> tuple[Labels, tuple[tuple[str, ...], ...]]:
    """Combinations of several columns: a label per row ("0", "1", ...) and the strings behind each label."""
    table = np.stack([column.map(str).codes for column in columns], axis=1)
    distinct, inverse = np.unique(table, axis=0, return_inverse=True)
    names = [column.map(str).names for column in columns]
    parts = tuple(tuple(names[i][code] for i, code in enumerate(row)) for row in distinct.tolist())
    return Labels(inverse.reshape(-1).astype(np.int32), tuple(map(str, range(len(parts))))), parts
