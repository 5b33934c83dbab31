"""Splits shipped as data: ``splits.parquet`` beside the records.

One row assigns one program or one device to a part of one split:

=========== =============================================================================================
``split``   ``task``, ``network``, or ``device:NAME``
``unit``    ``program`` or ``device``: kind of ``key``
``key``     program hash, or device name
``part``    ``train``, ``validation``, ``test``, or ``unused``
``task``    task of a program (its hash), "" for a program of none and for devices
``networks`` networks that use the task, "a;b"
=========== =============================================================================================

``task``: whole tasks, by the hash of the task. ``network``: everything that a test network contains, in any of its
sizes, is test, and nothing of it is trained on, although other networks use it, too. ``device:NAME``: that device is
test, the others are training; programs are in both, for the query is what a known program takes on a new device.
``sealed``: every program of a task that a sealed network uses is test; in all other splits it is unused
(:mod:`cdmpp.data.splits`). Whatever is written or read is checked on hashes, not on names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.arrow import pa, pq
from cdmpp.data.folder import SPLITS, records_file
from cdmpp.data.splits import (
    PART_NAMES,
    SEALED,
    SEALED_FROM,
    TEST,
    TRAIN,
    UNUSED,
    check_sealed,
    network_names,
    network_parts,
    networks_of,
    program_parts,
    sealed_names,
    sealed_programs,
    split_names,
    without_sizes,
)
from cdmpp.data.table import MeasurementTable, without_programs
from cdmpp.errors import DataError
from cdmpp.utils.files import check_parquet, parse_json
from cdmpp.utils.writing import replacing

TASK, NETWORK, DEVICE = "task", "network", "device:"
#: Shares of the tasks: a data set of some hundred tasks needs more than the millions of public rows do.
TEST_SHARE, VALIDATION_SHARE = 0.2, 0.1
_PARTS = {**{name: part for part, name in PART_NAMES.items()}, "unused": UNUSED}
_NAMES = {part: name for name, part in _PARTS.items()}
_COLUMNS = ("split", "unit", "key", "part", "task", "networks")
_METADATA = b"cdmpp_splits"
_KINDS = {NETWORK: "test network", SEALED: "sealed network"}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splits:
    """Parts by what they were made of. A part is a code of :mod:`cdmpp.data.splits`."""

    programs: Mapping[str, Mapping[str, int]]  # split -> program hash -> part
    devices: Mapping[str, Mapping[str, int]]  # split -> device name -> part
    tasks: Mapping[str, str]  # program hash -> its task
    networks: Mapping[str, str]  # program hash -> networks that use it ("a;b")
    # how they were made: shares, test networks, sealed networks and the list that they were chosen from
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the splits."""
        return [*self.programs, *self.devices]

    @property
    def sealed(self) -> frozenset[str]:
        """Hashes of the sealed programs."""
        return frozenset(digest for digest, part in self.programs.get(SEALED, {}).items() if part == TEST)

    def rows(self, table: MeasurementTable, split: str) -> NDArray[np.int8]:
        """Part of every row of a table; ``UNUSED`` for programs and devices that the split does not name. Sealed
        programs have a part in the split ``sealed`` alone."""
        if split in self.programs:
            chosen = self.programs[split]
            parts = [*(chosen.get(digest, UNUSED) for digest in table.program_hashes), UNUSED]
            return np.array(parts, dtype=np.int8)[table.program_key]
        if split in self.devices:
            named = self.devices[split]
            codes = [*(named.get(name, UNUSED) for name in table.device.names), UNUSED]
            hashes = self.sealed
            sealed = np.array([*(digest in hashes for digest in table.program_hashes), False])
            parts_of_rows = np.array(codes, dtype=np.int8)[table.device.codes]
            return np.where(sealed[table.program_key], np.int8(UNUSED), parts_of_rows)
        raise DataError(f"there is no split {split!r}", hint="one of: " + ", ".join(self.names))

    def check(self) -> None:
        """Raise a DataError if something leaks: a task is in two parts, one of a test network is trained on, or a
        sealed one is in any part of another split."""
        check_sealed(self.about)
        sealed = self.sealed
        for split, parts in self.programs.items():
            seen: dict[str, int] = {}
            for digest, part in parts.items():
                task = self.tasks.get(digest) or digest
                if part != UNUSED and seen.setdefault(task, part) != part:
                    raise DataError(
                        f"split {split}: task {task} is in {_NAMES[seen[task]]} and in {_NAMES[part]}",
                        hint="make the splits again: cdmpp data split DIR",
                    )
                if split != SEALED and part != UNUSED and digest in sealed:
                    raise DataError(
                        f"split {split}: sealed program {digest} is in {_NAMES[part]}",
                        hint="make the splits again: cdmpp data split DIR",
                    )
        for split, kind in ((NETWORK, "test_networks"), (SEALED, SEALED)):
            held = {without_sizes(name) for name in self.about.get(kind, ())}
            for digest, part in self.programs.get(split, {}).items():
                leaked = held.intersection(map(without_sizes, split_names(self.networks.get(digest, ""))))
                if leaked and part in (TRAIN, _PARTS["validation"]):
                    raise DataError(
                        f"split {split}: program {digest} of {_KINDS[split]} {min(leaked)} is in {_NAMES[part]}",
                        hint="make the splits again: cdmpp data split DIR",
                    )

    def counts(self) -> dict[str, dict[str, int]]:
        """Number of programs or devices in each part of each split."""
        every = {**self.programs, **self.devices}
        return {
            split: {name: sum(p == part for p in parts.values()) for name, part in _PARTS.items()}
            for split, parts in every.items()
        }


def make_splits(
    table: MeasurementTable,
    *,
    test_networks: Collection[str] = (),
    sealed_from: Collection[str] = (),
    sealed: int = 0,
    test_share: float = TEST_SHARE,
    validation_share: float = VALIDATION_SHARE,
) -> Splits:
    """Split a table by task, by network and by device, and seal networks.

    ``test_networks`` are held out, by name and in all their sizes: the caller chooses, and the file keeps the names.
    Without any there is no split by network. A sealed network stays sealed and is no test network. ``sealed`` networks
    are chosen from ``sealed_from`` (:func:`cdmpp.data.splits.sealed_names`).

    The shares are of the tasks; which they are, the hash of the task decides, so that the part of a task is the same in
    every data set and needs no seed. ``validation_share`` also holds of the split by network. Test networks that no
    record is of, or that use every task, are an error.
    """
    about: dict[str, Any] = {"test_share": test_share, "validation_share": validation_share}
    chosen = sealed_names(sealed_from, sealed) if sealed else ()
    if chosen:
        stated = sorted({without_sizes(name) for name in sealed_from})
        about |= {SEALED: list(chosen), SEALED_FROM: stated}
        test_networks = [name for name in test_networks if without_sizes(name) not in chosen]
    hidden = sealed_programs(table, chosen)
    rest = without_programs(table, hidden) if hidden.any() else table
    programs = {TASK: program_parts(rest, test=test_share, validation=validation_share)}
    if test_networks:
        programs[NETWORK] = network_parts(rest, test_networks, validation=validation_share)
        if not (programs[NETWORK] == TRAIN).any():
            raise DataError(
                "the test networks use every task: nothing is left to train on", hint="hold fewer networks out"
            )
    parts = {split: np.full(table.n_programs, UNUSED, dtype=np.int8) for split in programs}
    for split, of_rest in programs.items():
        parts[split][~hidden] = of_rest
    if chosen:
        by_hash = program_parts(table, test=0.0, validation=validation_share)
        parts[SEALED] = np.where(hidden, np.int8(TEST), by_hash)
    names = sorted(table.device.used())
    devices = {
        f"{DEVICE}{held}": {name: TEST if name == held else TRAIN for name in names} for held in names if len(names) > 1
    }
    hashes = table.program_hashes
    networks = [";".join(sorted(users)) for users in networks_of(table)]
    splits = Splits(
        programs={split: dict(zip(hashes, codes.tolist(), strict=True)) for split, codes in parts.items()},
        devices=devices,
        tasks={digest: task for digest, task in zip(table.tvm.hashes, table.tvm.tasks, strict=True) if task},
        networks=dict(zip(hashes, networks, strict=True)),
        about=about | {"test_networks": sorted(test_networks)},
    )
    splits.check()
    return splits


def renew_splits(
    table: MeasurementTable, path: str | PathLike[str], *, test_networks: Collection[str] = (), sealed: int = 0
) -> Splits:
    """Splits of a table in place of those in ``path``, which need not exist; networks that the file seals stay sealed.

    ``sealed``: how many networks of the table to seal where the file seals none. A file that seals another number, or
    that cannot be read, so that its sealed networks are unknown, is an error.
    """
    stated, count = read_seal(path)
    if count and sealed not in (0, count):
        raise DataError(
            f"{path} seals {count} networks ({', '.join(sealed_names(stated, count))}), not {sealed}",
            hint="leave --seal out: sealed networks are chosen once",
        )
    return make_splits(
        table,
        test_networks=test_networks,
        sealed=count or sealed,
        sealed_from=stated if count else network_names(table),
    )


def read_seal(path: str | PathLike[str]) -> tuple[tuple[str, ...], int]:
    """The list of networks that a file of splits states, and how many of them it seals; empty and 0 without any. Sealed
    networks that do not follow from the list are an error."""
    if not Path(path).is_file():
        return (), 0
    try:
        check_parquet(path)
        about = parse_json((pq.read_schema(path).metadata or {}).get(_METADATA, b"{}"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path} is no readable file of splits, so the networks that it seals are unknown: {error}",
            hint="restore the file, or remove it if no network was sealed",
        ) from None
    check_sealed(about)
    return tuple(about.get(SEALED_FROM, ())), len(about.get(SEALED, ()))


def write_splits(splits: Splits, path: str | PathLike[str]) -> None:
    """Check splits and write them; written aside, then renamed."""
    splits.check()
    rows: list[tuple[str, ...]] = []
    for split, parts in splits.programs.items():
        for digest, part in parts.items():
            task, networks = splits.tasks.get(digest, ""), splits.networks.get(digest, "")
            rows.append((split, "program", digest, _NAMES[part], task, networks))
    for split, parts in splits.devices.items():
        rows += [(split, "device", name, _NAMES[part], "", "") for name, part in parts.items()]
    columns = list(zip(*rows, strict=True)) or [()] * len(_COLUMNS)
    arrays = [pa.array(column, type=pa.string()).dictionary_encode() for column in columns]
    metadata = {_METADATA: json.dumps(dict(splits.about), sort_keys=True).encode()}
    made = pa.table(arrays, names=_COLUMNS).replace_schema_metadata(metadata)
    with replacing(path) as aside:
        pq.write_table(made, aside, compression="zstd")


def read_splits(path: str | PathLike[str]) -> Splits:
    """Read and check what :func:`write_splits` wrote."""
    try:
        check_parquet(path)
        arrow = pq.read_table(path)
        about = parse_json((arrow.schema.metadata or {}).get(_METADATA, b"{}"))
    except (pa.ArrowException, OSError, ValueError) as error:
        message = f"{path} is no readable file of splits: {error}"
        raise DataError(message, hint="cdmpp data split DIR makes one") from None
    lacking = sorted(set(_COLUMNS) - set(arrow.column_names))
    if lacking:
        raise DataError(f"{path}: splits lack {', '.join(lacking)}", hint="cdmpp data split DIR makes them")
    parts: dict[str, dict[str, dict[str, int]]] = {"program": {}, "device": {}}
    tasks: dict[str, str] = {}
    networks: dict[str, str] = {}
    for split, unit, key, part, task, names in zip(*(arrow.column(name).to_pylist() for name in _COLUMNS), strict=True):
        if unit not in parts or part not in _PARTS:
            raise DataError(f"{path}: unknown unit {unit!r} or part {part!r}", hint="cdmpp data split DIR")
        if parts[unit].setdefault(split, {}).setdefault(key, _PARTS[part]) != _PARTS[part]:
            raise DataError(f"{path}: {unit} {key} is in two parts of split {split}", hint="cdmpp data split DIR")
        if unit == "program":
            networks[key] = names
            if task:
                tasks[key] = task
    splits = Splits(parts["program"], parts["device"], tasks, networks, about)
    splits.check()
    return splits


def stored_seal(path: str | PathLike[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Sealed networks and tasks that ``splits.parquet`` beside a table names; empty without that file."""
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
    """A table without the programs and rows that are sealed by a split file beside one of its sources, ``paths``.

    A program is sealed by its task and by the networks that the records name, so that programs measured after the split
    file was written are sealed, too. The count of programs is logged.
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
