"""Devices that travel with their records: column ``device_spec``, and which figures are used for a name.

A record may carry its device's specification, so that rows of a device outside the device table can be trained on
and predicted. Three rules keep one name one device:

- A name in the table of :mod:`cdmpp.devices` always has the figures of that table: predictions by
  name use them, and a corrected table reaches old records.
- Specifications of one name agree when kind and every figure that both state are within
  :data:`SAME_DEVICE_FACTOR`: bandwidth that is measured anew with every collection varies by some per cent,
  a device with other cores or another vector width by a factor of two. Those that agree are one device, and
  the first one stands for it.
- Those that do not agree, in one file, in two that are put together, or with the table, are two devices under
  one name: an error, for whichever were chosen, rows of the other would be trained on with wrong figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

import numpy as np

from cdmpp.data.labels import Labels, Mask
from cdmpp.devices.loading import from_mapping
from cdmpp.devices.registry import find_known
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidDeviceError

#: Two specifications of one name are one device if their figures differ by less.
SAME_DEVICE_FACTOR = 1.25
_WORDS = ("name", "vendor", "arch", "source", "aliases", "kind", "sustained", "link", "status")


def spec_text(spec: DeviceSpec) -> str:
    """Canonical JSON of a specification: sorted keys, no spaces, without missing figures."""
    values = spec.model_dump(mode="json", exclude_none=True)
    if not spec.status:
        del values["status"]
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def parse_spec(text: str) -> DeviceSpec:
    """Read what :func:`spec_text` wrote; an InvalidDeviceError if it is no JSON object, or no specification."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidDeviceError(
            f"not a device specification: {text[:60]!r}", hint="device_spec holds the JSON of a DeviceSpec"
        )
    return from_mapping(values)


def disagreement(spec: DeviceSpec, other: DeviceSpec) -> str:
    """Description of how two specifications contradict each other; "" if they may be one device."""
    if spec.kind != other.kind:
        return f"kind is {spec.kind} and {other.kind}"
    for field in type(spec).model_fields:
        value, other_value = getattr(spec, field), getattr(other, field)
        if field in _WORDS or value is None or other_value is None:
            continue
        if abs(math.log(value / other_value)) > math.log(SAME_DEVICE_FACTOR):
            return f"{field} is {value:.4g} and {other_value:.4g}"
    return ""


def merge_specs(parts: Iterable[Mapping[str, DeviceSpec]]) -> dict[str, DeviceSpec]:
    """One mapping of many; the first specification of a name stands for all that agree with it. Two that contradict
    each other, or one that contradicts the table of :mod:`cdmpp.devices`, are a DataError."""
    merged: dict[str, DeviceSpec] = {}
    for part in parts:
        for name, spec in part.items():
            known, first = find_known(name), merged.setdefault(name, spec)
            wrong = disagreement(known or first, spec)
            if wrong:
                others = "cdmpp's table of devices and the records" if known else "the records"
                raise DataError(
                    f"{others} call two devices {name!r}: {wrong}",
                    hint="give one of them another name (columns device and device_spec)",
                )
    return merged


def read_specs(device: Labels, texts: Labels) -> tuple[dict[str, DeviceSpec], Mask]:
    """Specifications that rows carry, by canonical device name, and rows whose text is none, or one of another device.

    ``texts``: ``device_spec`` of each row, "" where it brings none. Names in the device table are among the
    specifications, too; each applies to all rows of its name. Errors are those of :func:`merge_specs`.
    """
    pairs = sorted({*zip(device.codes.tolist(), texts.codes.tolist(), strict=True)})
    parts: list[Mapping[str, DeviceSpec]] = []
    wrong = np.zeros(len(device), dtype=np.bool_)
    for device_code, text_code in pairs:
        name, text = device.names[device_code], texts.names[text_code]
        if not text:
            continue
        rows = (device.codes == device_code) & (texts.codes == text_code)
        try:
            spec = parse_spec(text)
        except InvalidDeviceError:
            wrong |= rows
            continue
        known = find_known(name)
        if spec.name == name or (known is not None and find_known(spec.name) is known):
            parts.append({name: spec})
        else:
            wrong |= rows
    return merge_specs(parts), wrong
