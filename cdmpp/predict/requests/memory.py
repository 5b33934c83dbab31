"""Memory check of all planners: what a device holds, and the error of a plan that does not fit.

A limit that a request states is used as it is. Without one, the limit is the published capacity of the device that the
request names; a device without a published capacity, or no device, means no limit. ``ignore_memory`` of a request
removes all limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.paths import RANKS_PER_NODE, devices_together, link_of_device
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import InfeasibleError, InvalidDeviceError, UnknownDeviceError
from cdmpp.utils.units import format_si

UNLIMITED_BYTES = math.inf
IGNORE_HINT = 'or insist: "ignore_memory": true in the request, --ignore-memory on the command line'

DeviceValue = str | Mapping[str, Any] | None


def device_bytes(device: DeviceValue) -> float:
    """Published capacity of a device in bytes; infinite where none is known.

    A service may know devices that this process does not: such a name has no limit here.
    """
    spec = _specification(device)
    return UNLIMITED_BYTES if spec is None or spec.memory_bytes is None else spec.memory_bytes


def devices_on_node(device: DeviceValue) -> float:
    """Devices that reach each other without the network between nodes; those of a common node for an unknown device."""
    spec = _specification(device)
    return RANKS_PER_NODE if spec is None else devices_together(spec, link_of_device(spec))


def _specification(device: DeviceValue) -> DeviceSpec | None:
    if device is None:
        return None
    try:
        return resolve_device(device, lookup)
    except (UnknownDeviceError, InvalidDeviceError):  # the predictor refuses it, with the path of its field
        return None


def memory_limit(given: float | None, devices: Iterable[DeviceValue], ignore: bool) -> float:
    """Memory limit in bytes: that which the request states, or of the smallest of the devices that it is for.

    ``ignore``: ``ignore_memory`` of the request.
    """
    if ignore:
        return UNLIMITED_BYTES
    return given if given is not None else min(map(device_bytes, devices), default=UNLIMITED_BYTES)


def check_fits(what: str, needed: float, limit: float, *, path: str, fits: str) -> None:
    """Raise InfeasibleError where a plan needs more bytes than a device has.

    ``what``: subject of the message, such as "rank 2". ``path``: field of the request that states the limit, or that
    the need follows from. ``fits``: what would fit.
    """
    if needed > limit:
        raise does_not_fit(what, needed, limit, path=path, fits=fits)


def does_not_fit(what: str, needed: float, limit: float, *, path: str, fits: str) -> InfeasibleError:
    """The error of :func:`check_fits`."""
    return InfeasibleError.at(
        path,
        f"{what} needs {format_si(needed, 'B')} ({needed:.12g} bytes) of the {format_si(limit, 'B')} "
        f"({limit:.12g} bytes) of its device",
        hint=f"{fits}; {IGNORE_HINT}",
    )
