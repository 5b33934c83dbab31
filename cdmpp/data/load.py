"""Reading of any measurement table: project records or a public table; and the folder of public operator tables.

The public tables are not part of the repository. Every command that needs them takes ``--public-data DIR``, or the
environment variable ``CDMPP_PUBLIC_DATA``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from cdmpp.data.folder import records_file
from cdmpp.data.importers import IMPORTERS, SCHEDULE_IMPORTERS, Importer, TunedImporter, TuningLogImporter
from cdmpp.data.importers.log_files import log_importer, read_log
from cdmpp.data.program_csv import matches, read_program_csv
from cdmpp.data.raw import read_columns, read_raw
from cdmpp.data.records import NEEDED, as_device, read_records, write_records
from cdmpp.data.table import MeasurementTable, concat
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError

logger = logging.getLogger(__name__)

ENVIRONMENT = "CDMPP_PUBLIC_DATA"
_SUFFIXES = (".parquet", ".csv", ".csv.gz")


def load_table(
    path: str | PathLike[str], share: float = 1.0, *, per_task: int | None = None, epilogue: str = ""
) -> MeasurementTable:
    """Read a table; its columns decide the format.

    ``path``: project records (Parquet), a dataset folder that holds them (:mod:`cdmpp.data.folder`), one of the public
    operator tables (Parquet, CSV or gzipped CSV), programs with their latencies (:mod:`cdmpp.data.program_csv`), or a
    tuning log (:mod:`cdmpp.data.importers.log_files`). ``share``, in (0, 1], of the configurations of a public table of
    schedules is kept: the same ones on every device. ``per_task`` schedules are kept of each task and device of a
    tuning log or its table. ``epilogue`` ("", "add" or "add_relu"): operations behind the workloads of a log of Ansor,
    which does not state them. An option of another kind of table is an error.
    """
    file = records_file(path)
    log = log_importer(file)
    columns = [] if log else read_columns(file)
    records = set(columns) >= NEEDED
    importer = None if records else log or detect(columns)
    if isinstance(importer, TuningLogImporter) and share == 1:
        raw = read_log(file, log) if log else read_raw(file, importer.columns())
        return importer.table(raw, per_task, epilogue)
    if per_task is not None or epilogue:
        raise DataError(
            f"{file} is no tuning log: schedules per task and an epilogue do not apply",
            hint="they are for logs of Ansor and MetaSchedule; of tables of Kernel Tuner a share can be kept",
        )
    if isinstance(importer, TunedImporter):
        return importer.table(read_raw(file, importer.columns()), share)
    if share != 1:
        raise DataError(
            f"{file} is no public table of schedules: a share of {share} of its rows cannot be kept",
            hint="leave the share out; it is for the tables of "
            + ", ".join(i.name for i in SCHEDULE_IMPORTERS if isinstance(i, TunedImporter)),
        )
    if records:
        return read_records(file)
    if importer is None and matches(columns):
        return read_program_csv(file)
    if importer is None:
        raise _unknown(file, columns)
    return importer.table(read_raw(file, importer.columns()))


def import_tables(
    paths: Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    share: float = 1.0,
    *,
    device: DeviceSpec | None = None,
    per_task: int | None = None,
    epilogue: str = "",
) -> MeasurementTable:
    """Read tables of any kind and write them as project records to ``out``, which may not be one of them.

    ``device`` replaces the device that the rows name; the other options are those of :func:`load_table`. Returns what
    was written: every row of the files, those that cannot be used with their reason.
    """
    for source in map(records_file, paths):
        if Path(out).exists() and source.exists() and Path(out).samefile(source):
            raise DataError(f"{out} is the table itself: it would be lost", hint="choose another file")
    table = concat([load_table(path, share, per_task=per_task, epilogue=epilogue) for path in paths])
    if device is not None:
        table = as_device(table, device)
    write_records(table, out)
    return table


def import_table(path: str | PathLike[str], out: str | PathLike[str], share: float = 1.0) -> MeasurementTable:
    """:func:`import_tables` of one table."""
    return import_tables([path], out, share)


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


@dataclass(frozen=True)
class PublicTable:
    """One file of a folder of public data, its importer, and the sources of its rows."""

    path: Path
    importer: Importer
    sources: frozenset[str]

    def load(
        self, sources: Collection[str] | None = None, share: float = 1.0, per_task: int | None = None
    ) -> MeasurementTable:
        """Read and check it; of a table of schedules only the chosen rows of ``sources``."""
        raw = read_raw(self.path, self.importer.columns())
        if isinstance(self.importer, TuningLogImporter):
            return self.importer.table(raw, per_task)
        if isinstance(self.importer, TunedImporter):
            return self.importer.table(raw, share, sources)
        return self.importer.table(raw)


def public_data_dir(option: str | PathLike[str] | None = None) -> Path:
    """Folder of the public tables: ``option``, else ``$CDMPP_PUBLIC_DATA``."""
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
    """The tables in a folder (as :func:`public_data_dir`) that a command needs: those of the importers that ``sources``
    names, by default all of operators and collectives. The error names each missing table, its hint where it comes
    from."""
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
    folder: str | PathLike[str] | None = None,
    sources: Collection[str] | None = None,
    share: float = 1.0,
    per_task: int | None = None,
) -> MeasurementTable:
    """Load the wanted public tables (:func:`find_public_tables`), one below the other; ``share`` and ``per_task`` apply
    to tables of schedules as in :func:`load_table`."""
    table = concat([table.load(sources, share, per_task) for table in find_public_tables(folder, sources)])
    if sources is None or set(table.source.used()) <= set(sources):
        return table
    return table.select(table.source.is_in(sources))
