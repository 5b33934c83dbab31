"""Layout of a dataset folder that ``cdmpp collect`` writes.

=================== =====================================================================================
``records.parquet`` project records (:mod:`cdmpp.data.records`): the data set
``repeats.parquet`` second measurements, minutes later, of some records: for the noise floor, not data
``splits.parquet``  parts of the programs (:mod:`cdmpp.data.split_file`)
``device.toml``     the device, for ``--device``; of several devices ``device-NAME.toml``
``README.md``       card (:mod:`cdmpp.data.card`)
``collect.sqlite``  the collector's store while it works
=================== =====================================================================================

Whatever reads a file of records reads such a folder too.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from cdmpp.errors import DataError
from cdmpp.programs.frontends.metaschedule import RECORDS as TUNING_RECORDS
from cdmpp.programs.frontends.metaschedule import WORKLOADS as TUNING_WORKLOADS

RECORDS, REPEATS, SPLITS, CARD = "records.parquet", "repeats.parquet", "splits.parquet", "README.md"
STORE = "collect.sqlite"
DEVICE = "device.toml"


def records_file(path: str | PathLike[str]) -> Path:
    """The file to read: ``path`` itself, or the records of a dataset folder or of a folder of MetaSchedule."""
    place = Path(path)
    if not place.is_dir():
        return place
    if (place / RECORDS).is_file():
        return place / RECORDS
    if (place / TUNING_WORKLOADS).is_file():
        return place / TUNING_RECORDS
    if (place / STORE).is_file():
        raise DataError(
            f"the collection in {place} is not finished: there is no {RECORDS} yet",
            hint=f"give the same command again, it goes on: cdmpp collect ... --out {place}, or cdmpp measure {place}",
        )
    raise DataError(
        f"{place} is a folder without {RECORDS}", hint="cdmpp collect makes such folders; a file may be named, too"
    )


def repeats_file(path: str | PathLike[str]) -> Path | None:
    """The second measurements beside the records, if there are any."""
    repeats = records_file(path).with_name(REPEATS)
    return repeats if Path(path).is_dir() and repeats.is_file() else None
