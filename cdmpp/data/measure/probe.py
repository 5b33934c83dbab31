"""Micro-benchmarks of one device: records for adaptation, and measured peak rates.

The set has some twenty programs: large matrix products, convolutions and attention of each type with matrix
units, element-wise programs from cache-sized to much larger than the caches, and programs dominated by their
launch. Sizes follow the nominal figures, so that each takes some milliseconds on a phone and on a rack-scale
accelerator. Memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cdmpp.data.ceilings import CeilingWarning, check_ceilings, derive_ceilings
from cdmpp.data.physics import UNSTABLE, needed_bytes
from cdmpp.data.records import Measurement, from_measurements
from cdmpp.devices.spec import Ceilings, DeviceSpec
from cdmpp.programs.elements import DTYPE_BYTES
from cdmpp.programs.operators import OperatorSpec, make_operator, parse_operator

#: Memory limit of one program: bytes, or a share of the device's memory; and a share of the free memory.
_MOST_BYTES, _BOARD_SHARE, _FREE_SHARE = 2**30, 1 / 64, 0.25
#: Target duration of a large program by the nominal figures, in seconds.
_LARGE_S = {"gpu": 3e-3, "cpu": 30e-3}
_EXTENTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
#: Bytes moved by element-wise programs of cache size and in between.
_SMALL_BYTES, _MIDDLE_BYTES = 2**20, 2**26
_BEYOND_CACHES = 2.5
#: Duration of memory traffic beside which an eager launch is small, in seconds.
_TRAFFIC_S = 250e-6
_IMAGE = parse_operator("conv2d:n=1,c_in=128,h=56,w=56,c_out=128,kh=3,kw=3,pad_h=1,pad_w=1").canonical()
_IMAGE_FLOPS = 2.0 * 56 * 56 * 128 * 128 * 3 * 3
_ATTENTION = {
    "gpu": parse_operator("attention_prefill:batch=4,q_len=4096,heads=32,kv_heads=32,head_dim=128").canonical(),
    "cpu": parse_operator("attention_prefill:batch=1,q_len=1024,heads=8,kv_heads=8,head_dim=64").canonical(),
}


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe."""

    records: tuple[Measurement, ...]  # one per program, including failed ones
    device: DeviceSpec  # with the accepted peak rates
    warnings: tuple[CeilingWarning, ...]  # rejected peak rates


def probe_programs(device: DeviceSpec, dtypes: tuple[str, ...], memory_bytes: float) -> list[OperatorSpec]:
    """Return the programs of a probe; the nominal figures of the device determine their sizes.

    ``dtypes``: element types of matrix programs, "float32" among them; ``memory_bytes``: memory limit of a program
    (:func:`cdmpp.data.physics.needed_bytes`).
    """
    large_s = _LARGE_S[device.kind]
    specs: list[OperatorSpec] = []

    def add(operator: str, **fields: Any) -> None:
        spec = make_operator({"operator": operator, **fields})
        if needed_bytes(spec, gpu=device.kind == "gpu") <= memory_bytes:
            specs.append(spec)

    for dtype in dtypes:
        side = _side(device, dtype, large_s, memory_bytes)
        add("linear", m=side, n=side, k=side, dtype=dtype)
        if dtype == "int8":
            continue
        add("linear", m=2 * side, n=side // 2, k=side, dtype=dtype)
        add("linear", m=1, n=4096, k=4096, dtype=dtype)
        images = max(1, round(large_s * device.peak(dtype, matrix=True) / _IMAGE_FLOPS))
        fitting = int(memory_bytes / needed_bytes(make_operator({**_IMAGE, "dtype": dtype})))
        add(**_IMAGE | {"n": max(1, min(images, fitting)), "dtype": dtype})
    attention = _ATTENTION[device.kind] | {"dtype": dtypes[1] if len(dtypes) > 1 else "float32"}
    add(**attention)
    beyond = _BEYOND_CACHES * device.l2_bytes if device.l2_bytes else 4.0 * _MIDDLE_BYTES
    largest = max(beyond, _TRAFFIC_S * device.mem_bandwidth_bytes_per_s, _MIDDLE_BYTES)
    for moved in dict.fromkeys((_SMALL_BYTES, _MIDDLE_BYTES, largest)):
        for operator, tensors in (("copy", 2), ("add", 3), ("gelu", 2)):
            # Fewer rows if the memory is too small for the size that exceeds the caches.
            add(operator, rows=max(1, int(min(moved, memory_bytes) / (4 * tensors * 4096))), cols=4096)
    for operator in ("softmax", "layernorm"):
        add(operator, rows=_MIDDLE_BYTES // (2 * 4 * 1024), cols=1024)
    for operator in ("relu", "add", "mul_scalar"):
        add(operator, rows=1, cols=1)
    return list({spec.hash(): spec for spec in specs}.values())


def memory_limit(device: DeviceSpec, free_bytes: float) -> float:
    """Return the memory limit of a program of a probe, in bytes."""
    return min(max(_MOST_BYTES, _BOARD_SHARE * (device.memory_bytes or 0.0)), _FREE_SHARE * free_bytes)


def _side(device: DeviceSpec, dtype: str, large_s: float, memory_bytes: float) -> int:
    """Return the extent of a cubic product that takes long enough and fits into memory."""
    peak = device.peak(dtype, matrix=True)
    fitting = [side for side in _EXTENTS if 3 * side**2 * DTYPE_BYTES[dtype] <= memory_bytes]
    return next((side for side in fitting if 2.0 * side**3 >= large_s * peak), max(fitting, default=_EXTENTS[0]))


def probe(
    device: DeviceSpec,
    programs: list[OperatorSpec],
    measure: Callable[[OperatorSpec], Measurement],
    step: Callable[[], None] = lambda: None,
) -> ProbeResult:
    """Measure the programs and derive the peak rates.

    ``measure`` is for example :meth:`cdmpp.data.measure.library.LibraryTimer.record`; noisy programs are measured once
    more. ``step`` is called after each program.
    """
    rows = []
    for spec in programs:
        rows.append(measure(spec))
        step()
    for i, spec in enumerate(programs):
        if rows[i].excluded_reason == UNSTABLE:
            again = measure(spec)
            rows[i] = rows[i] if again.excluded_reason == UNSTABLE else again
    table = from_measurements(rows)
    # Noisy records are excluded from training, but their median suffices for a peak rate.
    believed = from_measurements([replace(r, excluded_reason="") for r in rows])
    known = table.device.used()
    ceilings = derive_ceilings(believed, known[0]) if known else Ceilings()
    kept, warnings = check_ceilings(ceilings, device)
    dates = {(r.provenance or {}).get("date", "") for r in rows}
    if kept.figures():
        source = f"{len(rows)} micro-benchmarks, protocol {rows[0].protocol}, {max(dates)}"
        kept = kept.model_copy(update={"source": source})
        device = device.model_copy(update={"sustained": kept})
    return ProbeResult(tuple(rows), device, tuple(warnings))
