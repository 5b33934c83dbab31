"""Device specifications: device table, lookup by name, specification files, and the encoding for the model.

Facts of hardware belong here; what was measured on it belongs in :mod:`cdmpp.data`.
"""

from __future__ import annotations

from cdmpp.devices.encode import (
    DEVICE_ENCODING_VERSION,
    DEVICE_FEATURES,
    encode_device,
    encode_devices,
    encoding_schema,
)
from cdmpp.devices.loading import (
    SPECIFICATION_EXAMPLE,
    described_device,
    from_mapping,
    is_local,
    load_device,
    local_device,
    resolve_device,
)
from cdmpp.devices.registry import family, find_known, known, lookup, lookup_board, nearest_names, sources
from cdmpp.devices.spec import SPECIFICATION_HINT, DeviceSpec

__all__ = [
    "DEVICE_ENCODING_VERSION",
    "DEVICE_FEATURES",
    "SPECIFICATION_EXAMPLE",
    "SPECIFICATION_HINT",
    "DeviceSpec",
    "described_device",
    "encode_device",
    "encode_devices",
    "encoding_schema",
    "family",
    "find_known",
    "from_mapping",
    "is_local",
    "known",
    "load_device",
    "local_device",
    "lookup",
    "lookup_board",
    "nearest_names",
    "resolve_device",
    "sources",
]
