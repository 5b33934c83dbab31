"""Devices that a user describes: a specification as a mapping, a JSON file or a TOML file, and its text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from cdmpp.devices.host import is_native, native_device
from cdmpp.devices.registry import known as known_devices
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import OPTIONAL, REQUIRED, SPECIFICATION_HINT, DeviceSpec
from cdmpp.errors import InvalidDeviceError, violation_text
from cdmpp.utils.files import parse_file, parse_json, parse_toml

#: A complete file, for documentation and error messages; a test parses it.
SPECIFICATION_EXAMPLE = """\
# my-gpu.toml: figures of the data sheet in base units (Hz, bytes, flop/s, W)
name = "my-gpu"
vendor = "NVIDIA"
arch = "Ada sm_89"
kind = "gpu"                            # or "cpu"
compute_units = 60                      # SMs, CUs, Xe cores or CPU cores
cores_per_unit = 128                    # fp32 lanes of one unit
clock_hz = 2.61e9                       # boost clock
mem_bandwidth_bytes_per_s = 504e9
peak_flops_fp32 = 40.1e12               # vector units; a multiply-add is two
peak_flops_fp16_matrix = 80.2e12        # dense, accumulated in fp32; needed where there are matrix units
# the rest may be left out
memory_bytes = 12.6e9                   # as the driver reports it
peak_flops_fp8_matrix = 160.4e12
l2_bytes = 50331648
tdp_w = 285
link = "pcie4-x16"                      # to other devices, for collectives
"""

K = TypeVar("K")
_SUFFIXES = (".json", ".toml")
#: A specification is under a kilobyte; anything much larger is another file.
_MAX_FILE_BYTES = 64 * 1024
_MAX_PROBLEMS = 12


def from_mapping(values: Mapping[str, Any]) -> DeviceSpec:
    """Make a device from a mapping with the fields of :class:`DeviceSpec`.

    Raises InvalidDeviceError: a field is missing, unknown or impossible; the message names each.
    """
    try:
        return DeviceSpec.model_validate(dict(values))
    except ValidationError as error:
        # Misspelled fields first: they explain most of the missing ones.
        errors = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
        problems = "; ".join(_describe(problem) for problem in errors[:_MAX_PROBLEMS])
        raise InvalidDeviceError(
            f"device specification: {problems}", hint=f"required: {REQUIRED}; optional: {OPTIONAL}"
        ) from None


#: Architectures of GPUs that have matrix units for 16-bit products.
_MATRIX_UNITS = re.compile(
    r"(sm|cc|compute|capability)[ _-]?([7-9]|1\d)\.?\d|^ *([7-9]|1\d)\.\da? *$|volta|turing|ampere|\bada|hopper|"
    r"blackwell|cdna|gfx9(08|0a|[4-9])|gfx1[12]|rdna[ _-]?[3-9]|tpu|\bxe|ascend",
    re.I,
)


def described_device(values: Mapping[str, Any]) -> DeviceSpec:
    """:func:`from_mapping` for a user's device: matrix units need their rate, for 16-bit products would run at fp32's.

    Raises InvalidDeviceError: as :func:`from_mapping`, or that rate is missing.
    """
    spec = from_mapping(values)
    if spec.peak_flops_fp16_matrix is not None or spec.kind != "gpu" or not _MATRIX_UNITS.search(spec.arch):
        return spec
    chip, cycles = spec.arch.casefold().split()[-1], spec.compute_units * spec.clock_hz
    same = [other.matrix_flops_per_cycle_per_unit for other in known_devices() if other.arch.casefold().endswith(chip)]
    rates = [cycles * rate for rate in same if rate]
    usual = f"; by its units and clock {min(rates):.2g} to {max(rates):.2g}" if rates else ""
    raise InvalidDeviceError(
        f"device specification: peak_flops_fp16_matrix: {spec.arch} has matrix units, whose rate is not stated",
        hint=f"give the dense fp16 rate of the data sheet, accumulated in fp32, in flop/s{usual}",
    )


def _describe(problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"])[:80]
    text = violation_text(problem["type"], problem["msg"])[:300]
    return f"{field}: {text}" if field else text


def resolve_device(device: DeviceSpec | Mapping[str, Any] | str, known: Callable[[str], K]) -> DeviceSpec | K:
    """The specification of a device that is given as a name, as a specification or as its fields.

    ``known``: what a name stands for: :func:`~cdmpp.devices.registry.lookup`, a model's ``artifact.device``, or ``str``
    where somebody else finds devices by their names.
    Raises UnknownDeviceError: as ``known``; InvalidDeviceError: the fields are no specification, or ``device`` is none
    of these.
    """
    if isinstance(device, DeviceSpec):
        return device
    if isinstance(device, str):
        return known(device)
    if isinstance(device, Mapping):
        return described_device(device)
    raise InvalidDeviceError(f"{device!r} is not a device", hint="pass a name, a DeviceSpec or its fields")


def is_local(text: str) -> bool:
    """Whether :func:`load_device` reads a file for this text, or looks at this machine's CPU."""
    return is_native(text) or text.lower().endswith(_SUFFIXES)


def local_device(text: str) -> DeviceSpec | str:
    """The device of a file or of this machine; other names stay names, which a model or a service finds."""
    return load_device(text) if is_local(text) else text


def load_device(text: str, known: Callable[[str], DeviceSpec] = lookup) -> DeviceSpec:
    """A device by its name or from a specification file, or this machine's CPU.

    For commands on the user's own machine; a service looks names up and never opens paths.

    ``text``: a known name, the path of a ``.json`` or ``.toml`` file, or ``native`` (``native@THREADS``). A CPU that is
    not known is inspected, and its memory bandwidth measured, which takes seconds. ``known``: finds a device by its
    name.
    Raises UnknownDeviceError: neither a known name nor a path ending in ``.json`` or ``.toml``; InvalidDeviceError: the
    file cannot be read or is not a specification.
    """
    if is_native(text):
        return native_device(text, known)
    if not is_local(text):
        return known(text)
    parse, form = (parse_json, "valid JSON") if text.lower().endswith(".json") else (parse_toml, "valid TOML")
    options: dict[str, Any] = {"max_bytes": _MAX_FILE_BYTES, "error": InvalidDeviceError}
    values = parse_file(text, parse, form, SPECIFICATION_HINT, **options)
    if not isinstance(values, dict):
        raise InvalidDeviceError(f"{text} holds no table of fields", hint=SPECIFICATION_HINT)
    return described_device(values)


def specification_toml(spec: DeviceSpec, comment: str = "") -> str:
    """TOML with the figures that there are, in the order of :class:`DeviceSpec`, then a table of ceilings.

    ``comment``: one line at the top.
    """
    values = spec.model_dump(mode="json", exclude_none=True)
    ceilings = values.pop("sustained", None)
    lines = [f"# {comment}"] if comment else []
    lines += [f"{name} = {toml_value(value)}" for name, value in values.items() if value not in ([], "")]
    if ceilings:
        lines += ["", "[sustained]", *(f"{name} = {toml_value(value)}" for name, value in ceilings.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A text, number, boolean or list as TOML; control characters are escaped."""
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for surrogates and DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
