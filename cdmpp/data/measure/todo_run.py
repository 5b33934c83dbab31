"""Measurement of the programs of a folder from ``cdmpp select``; a repeated call resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cdmpp.data.load import load_table
from cdmpp.data.merge import concat
from cdmpp.data.noise import measured
from cdmpp.data.physics import UNSTABLE
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from cdmpp.programs.operators import OperatorSpec

RECORDS = "records.parquet"
#: Seconds between two writes of the measurements.
_WRITE_EVERY_S = 20.0


@dataclass(frozen=True)
class Measured:
    """Result of a run.

    Attributes
    ----------
    path : Path
    records : int
        Number of successful records in the file; ``new`` of them are from this run.
    new : int
    failed : dict of str to str
        Programs that failed, with the reason.
    """

    path: Path
    records: int
    new: int
    failed: dict[str, str]


def records_path(out: Path | None, folder: Path) -> Path:
    """Return the file of records: ``out`` if it ends in .parquet, else :data:`RECORDS` in that folder."""
    place = folder if out is None else out
    return place if place.suffix == ".parquet" else place / RECORDS


def measure_programs(
    programs: Sequence[OperatorSpec],
    measure: Callable[[OperatorSpec], Measurement],
    path: Path,
    *,
    device: str,
    protocol: str,
    step: Callable[[], None] = lambda: None,
) -> Measured:
    """Measure programs into a file of records; programs that it already has are skipped.

    After an interruption (``KeyboardInterrupt``) the file contains the measurements so far.

    Parameters
    ----------
    measure : callable
        For example :meth:`cdmpp.data.measure.library.LibraryTimer.record`.
    path : Path
        Parquet file, as :func:`records_path` names it.
    device, protocol : str
        Device and protocol of ``measure``.
    step : callable
        Called once per program, measured or skipped.

    Raises
    ------
    DataError
        The file cannot be written, or has records of another device or protocol.
    """
    done = _done(path, device, protocol)
    hashes = set() if done is None else {done.program_hashes[key] for key in done.program_key.tolist()}
    new: list[Measurement] = []
    written = time.monotonic()
    try:
        for spec in programs:
            if spec.hash() not in hashes:
                row = measure(spec)
                if row.excluded_reason == UNSTABLE:  # the disturbance may have ended
                    row = measure(spec)
                new.append(row)
                if time.monotonic() - written > _WRITE_EVERY_S:
                    _write(path, done, new)
                    written = time.monotonic()
            step()
    finally:
        if new:
            _write(path, done, new)
    failed = {row.program: row.failure for row in new if row.failure}
    return Measured(path, (0 if done is None else len(done)) + len(new) - len(failed), len(new) - len(failed), failed)


def _done(path: Path, device: str, protocol: str) -> MeasurementTable | None:
    """Return the successful records of earlier runs."""
    if not path.exists():
        return None
    table = load_table(path)
    for what, labels, expected in (("device", table.device, device), ("protocol", table.protocol, protocol)):
        others = set(labels.used()) - {expected}
        if others:
            raise DataError(
                f"{path} holds records of the {what} {', '.join(sorted(others))}, not of {expected}",
                hint="choose another --out",
            )
    return table.select(np.flatnonzero(measured(table) & (table.program_key >= 0)))


def _write(path: Path, done: MeasurementTable | None, new: Sequence[Measurement]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}", hint="choose another --out") from None
    table = from_measurements(list(new))
    write_records(table if done is None else concat([done, table]), path)
