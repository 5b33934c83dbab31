"""Networks as units of a split: no task of a test network is trained on, whatever other networks use it.

Sealed networks are programs that no training reads, chosen by a rule from a stated list of networks. ``splits.parquet``
names the sealed networks and the list that they were chosen from. A later collection with more networks does not change
them: the list is stored and is never made again from the records.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.splits import PART_NAMES, TEST, UNUSED, VALIDATION_SHARE, program_parts
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError

#: Provenance column of records: the networks that a program's task occurs in, "resnet18;vgg11".
NETWORKS = "networks"
#: Name of the split, and fields of the metadata: the networks, and the list that they were chosen from.
SEALED, SEALED_FROM = "sealed", "sealed_from"
COUNT = 4
_RULE = "sealed-1:"


def network_names(table: MeasurementTable) -> list[str]:
    """Networks that the rows name, sorted."""
    column = table.provenance.get(NETWORKS)
    return sorted({name for text in column.used() for name in split_names(text)}) if column else []


def split_names(text: str) -> list[str]:
    """Names of a cell of the column."""
    return [name for name in text.split(";") if name]


def without_sizes(name: str) -> str:
    """A network whatever its sizes: "vit" of "vit:image=32"."""
    return name.partition(":")[0].strip()


def task_of(table: MeasurementTable) -> list[str]:
    """Unit of the split for each program key: a task, or a program without a task."""
    names = list(table.program_hashes)
    first = table.tvm.first_key
    names[first:] = [task or name for task, name in zip(table.tvm.tasks, names[first:], strict=True)]
    return names


def networks_of(table: MeasurementTable) -> list[frozenset[str]]:
    """Networks of every program, by key: those of all records of its task."""
    column = table.provenance.get(NETWORKS)
    if column is None:
        return [frozenset()] * table.n_programs
    unit = task_of(table)
    networks: defaultdict[str, set[str]] = defaultdict(set)
    named = np.flatnonzero(table.program_key >= 0)
    pairs = np.unique(np.stack([table.program_key[named], column.codes[named]], axis=1), axis=0)
    for key, label in pairs.tolist():
        networks[unit[key]].update(split_names(column.names[label]))
    return [frozenset(networks[name]) for name in unit]


def network_parts(
    table: MeasurementTable, test_networks: Collection[str], *, validation: float = VALIDATION_SHARE
) -> NDArray[np.int8]:
    """Part of every program, by key, when whole networks are held out.

    A test network is held out in all its sizes: "vit" takes "vit:image=32" along, and the other way round.
    The programs of every task that occurs in a test network are the test part, even where other networks use
    the task; of the rest, :func:`cdmpp.data.splits.program_parts` puts ``validation`` aside by the task's
    hash; programs of no network are in no part.

    Raises
    ------
    DataError
        A test network that no record names.
    """
    networks, known = networks_of(table), network_names(table)
    held = {without_sizes(name) for name in test_networks}
    unknown = sorted(held - {without_sizes(name) for name in known})
    if unknown:
        raise DataError(
            f"no record is of network {', '.join(unknown)}",
            hint=f"names in the records' column {NETWORKS!r}: {', '.join(known) or 'none'}",
        )
    parts = program_parts(table, test=0.0, validation=validation)
    parts[[not names for names in networks]] = UNUSED
    parts[[not held.isdisjoint(map(without_sizes, names)) for names in networks]] = TEST
    return parts


def assert_tasks_apart(table: MeasurementTable, parts: NDArray[np.int8]) -> None:
    """Make sure that no task is in two parts.

    Raises
    ------
    DataError
        A task is; the message names one.
    """
    seen: dict[str, int] = {}
    for task, part in zip(table.tvm.tasks, parts[table.tvm.first_key :].tolist(), strict=True):
        if task and part in PART_NAMES and seen.setdefault(task, part) != part:
            raise DataError(
                f"task {task} is in {PART_NAMES[seen[task]]} and in {PART_NAMES[part]}",
                hint="all schedules of a task belong to one part",
            )


def sealed_names(networks: Iterable[str], count: int = COUNT) -> tuple[str, ...]:
    """The ``count`` networks with the smallest sha256("sealed-1:" + name), sorted; sizes of a network do not count.

    Raises
    ------
    DataError
        ``count`` networks would leave none to train on, or ``count`` is below 1.
    """
    names = {without_sizes(name) for name in networks}
    if not 1 <= count < len(names):
        raise DataError(
            f"cannot seal {count} of {len(names)} networks", hint=f"from 1 to {len(names) - 1}, so that one is left"
        )
    by_hash = sorted(names, key=lambda name: hashlib.sha256((_RULE + name).encode()).hexdigest())
    return tuple(sorted(by_hash[:count]))


def check_sealed(about: Mapping[str, Any]) -> None:
    """Make sure that the sealed networks of a split file follow from the list that it states.

    Raises
    ------
    DataError
        They do not.
    """
    names = tuple(about.get(SEALED, ()))
    if names and names != sealed_names(about.get(SEALED_FROM, ()), len(names)):
        raise DataError(
            f"sealed networks {', '.join(names)} do not follow from the stated list of networks",
            hint="restore splits.parquet: the sealed networks and their list must not be edited",
        )


def sealed_programs(
    table: MeasurementTable, names: Collection[str], *, tasks: Collection[str] = ()
) -> NDArray[np.bool_]:
    """Mask over program keys: every program of a task that a sealed network, in any size, uses.

    Parameters
    ----------
    table : MeasurementTable
    names : collection of str
        Sealed networks.
    tasks : collection of str
        Tasks, or hashes of programs without a task, that are sealed whatever networks the records name.
    """
    held, unit = {without_sizes(name) for name in names}, task_of(table)
    users = [not held.isdisjoint(map(without_sizes, networks)) for networks in networks_of(table)]
    chosen = frozenset(tasks)
    return np.array([by_name or one in chosen for by_name, one in zip(users, unit, strict=True)], dtype=np.bool_)
