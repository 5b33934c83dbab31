"""Rows of measurement tables as contexts and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.model.collectives.context import Context, context_of_fields
from cdmpp.programs.collectives import is_collective

if TYPE_CHECKING:
    from cdmpp.data.table import MeasurementTable

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class CollectiveRows:
    """Collectives of a table.

    Attributes
    ----------
    index : (n,) int
        Rows of the table.
    contexts : list of Context
    context : (n,) int
    bytes : (n,) float
    """

    index: Array
    contexts: list[Context]
    context: Array
    bytes: Array


def collective_rows(
    table: MeasurementTable,
    rows: Array,
    known_as: Callable[[DeviceSpec], str],
    specs: dict[str, DeviceSpec] | None = None,
) -> CollectiveRows:
    """The collectives among some rows of a table; rows of unknown devices must not be among them.

    Parameters
    ----------
    rows : (n,) int
        Rows, all of them collectives.
    known_as : callable
        :meth:`cdmpp.model.collectives.model.CollectiveModel.known_as`.
    specs : dict, optional
        Specifications by device name that replace the table's.
    """
    names = table.device.names
    devices = {
        code: (specs or {}).get(names[code]) or table.device_spec(names[code])
        for code in np.unique(table.device.codes[rows]).tolist()
    }
    known = {code: known_as(device) for code, device in devices.items()}
    protocols = table.protocol.names
    numbers: dict[Context, int] = {}
    context, bytes_ = np.zeros(len(table), dtype=np.int64), np.zeros(len(table))
    wanted = np.zeros(len(table), dtype=np.bool_)
    wanted[rows] = True
    for block in table.specs:
        if not is_collective(block.operator):
            continue
        index = block.row_index
        columns = np.stack([table.device.codes[index], table.protocol.codes[index], block.sizes["ranks"]], axis=1)
        distinct, inverse = np.unique(columns, axis=0, return_inverse=True)
        bytes_[index] = block.sizes["bytes"]
        for number, (device, protocol, ranks) in enumerate(distinct.tolist()):
            members = index[inverse.reshape(-1) == number]
            if not wanted[members].any():
                continue
            fields = {"operator": block.operator, "dtype": block.dtype, **block.flags, "ranks": ranks}
            one = context_of_fields(fields, devices[device], protocols[protocol], known[device])
            context[members] = numbers.setdefault(one, len(numbers))
    return CollectiveRows(rows, list(numbers), context[rows], bytes_[rows])
