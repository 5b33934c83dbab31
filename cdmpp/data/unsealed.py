"""Tables for training: without the programs that a split file beside one of their sources seals."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from os import PathLike

from cdmpp.data.folder import SPLITS, records_file
from cdmpp.data.merge import without_programs
from cdmpp.data.sealed import SEALED, sealed_programs
from cdmpp.data.split_file import read_splits
from cdmpp.data.table import MeasurementTable

logger = logging.getLogger(__name__)


def stored_seal(path: str | PathLike[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Sealed networks and tasks that ``splits.parquet`` beside a table names; empty without that file.

    Raises
    ------
    DataError
        The file cannot be read, or its splits leak.
    """
    file = records_file(path).with_name(SPLITS)
    if not file.is_file():
        return frozenset(), frozenset()
    splits = read_splits(file)
    tasks = frozenset(splits.tasks.get(digest) or digest for digest in splits.sealed)
    return frozenset(splits.about.get(SEALED, ())), tasks


def sealed_networks(paths: Iterable[str | PathLike[str]]) -> tuple[str, ...]:
    """Networks that the split files beside some tables seal, sorted."""
    return tuple(sorted(frozenset[str]().union(*(stored_seal(path)[0] for path in paths))))


def without_sealed(table: MeasurementTable, paths: Iterable[str | PathLike[str]]) -> MeasurementTable:
    """A table without the programs and rows that are sealed by a split file beside one of its sources.

    A program is sealed by its task and by the networks that the records name, so that programs measured after the
    split file was written are sealed, too. The count of programs is logged.

    Parameters
    ----------
    table : MeasurementTable
        Concatenation of all the sources.
    paths : iterable of path
        Files or dataset folders that the table was read from.
    """
    seals = [stored_seal(path) for path in paths]
    names = frozenset[str]().union(*(seal[0] for seal in seals))
    if not names:
        return table
    drop = sealed_programs(table, names, tasks=frozenset[str]().union(*(seal[1] for seal in seals)))
    if not drop.any():
        return table
    logger.warning("left out %s programs of the sealed networks %s", f"{drop.sum():,}", ", ".join(sorted(names)))
    return without_programs(table, drop)
