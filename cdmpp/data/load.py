"""Reading of any measurement table: project records or a public table."""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike
from pathlib import Path

from cdmpp.data.folder import records_file
from cdmpp.data.importers import IMPORTERS, SCHEDULE_IMPORTERS, Importer, TunedImporter
from cdmpp.data.program_csv import matches, read_program_csv
from cdmpp.data.raw import read_columns, read_raw
from cdmpp.data.records import NEEDED, read_records, write_records
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError


def load_table(path: str | PathLike[str], share: float = 1.0) -> MeasurementTable:
    """Read a table; its columns decide the format.

    Parameters
    ----------
    path : path
        Project records (Parquet), a dataset folder that holds them (:mod:`cdmpp.data.folder`), one of the
        public operator tables (Parquet, CSV or gzipped CSV), or programs with their latencies
        (:mod:`cdmpp.data.program_csv`).
    share : float
        Share of the configurations to keep of a public table of schedules, in (0, 1]: the same ones on every device.

    Raises
    ------
    DataError
        The file is missing, unreadable, or of no known format (the message lists its columns), or ``share`` is below
        1 and the table is not one of schedules.
    """
    file = records_file(path)
    columns = read_columns(file)
    records = set(columns) >= NEEDED
    importer = None if records else detect(columns)
    if isinstance(importer, TunedImporter):
        return importer.table(read_raw(file, importer.columns()), share)
    if share != 1:
        raise DataError(
            f"{file} is no public table of schedules: a share of {share} of its rows cannot be kept",
            hint=f"leave the share out; it is for the tables of {', '.join(i.name for i in SCHEDULE_IMPORTERS)}",
        )
    if records:
        return read_records(file)
    if importer is None and matches(columns):
        return read_program_csv(file)
    if importer is None:
        raise _unknown(file, columns)
    return importer.table(read_raw(file, importer.columns()))


def import_table(path: str | PathLike[str], out: str | PathLike[str], share: float = 1.0) -> MeasurementTable:
    """Read any table and write it as project records; ``share`` as :func:`load_table`.

    Returns
    -------
    MeasurementTable
        What was written: every row of the file, those that cannot be used with their reason.

    Raises
    ------
    DataError
        ``out`` is the table itself, or the table cannot be read.
    """
    source = records_file(path)
    if Path(out).exists() and source.exists() and Path(out).samefile(source):
        raise DataError(f"{out} is the table itself: it would be lost", hint="choose another file")
    table = load_table(source, share)
    write_records(table, out)
    return table


def detect(columns: Collection[str]) -> Importer | None:
    """The importer whose table has these columns, if any."""
    return next((i for i in (*IMPORTERS, *SCHEDULE_IMPORTERS) if i.matches(columns)), None)


def _unknown(path: Path, columns: list[str]) -> DataError:
    shown = ", ".join(columns[:40]) + (", ..." if len(columns) > 40 else "")
    importers = (*IMPORTERS, *SCHEDULE_IMPORTERS)
    nearest = min(importers, key=lambda i: len(i.lacking(columns)) + len(i.lacks & set(columns)))
    lacking = ", ".join(sorted(nearest.lacking(columns)))
    return DataError(
        f"{path}: no known table has these columns: {shown}",
        hint=f"known: project records, program with latency_us, {', '.join(i.name for i in importers)}; "
        + (f"nearest is {nearest.name}, which also needs {lacking}" if lacking else "see docs/data.md"),
    )
