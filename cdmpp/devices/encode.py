"""A device as a row of numbers for the model.

Every figure is put on a log scale between two fixed physical bounds, never between the smallest and
largest of a training set: a device that nobody trained on keeps its distance to the others, and the
same specification gives the same row for ever. 0 is the lower bound, 1 the upper; values outside are
clipped a quarter beyond. A missing figure is 0 with its flag set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdmpp.devices.spec import DeviceSpec

#: Goes into the feature schema of every artifact; raise it when a name, bound or order below changes.
DEVICE_ENCODING_VERSION = 1

CLIP_LOW, CLIP_HIGH = -0.25, 1.25


class _Figure(NamedTuple):
    name: str
    low: float
    high: float
    read: Callable[[DeviceSpec], float | None]


#: The bounds span a phone of 2014 to a rack-scale accelerator of the 2030s.
_ALWAYS = (
    _Figure("compute_units", 1, 1024, lambda s: s.compute_units),
    _Figure("cores_per_unit", 1, 256, lambda s: s.cores_per_unit),
    _Figure("clock_hz", 2e8, 6e9, lambda s: s.clock_hz),
    _Figure("mem_bandwidth_bytes_per_s", 1e9, 2e13, lambda s: s.mem_bandwidth_bytes_per_s),
    _Figure("peak_flops_fp32", 1e10, 1e15, lambda s: s.peak_flops_fp32),
    # Machine balance, the knee of the roofline: of vector programs and of half-precision products.
    _Figure("fp32_flops_per_byte", 1, 1e3, lambda s: s.peak_flops_fp32 / s.mem_bandwidth_bytes_per_s),
    _Figure("fp16_flops_per_byte", 1, 1e4, lambda s: s.peak("float16", True) / s.mem_bandwidth_bytes_per_s),
)
_OPTIONAL = (
    _Figure("memory_bytes", 5e8, 5e11, lambda s: s.sheet_memory_bytes),
    _Figure("peak_flops_fp32_matrix", 1e10, 1e15, lambda s: s.peak_flops_fp32_matrix),
    _Figure("peak_flops_fp16_matrix", 1e10, 1e16, lambda s: s.peak_flops_fp16_matrix),
    _Figure("peak_flops_bf16_matrix", 1e10, 1e16, lambda s: s.peak_flops_bf16_matrix),
    _Figure("peak_ops_int8", 1e10, 1e17, lambda s: s.peak_ops_int8),
    _Figure("l2_bytes", 2.5e5, 5e8, lambda s: s.l2_bytes),
    _Figure("l2_bytes_per_unit", 1e4, 1e7, lambda s: None if s.l2_bytes is None else s.l2_bytes / s.compute_units),
    _Figure("tdp_w", 1, 3e3, lambda s: s.tdp_w),
    # Power-limited boards never sustain their nominal peak.
    _Figure("fp32_flops_per_watt", 1e9, 1e12, lambda s: None if s.tdp_w is None else s.peak_flops_fp32 / s.tdp_w),
)
#: The libraries behind ``backend = "library"`` go with the vendor (cuBLAS, MIOpen, oneDNN).
_VENDORS = ("nvidia", "amd", "intel")

#: Name of each column of :func:`encode_device`, in order.
DEVICE_FEATURES: tuple[str, ...] = (
    *(f"log_{figure.name}" for figure in _ALWAYS),
    *(f"log_{figure.name}" for figure in _OPTIONAL),
    *(f"missing_{figure.name}" for figure in _OPTIONAL),
    "is_gpu",
    *(f"vendor_{vendor}" for vendor in _VENDORS),
)


def _scaled(value: float, figure: _Figure) -> float:
    position = math.log(value / figure.low) / math.log(figure.high / figure.low)
    return min(max(position, CLIP_LOW), CLIP_HIGH)


def encode_device(spec: DeviceSpec) -> NDArray[np.float32]:
    """Encode a device as numbers by fixed physical ranges.

    Returns the columns :data:`DEVICE_FEATURES` as float32, finite and in [-0.25, 1.25].
    """
    optional = [(figure, figure.read(spec)) for figure in _OPTIONAL]
    vendor = spec.vendor.casefold()
    row = [
        *(_scaled(float(figure.read(spec) or 0.0), figure) for figure in _ALWAYS),
        *(0.0 if value is None else _scaled(value, figure) for figure, value in optional),
        *(float(value is None) for _, value in optional),
        float(spec.kind == "gpu"),
        *(float(vendor == name) for name in _VENDORS),
    ]
    return np.asarray(row, dtype=np.float32)


def encode_devices(specs: Iterable[DeviceSpec]) -> NDArray[np.float32]:
    """Encode several devices, one a row: shape (n, len(DEVICE_FEATURES))."""
    rows = [encode_device(spec) for spec in specs]
    return np.stack(rows) if rows else np.zeros((0, len(DEVICE_FEATURES)), dtype=np.float32)


def encoding_schema() -> dict[str, Any]:
    """Definition of the encoding, for the schema hash of an artifact."""
    return {
        "version": DEVICE_ENCODING_VERSION,
        "clip": [CLIP_LOW, CLIP_HIGH],
        "figures": [[f.name, f.low, f.high] for f in (*_ALWAYS, *_OPTIONAL)],
        "columns": list(DEVICE_FEATURES),
    }
