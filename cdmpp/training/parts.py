"""Which part of a run each program falls in, as the configuration says."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from cdmpp.data.splits import PART_NAMES, TEST, UNUSED, program_parts
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from cdmpp.training.config import DataConfig

Array = np.ndarray[Any, np.dtype[Any]]

#: Provenance column of records: the networks that a program's task occurs in, "resnet18;vgg11".
NETWORKS = "networks"


def choose_parts(table: MeasurementTable, data: DataConfig) -> Array:
    """Part of every program, by key (int8, see :mod:`cdmpp.data.splits`).

    ``split = "shape"``: by the hash of an operator's shape or of a TVM program's task. ``"network"``: the
    programs of every task that occurs in a test network are the test part, whatever other networks use
    the task; of the rest, the hash puts ``validation_share`` aside; programs of no network are in no part.

    Raises
    ------
    DataError
        A test network that no record names, or a task in two parts.
    """
    if data.split == "shape":
        parts = program_parts(table, test=data.test_share, validation=data.validation_share)
    else:
        parts = _by_network(table, data)
    _assert_tasks_apart(table, parts)
    return parts


def networks_of(table: MeasurementTable) -> list[frozenset[str]]:
    """Networks of every program, by key: those of all records of its task."""
    column = table.provenance.get(NETWORKS)
    if column is None:
        return [frozenset()] * table.n_programs
    unit = _units(table)
    found: defaultdict[str, set[str]] = defaultdict(set)
    named = np.flatnonzero(table.program_key >= 0)
    pairs = np.unique(np.stack([table.program_key[named], column.codes[named]], axis=1), axis=0)
    for key, label in pairs.tolist():
        found[unit[key]].update(name for name in column.names[label].split(";") if name)
    return [frozenset(found[name]) for name in unit]


def _by_network(table: MeasurementTable, data: DataConfig) -> Array:
    networks = networks_of(table)
    known = set().union(*networks) if networks else set()
    unknown = sorted(set(data.test_networks) - known)
    if unknown:
        raise DataError(
            f"no record is of network {', '.join(unknown)}",
            hint=f"test_networks are names in the records' column {NETWORKS!r}: {', '.join(sorted(known))}",
        )
    parts = program_parts(table, test=0.0, validation=data.validation_share)
    held = set(data.test_networks)
    parts[[not names for names in networks]] = UNUSED
    parts[[bool(names & held) for names in networks]] = TEST
    return parts


def _units(table: MeasurementTable) -> list[str]:
    """What is never divided, by program key: a task, or a program of no task."""
    names = list(table.program_hashes)
    first = table.tvm.first_key
    names[first:] = [task or name for task, name in zip(table.tvm.tasks, names[first:], strict=True)]
    return names


def _assert_tasks_apart(table: MeasurementTable, parts: Array) -> None:
    tvm = np.asarray(parts[table.tvm.first_key :]) if table.tvm.hashes else np.zeros(0)
    seen: dict[str, int] = {}
    for task, part in zip(table.tvm.tasks, tvm.tolist(), strict=True):
        if task and part in PART_NAMES and seen.setdefault(task, part) != part:
            raise DataError(
                f"task {task} is in {PART_NAMES[seen[task]]} and in {PART_NAMES[part]}",
                hint="all schedules of a task belong to one part",
            )
