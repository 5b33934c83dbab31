"""Sealed networks: programs that no training reads, chosen by a rule from a stated list of networks.

``splits.parquet`` names the sealed networks and the list that they were chosen from. A later collection with more
networks does not change them: the list is stored and is never made again from the records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.networks import networks_of, task_of, without_sizes
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError

#: Name of the split, and fields of the metadata: the networks, and the list that they were chosen from.
SEALED, SEALED_FROM = "sealed", "sealed_from"
COUNT = 4
_RULE = "sealed-1:"


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
