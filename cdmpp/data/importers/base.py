"""Base class of the importers of public tables."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from cdmpp.data.assemble import Draft, Group, assemble
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import RawTable
from cdmpp.data.table import MeasurementTable

#: Columns of other sources that no table of layers of serving systems has.
NOT_SERVING = frozenset({"framework", "precision", "direction", "program", "batch", "rows", "in_hw", "message_bytes"})


@dataclass(frozen=True)
class Importer:
    """One public source.

    Attributes
    ----------
    name : str
        Value of the ``source`` column.
    file_name : str
        The table's usual name in a folder of public data.
    repository, commit, origin, licence : str
        Where the numbers come from.
    protocol : str
        How the source timed.
    needs : frozenset of str
        Columns without which the table is not this one.
    one_of : tuple of frozenset of str
        Sets of columns, at least one of which is wholly there: the sizes of one family of operators each.
        A part of the table may come without the columns that are empty for its operators.
    lacks : frozenset of str
        Columns that only other tables have.
    groups : callable
        Rows by operator.
    reads : frozenset of str
        Further columns that are read where present; all others are never looked at.
    dtype, framework : callable
        Labels per row. Rows of a group with an element type of its own do not read ``dtype``.
    protocol_of : callable, optional
        Labels per row, where the source timed in several ways; replaces ``protocol``.
    row_source : callable or None
        Labels of the column ``source``; None: ``name`` for every row.
    read_by : str
        Name of the importer that reads this source's tables, which have the same columns; "" for this one.
    doubtful : callable or None
        Rows of doubtful meaning by reason (:mod:`cdmpp.data.assemble`): evaluated, but not trained on.
    source_columns : frozenset of str
        Columns that ``row_source`` reads.
    """

    name: str
    file_name: str
    repository: str
    commit: str
    origin: str
    licence: str
    protocol: str
    needs: frozenset[str]
    lacks: frozenset[str]
    groups: Callable[[RawTable, Labels], list[Group]]
    framework: Callable[[RawTable], Labels]
    reads: frozenset[str] = frozenset()
    one_of: tuple[frozenset[str], ...] = (frozenset(),)
    dtype: Callable[[RawTable], Labels] = lambda raw: raw.labels("dtype")
    row_filter: str = ""
    protocol_of: Callable[[RawTable], Labels] | None = None
    row_source: Callable[[RawTable], Labels] | None = None
    read_by: str = ""
    doubtful: Callable[[RawTable], dict[str, Mask]] | None = None
    source_columns: frozenset[str] = frozenset({"dtype"})

    def matches(self, columns: Collection[str]) -> bool:
        """Whether a table with these columns is from this source."""
        given = set(columns)
        return (
            not self.read_by and self.needs <= given and not self.lacks & given and any(o <= given for o in self.one_of)
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
        return assemble(
            Draft(
                source=self.sources(raw),
                op=op,
                device_name=raw.labels("device"),
                dtype=self.dtype(raw),
                backend=Labels.constant("library", len(raw)),
                protocol=self.protocol_of(raw) if self.protocol_of else Labels.constant(self.protocol, len(raw)),
                framework=self.framework(raw),
                latency_s=raw.latency_s(),
                groups=self.groups(raw, op),
                row_filter=raw.bools(self.row_filter) if self.row_filter else None,
                doubtful=self.doubtful(raw) if self.doubtful else {},
            )
        )


def always(name: str) -> Callable[[RawTable], Labels]:
    """One label for every row of a source."""
    return lambda raw: Labels.constant(name, len(raw))
