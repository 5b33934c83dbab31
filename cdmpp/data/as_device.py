"""Assign a device to measurements that name none or name it differently."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cdmpp.data.labels import Labels
from cdmpp.data.physics import EXCLUDED, flag_rows
from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import DeviceSpec

#: Reasons against a row that a device takes away.
_OF_THE_DEVICE = ("unknown_device", "invalid_device")


def as_device(table: MeasurementTable, device: DeviceSpec) -> MeasurementTable:
    """Assign all measurements to ``device`` and apply the physics rules again.

    ``device_name`` stays what the file calls it.
    """
    rows = len(table)
    unsupported = table.unsupported.map(lambda reason: "" if reason in _OF_THE_DEVICE else reason)
    given = replace(
        table, device=Labels.constant(device.name, rows), device_specs={device.name: device}, unsupported=unsupported
    )
    derived = flag_rows(given)
    # Reasons given by the measuring tool (unstable) are kept: no physics rule produces them.
    own = table.excluded.map(lambda reason: "" if reason in EXCLUDED else reason)
    both = Labels.concat([derived, own])
    first, second = both.codes[:rows], both.codes[rows:]
    plain = np.array([name == "" for name in both.names], dtype=np.bool_)
    return replace(given, excluded=Labels(np.where(plain[first], second, first).astype(np.int32), both.names))
