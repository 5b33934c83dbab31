"""Sustained ceilings of a device from measured rows: the best rates among its largest programs.

The same rule serves the micro-benchmarks of ``cdmpp probe`` and the rows that a device has in a training set
(its training rows only: a ceiling is a figure that is learned). Only library kernels count, and only rows
that the rules of physics keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.labels import Mask
from cdmpp.data.physics import uses_matrix_units, work
from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import FAMILIES, Ceilings, DeviceSpec, flops_field
from cdmpp.programs.collectives import is_collective
from cdmpp.programs.elements import BASIC_DTYPES
from cdmpp.programs.operators import operator_family
from cdmpp.programs.query_options import FLOOR_S, PROTOCOLS

Floats = NDArray[np.float64]

#: Arithmetic and traffic are large when they take so many launch floors; a program is small when all it does
#: is this share of one. (Traffic has a lower limit: few boards hold the bytes of 20 eager launches.)
LARGE, LARGE_TRAFFIC, SMALL = 20.0, 8.0, 0.1
#: Arithmetic decides where it takes this many times as long as the traffic, and traffic where it is this many
#: times the arithmetic.
_COMPUTE_BOUND, _MEMORY_BOUND = 4.0, 2.0
#: Traffic of programs that no cache serves: so many last caches, or these bytes where it is not known.
_CACHES, _BYTES = 2.0, 64e6
#: Where the bandwidth of a family's programs is collected, and how many products may stand in for vector
#: programs.
_TRAFFIC = {"vector": "bytes_per_s", "gemm": "products"}
_ENOUGH_PRODUCTS = 200
#: Read again and again, or mostly not at all, whatever their sizes say.
_NO_STREAM = ("embedding", "max_pool2d", "avg_pool2d", "batch_norm")
#: Measured rates outside these shares of the nominal rate are rejected. HIGH_CONV: Winograd saves arithmetic.
HIGH, LOW, HIGH_CONV = 1.2, 0.05, 2.5
_BELIEVABLE_FLOOR_S = (1e-8, 1e-2)


@dataclass(frozen=True)
class CeilingWarning:
    """A measured ceiling that is not used, and why."""

    code: str  # "ceiling_above_nominal", "ceiling_far_below_nominal" or "floor_not_believable"
    message: str


def derive_ceilings(table: MeasurementTable, device: str, rows: Mask | None = None) -> Ceilings:
    """Sustained ceilings of one device from its rows; None where no row could tell the figure.

    Rates: the median of the fastest fifth of the large programs; the specification of ``device``, a canonical name,
    decides which are large. Floors: the lower tenth of the smallest programs' latencies. ``rows`` may be used: pass the
    training rows where others are for testing. The figures are not yet checked against the nominal ones
    (:func:`check_ceilings`).
    """
    spec = table.device_spec(device).nominal()
    usable = table.trainable & table.device.is_(device) & table.backend.is_("library")
    usable &= True if rows is None else rows
    floors = np.array([FLOOR_S.get(name, math.nan) for name in table.protocol.names])
    rates: dict[str, list[Floats]] = {}
    least: dict[str, list[Floats]] = {}
    for block in table.specs:
        index = np.flatnonzero(usable[block.row_index])
        if not len(index) or is_collective(block.operator):
            continue
        part = block.take(index)
        latency = table.latency_s[part.row_index]
        protocol = table.protocol.codes[part.row_index]
        flops, moved = work(part.operator, part.dtype, part.flags, part.sizes)
        compute = flops / spec.peak(part.dtype, matrix=uses_matrix_units(part.operator))
        memory = moved / spec.mem_bandwidth_bytes_per_s
        family = operator_family(part.operator)
        if family in FAMILIES:
            chosen = (compute > LARGE * floors[protocol]) & (compute > _COMPUTE_BOUND * memory)
            chosen &= _is_plain(part)
            rates.setdefault(flops_field(family, part.dtype), []).append((flops / latency)[chosen])
        if family in ("gemm", "vector") and part.operator not in _NO_STREAM:
            beyond = moved > (_CACHES * spec.l2_bytes if spec.l2_bytes else _BYTES)
            chosen = (memory > LARGE_TRAFFIC * floors[protocol]) & (memory > _MEMORY_BOUND * compute) & beyond
            rates.setdefault(_TRAFFIC[family], []).append((moved / latency)[chosen])
        small = compute + memory < SMALL * floors[protocol]
        for code in np.unique(protocol[small]):
            field = f"floor_{table.protocol.names[code]}_s"
            least.setdefault(field, []).append(latency[small & (protocol == code)])
    # Skinny products stream their weights; a few of them measure their kernels rather than the memory bus.
    products = np.concatenate(rates.pop(_TRAFFIC["gemm"], [np.zeros(0)]))
    if "bytes_per_s" not in rates and len(products) >= _ENOUGH_PRODUCTS:
        rates["bytes_per_s"] = [products]
    rates_of_family = {name: _best(np.concatenate(parts)) for name, parts in rates.items()}
    rates_of_family |= {name: float(np.quantile(np.concatenate(parts), 0.1)) for name, parts in least.items()}
    kept = {k: float(f"{v:.4g}") for k, v in rates_of_family.items() if v is not None and k in Ceilings.model_fields}
    return Ceilings.model_validate(kept)


def _is_plain(part: Any) -> Mask:
    """Convolutions of one group in the forward direction; anything of another family."""
    if part.operator != "conv2d":
        return np.ones(len(part), dtype=np.bool_)
    return np.asarray((part.sizes["groups"] == 1) & (part.flags.get("direction", "fwd") == "fwd"))


def _best(rates: Floats) -> float | None:
    """Median of the best fifth: what large programs reach, not what one of ten thousand reached once."""
    if not len(rates):
        return None
    count = math.ceil(len(rates) / 5)
    return float(np.median(np.sort(rates)[-count:]))


def check_ceilings(ceilings: Ceilings, device: DeviceSpec) -> tuple[Ceilings, list[CeilingWarning]]:
    """Leave out figures that contradict the nominal ones, with a warning for each.

    A rate above 1.2 times the nominal (convolutions: 2.5 times), or below a twentieth of it, means that the program,
    the clock or the data sheet was wrong. Where the sheet states no rate for a type there is nothing to check.
    """
    kept, warnings = {}, []
    for name, value in ceilings.figures().items():
        warning = _floor_warning(name, value) if name.startswith("floor_") else _rate_warning(name, value, device)
        if warning is None:
            kept[name] = value
        else:
            warnings.append(warning)
    return Ceilings(**kept, source=ceilings.source), warnings


def _floor_warning(name: str, value: float) -> CeilingWarning | None:
    low, high = _BELIEVABLE_FLOOR_S
    if low <= value <= high:
        return None
    return CeilingWarning(
        "floor_not_believable", f"{name} = {value:.3g} s is outside {low:.0e} to {high:.0e} s: not used"
    )


def _rate_warning(name: str, value: float, device: DeviceSpec) -> CeilingWarning | None:
    nominal = _nominal(name, device)
    if nominal is None:
        return None
    share = value / nominal
    if share > (HIGH_CONV if name.startswith("conv") else HIGH):
        code, words = "ceiling_above_nominal", "above"
    elif share < LOW:
        code, words = "ceiling_far_below_nominal", "far below"
    else:
        return None
    return CeilingWarning(
        code, f"{name} = {value:.3g} was measured, {words} the nominal {nominal:.3g} ({share:.2f} times): not used"
    )


def _nominal(name: str, device: DeviceSpec) -> float | None:
    """The rate that the specification itself states; its fallbacks for other types are no claim."""
    if name == "bytes_per_s":
        return device.mem_bandwidth_bytes_per_s
    stated = {
        "float32": device.peak_flops_fp32,
        "float16": device.peak_flops_fp16_matrix,
        "bfloat16": device.peak_flops_bf16_matrix or device.peak_flops_fp16_matrix,
        "int8": device.peak_ops_int8,
    }
    family = name.partition("_")[0]
    dtype = next(d for d in BASIC_DTYPES if flops_field(family, d) == name)
    return None if stated[dtype] is None else device.peak(dtype, matrix=True)


assert all(f"floor_{protocol}_s" in Ceilings.model_fields for protocol in PROTOCOLS)
