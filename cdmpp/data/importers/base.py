"""Base class of the importers of public tables, names of narrow types, and the groups of rows that share types."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cdmpp.data.assemble import Group, check_groups, complete_table
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import IntColumn, RawTable
from cdmpp.data.table import Flags, MeasurementTable
from cdmpp.programs.elements import canonical_dtype


def column_set(names: str) -> frozenset[str]:
    """Return the set of column names that a text lists, with spaces between them."""
    return frozenset(names.split())


#: Columns of other sources that no table of layers of serving systems has.
NOT_SERVING = frozenset({"framework", "precision", "direction", "program", "batch", "rows", "in_hw", "message_bytes"})

#: Columns that identify a source: an importer that does not need one of them never reads a table with it.
IDENTIFYING = frozenset({"provider", "x_name", "head_dim_v"})


def always(name: str) -> Callable[[RawTable], Labels]:
    """One label for every row of a source."""
    return lambda raw: Labels.constant(name, len(raw))


@dataclass(frozen=True)
class Importer:
    """One public source. Fields that are callable take the table and return labels (or rows) per row."""

    name: str  # value of the ``source`` column
    file_name: str  # the table's usual name in a folder of public data
    repository: str
    commit: str
    origin: str
    licence: str
    protocol: str  # how the source timed
    needs: frozenset[str]  # columns without which the table is not this one
    lacks: frozenset[str] = frozenset()  # columns that only other tables have
    groups: Callable[[RawTable, Labels], Iterable[Group]] = lambda raw, op: ()  # rows by operator
    framework: Callable[[RawTable], Labels] = lambda raw: Labels.constant("", len(raw))
    # What the source ran (:data:`cdmpp.programs.query_options.IMPLEMENTATIONS`); the audit table of docs/data.md has
    # the evidence.
    implementation: Callable[[RawTable], Labels] = lambda raw: Labels.constant("fused", len(raw))
    reads: frozenset[str] = frozenset()  # further columns that are read where present; all others are never looked at
    # Sets of columns, at least one of which is wholly there: the sizes of one family of operators each. A part of the
    # table may come without the columns that are empty for its operators.
    one_of: tuple[frozenset[str], ...] = (frozenset(),)
    # not read by rows of a group with an element type of its own
    dtype: Callable[[RawTable], Labels] = lambda raw: raw.labels("dtype")
    row_filter: str = ""  # column of the source's own filter; "": it has none
    # where the source timed in several ways; replaces ``protocol``
    protocol_of: Callable[[RawTable], Labels] | None = None
    # labels of the column ``source``; None: ``name`` for every row
    row_source: Callable[[RawTable], Labels] | None = None
    # name of the importer that reads this source's tables, which have the same columns; "" for this one
    read_by: str = ""
    # Rows of doubtful meaning by reason (:mod:`cdmpp.data.assemble`): evaluated, but not trained on.
    doubtful: Callable[[RawTable], dict[str, Mask]] | None = None
    source_columns: frozenset[str] = frozenset({"dtype"})  # columns that ``row_source`` reads

    def matches(self, columns: Collection[str]) -> bool:
        """Whether a table with these columns is from this source."""
        given = set(columns)
        return (
            not self.read_by
            and self.needs <= given
            and not (self.lacks | (IDENTIFYING - self.needs)) & given
            and any(o <= given for o in self.one_of)
        )

    def columns(self) -> frozenset[str]:
        """Every column that is read."""
        latency = {"latency_us", "latency_ms", "latency_s", self.row_filter}
        return self.needs.union(self.reads, latency, *self.one_of)

    def lacking(self, columns: Collection[str]) -> frozenset[str]:
        """The fewest columns that would make a table with these columns this one."""
        given = set(columns)
        return self.needs - given | min((o - given for o in self.one_of), key=len)

    def sources(self, raw: RawTable) -> Labels:
        """Source of each row of a table."""
        return (self.row_source or always(self.name))(raw)

    def table(self, raw: RawTable) -> MeasurementTable:
        """Build the checked table."""
        op = raw.labels("op")
        programs, program_key, reason = check_groups(list(self.groups(raw, op)), self.dtype(raw))
        return complete_table(
            programs,
            program_key,
            reason,
            raw.labels("device"),
            self.doubtful(raw) if self.doubtful else {},
            source=self.sources(raw),
            op=op,
            backend=Labels.constant("library", len(raw)),
            protocol=self.protocol_of(raw) if self.protocol_of else Labels.constant(self.protocol, len(raw)),
            framework=self.framework(raw),
            implementation=self.implementation(raw),
            latency_s=raw.latency_s(),
            row_filter=raw.bools(self.row_filter) if self.row_filter else None,
        )


class ProductTypes(NamedTuple):
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
LINEAR: dict[str, ProductTypes] = {
    "fp8": ProductTypes(FP8, None, "channel"),
    "fp8_static": ProductTypes(FP8, None, "tensor"),
    "fp8_block": ProductTypes(FP8, None, "block128"),
    "fp8_blockscale": ProductTypes(FP8, None, "block128"),
    "nvfp4": ProductTypes(FP4, None, "nvfp4"),
    "a4w4_mxfp4": ProductTypes(FP4, None, "mx32"),
    "int8_wo": ProductTypes("bfloat16", "int8", "channel"),
    "int4_wo": ProductTypes("bfloat16", "int4", "block128"),
    "sq": ProductTypes("int8", None, "channel"),
}
#: Layers of experts.
EXPERTS: dict[str, ProductTypes] = {
    "fp8": ProductTypes(FP8, None, "tensor"),
    "fp8_block": ProductTypes(FP8, None, "block128"),
    "nvfp4": ProductTypes(FP4, None, "nvfp4"),
    "int4_wo": ProductTypes("bfloat16", "int4", "block128"),
    "w4a16_mxfp4": ProductTypes("bfloat16", FP4, "mx32"),
    "w4a8_mxfp4_mxfp8": ProductTypes(FP8, FP4, "mx32"),
    "w4afp8": ProductTypes(FP8, "int4", "block128"),
}


def plain(name: str) -> ProductTypes:
    """Types of a bare product; a name that is no type stays as it is, and its rows have an unknown type."""
    return ProductTypes(str(canonical_dtype(name)))


def typed_groups(
    operator: str,
    rows: Mask,
    labels: Labels,
    types: Mapping[str, ProductTypes],
    sizes: Mapping[str, IntColumn],
    flags: Flags | None = None,
) -> Iterator[Group]:
    """One group for each name of a type that occurs among ``rows``; ``types`` lacks the bare ones."""
    for name in labels.names:
        chosen = rows & labels.is_(name)
        if chosen.any():
            row_types = types.get(name) or plain(name)
            yield Group(operator, chosen, sizes, {**row_types.flags, **(flags or {})}, dtype=row_types.dtype)


def joined(*columns: Labels) -> tuple[Labels, tuple[tuple[str, ...], ...]]:
    """Combinations of several columns: a label per row ("0", "1", ...) and the strings behind each label."""
    table = np.stack([column.map(str).codes for column in columns], axis=1)
    distinct, inverse = np.unique(table, axis=0, return_inverse=True)
    names = [column.map(str).names for column in columns]
    parts = tuple(tuple(names[i][code] for i, code in enumerate(row)) for row in distinct.tolist())
    return Labels(inverse.reshape(-1).astype(np.int32), tuple(map(str, range(len(parts))))), parts


def combinations(*columns: Labels) -> Iterator[tuple[Mask, tuple[str, ...]]]:
    """Rows of each combination of several columns, and its strings."""
    labels, parts = joined(*columns)
    for number, strings in enumerate(parts):
        yield labels.codes == number, strings
