"""The public operator tables: where they are, what is missing, and where each comes from.

They are not part of the repository. Every command that needs them takes ``--public-data DIR``, or the
environment variable ``CDMPP_PUBLIC_DATA``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from cdmpp.data.importers import IMPORTERS, SCHEDULE_IMPORTERS, Importer, TunedImporter
from cdmpp.data.load import detect
from cdmpp.data.raw import read_columns, read_raw
from cdmpp.data.table import MeasurementTable, concat
from cdmpp.errors import DataError

logger = logging.getLogger(__name__)

ENVIRONMENT = "CDMPP_PUBLIC_DATA"
_SUFFIXES = (".parquet", ".csv", ".csv.gz")


@dataclass(frozen=True)
class PublicTable:
    """One file of a folder of public data, its importer, and the sources of its rows."""

    path: Path
    importer: Importer
    sources: frozenset[str]

    def load(self, sources: Collection[str] | None = None, share: float = 1.0) -> MeasurementTable:
        """Read and check it; of a table of schedules only a share of the rows of ``sources``."""
        raw = read_raw(self.path, self.importer.columns())
        if isinstance(self.importer, TunedImporter):
            return self.importer.table(raw, share, sources)
        return self.importer.table(raw)


def public_data_dir(option: str | PathLike[str] | None = None) -> Path:
    """Folder of the public tables: ``option``, else ``$CDMPP_PUBLIC_DATA``.

    Raises
    ------
    DataError
        Neither is given, or there is no such folder.
    """
    given = option or os.environ.get(ENVIRONMENT)
    if not given:
        raise DataError(
            "the public operator tables are not part of the repository, and no folder was given",
            hint=f"pass --public-data DIR or set {ENVIRONMENT}; docs/data.md names the sources",
        )
    folder = Path(given)
    if not folder.is_dir():
        raise DataError(f"no folder of public tables at {folder}", hint=f"check --public-data or {ENVIRONMENT}")
    return folder


def list_public_tables(folder: str | PathLike[str]) -> list[PublicTable]:
    """The operator tables in a folder, recognised by their columns; other files are skipped."""
    tables = []
    for path in sorted(Path(folder).iterdir()):
        if not path.is_file() or not path.name.endswith(_SUFFIXES):
            continue
        try:
            importer = detect(read_columns(path))
            sources = frozenset() if importer is None else _sources(path, importer)
        except DataError as error:
            logger.warning("passed over: %s", error)
            continue
        if importer is not None:
            tables.append(PublicTable(path, importer, sources))
    return tables


def _sources(path: Path, importer: Importer) -> frozenset[str]:
    if importer.row_source is None:
        return frozenset({importer.name})
    return frozenset(importer.sources(read_raw(path, importer.source_columns)).used())


def find_public_tables(
    folder: str | PathLike[str] | None = None, sources: Collection[str] | None = None
) -> list[PublicTable]:
    """The operator tables that a command needs.

    Parameters
    ----------
    folder : path, optional
        As :func:`public_data_dir`.
    sources : collection of str, optional
        Names of importers; default: all tables of operators and collectives.

    Raises
    ------
    DataError
        A table is missing; the message names each, the hint where it comes from.
    """
    known = {importer.name: importer for importer in (*IMPORTERS, *SCHEDULE_IMPORTERS)}
    wanted = [importer.name for importer in IMPORTERS] if sources is None else list(sources)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise DataError(f"no public source is called {unknown[0]!r}", hint="one of: " + ", ".join(known))
    place = public_data_dir(folder)
    tables = [table for table in list_public_tables(place) if table.sources & set(wanted)]
    present = {source for table in tables for source in table.sources}
    missing = [known[name] for name in wanted if name not in present]
    if missing:
        raise DataError(
            f"{place} lacks " + ", ".join(f"{i.file_name} ({i.name})" for i in missing),
            hint="; ".join(f"{i.name}: {i.repository} @ {i.commit}, {i.licence}" for i in missing),
        )
    return tables


def load_public(
    folder: str | PathLike[str] | None = None, sources: Collection[str] | None = None, share: float = 1.0
) -> MeasurementTable:
    """Load the wanted public tables, one below the other.

    Parameters
    ----------
    folder, sources
        As :func:`find_public_tables`.
    share : float
        Share of the configurations of tables of schedules, in (0, 1]: the same ones on every device.
    """
    table = concat([table.load(sources, share) for table in find_public_tables(folder, sources)])
    if sources is None or set(table.source.used()) <= set(sources):
        return table
    wanted = np.array([name in sources for name in table.source.names], dtype=np.bool_)
    return table.select(wanted[table.source.codes])
