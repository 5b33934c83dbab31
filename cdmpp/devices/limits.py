"""Expected sustained share of a device's nominal rates, and what one compute unit of a GPU holds.

The share is relative to a typical device and has two sources. Where ceilings were measured
(``DeviceSpec.sustained``): they over the nominal rate, over the share that is typical of known devices. 1 stands for a
device that keeps as much of its nominal rate as most do, which is also what an unmeasured one is taken for. Where none
were: the board's power limit. Inference cards never reach their fp32 rate in a long product: 70 W do not feed 8 Tflop/s
of a 12 nm chip. The energy of an fp32 operation is taken as proportional to the process's name, with the one constant
that both the P4 (16 nm, 75 W) and the T4 (12 nm, 70 W) ask for; by the same rule no large board is limited, as
measured (docs/accuracy.md).

Threads, blocks, shared memory and registers of a unit, by architecture: NVIDIA: CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability". AMD: the CDNA2, CDNA3, RDNA2 and RDNA3 instruction-set and architecture
documents (waves and registers of a SIMD, LDS of a compute unit).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cdmpp.devices.spec import DeviceSpec, flops_field

#: Joules per fp32 operation and nanometre of the process.
ENERGY_PER_NM_J = 1.25e-12

#: Name of the process in nm, by the beginning of DeviceSpec.arch; the longest match counts.
_PROCESS_NM = {
    **{"Kepler": 28, "Maxwell": 28, "Pascal": 16, "Volta": 12, "Turing": 12},
    **{"Ampere sm_80": 7, "Ampere sm_86": 8, "Ada": 4, "Hopper": 4, "Blackwell": 4},
    **{"GCN5": 14, "GCN5.1": 7, "CDNA1": 7, "CDNA2": 6, "CDNA3": 5, "RDNA2": 7, "RDNA3": 5},
}

#: Measured over nominal, the middle of the GPUs of the public tables (their training rows). They only say
#: which measured share counts as 1, so a few per cent more or less are learned by the network.
TYPICAL = {
    "gemm_flops_fp32": 0.85,
    "gemm_flops_fp16": 0.75,
    "gemm_flops_bf16": 0.79,
    "conv_flops_fp32": 1.25,
    "conv_flops_fp16": 0.60,
    "conv_flops_bf16": 0.55,
    "attention_flops_bf16": 0.57,
    "attention_flops_fp16": 0.57,
    "bytes_per_s": 0.84,
}
#: A ceiling from a few odd rows shall not move a device further than this.
_SHARE_LIMITS = (0.55, 1.4)


def power_share(device: DeviceSpec) -> float:
    """Share of the nominal fp32 vector rate that the power limit sustains: 1 where it is no limit.

    1 as well where the power or the process of a device is not known.
    """
    if device.kind != "gpu" or device.tdp_w is None:
        return 1.0
    names = [name for name in _PROCESS_NM if device.arch.startswith(name)]
    if not names:
        return 1.0
    process_nm = _PROCESS_NM[max(names, key=len)]
    return min(1.0, device.tdp_w / (ENERGY_PER_NM_J * process_nm * device.peak_flops_fp32))


def matrix_share(device: DeviceSpec, family: str, dtype: str) -> float:
    """Share of the nominal matrix rate, relative to what is typical.

    ``dtype``: of the operands.
    """
    measured = None if device.sustained is None else device.sustained.flops(family, dtype)
    typical = TYPICAL.get(flops_field(family, dtype))
    if device.kind == "gpu" and measured is not None and typical is not None:
        return _clipped(measured / device.peak(dtype, matrix=True) / typical)
    if device.peak(dtype, matrix=True) != device.peak_flops_fp32:
        return 1.0
    # A convolution does fewer operations than its direct form counts (winograd) and waits for memory in
    # between: it feels the limit by its square root (measured: P4 0.82, T4 0.78; products 0.66, 0.57).
    share = power_share(device)
    return math.sqrt(share) if family == "conv" else share


def bandwidth_share(device: DeviceSpec) -> float:
    """Share of the nominal bandwidth, relative to what is typical."""
    measured = None if device.sustained is None else device.sustained.bytes_per_s
    if device.kind != "gpu" or measured is None:
        return 1.0
    return _clipped(measured / device.mem_bandwidth_bytes_per_s / TYPICAL["bytes_per_s"])


def _clipped(share: float) -> float:
    return min(max(share, _SHARE_LIMITS[0]), _SHARE_LIMITS[1])


class UnitLimits(NamedTuple):
    """Limits of one compute unit."""

    threads: int
    blocks: int
    shared_bytes: int
    #: 32-bit registers of all threads together.
    registers: int
    #: Threads that execute one instruction together.
    warp: int
    #: Registers of one thread.
    registers_per_thread: int


_KIB = 1024
#: Suffix of :attr:`DeviceSpec.arch` -> limits; the first that the architecture contains counts.
_LIMITS: dict[str, UnitLimits] = {
    "sm_35": UnitLimits(2048, 16, 48 * _KIB, 65536, 32, 255),
    "sm_37": UnitLimits(2048, 16, 112 * _KIB, 131072, 32, 255),
    "sm_52": UnitLimits(2048, 32, 96 * _KIB, 65536, 32, 255),
    "sm_60": UnitLimits(2048, 32, 64 * _KIB, 65536, 32, 255),
    "sm_61": UnitLimits(2048, 32, 96 * _KIB, 65536, 32, 255),
    "sm_70": UnitLimits(2048, 32, 96 * _KIB, 65536, 32, 255),
    "sm_75": UnitLimits(1024, 16, 64 * _KIB, 65536, 32, 255),
    "sm_80": UnitLimits(2048, 32, 164 * _KIB, 65536, 32, 255),
    "sm_86": UnitLimits(1536, 16, 100 * _KIB, 65536, 32, 255),
    "sm_89": UnitLimits(1536, 24, 100 * _KIB, 65536, 32, 255),
    "sm_90": UnitLimits(2048, 32, 228 * _KIB, 65536, 32, 255),
    "sm_10": UnitLimits(2048, 32, 228 * _KIB, 65536, 32, 255),
    "sm_12": UnitLimits(1536, 24, 100 * _KIB, 65536, 32, 255),
    "gfx90a": UnitLimits(2048, 32, 64 * _KIB, 131072, 64, 512),
    "gfx94": UnitLimits(2048, 32, 64 * _KIB, 131072, 64, 512),
    "gfx95": UnitLimits(2048, 32, 160 * _KIB, 131072, 64, 512),
    # GCN 5 (gfx900, gfx906) and CDNA 1: four SIMDs, each with 10 waves and 256 registers of a lane.
    "gfx9": UnitLimits(2560, 40, 64 * _KIB, 65536, 64, 256),
    "gfx8": UnitLimits(2560, 40, 64 * _KIB, 65536, 64, 256),
    "gfx10": UnitLimits(1024, 32, 64 * _KIB, 65536, 32, 256),
    "gfx11": UnitLimits(1024, 32, 64 * _KIB, 98304, 32, 256),
}
#: Of a GPU whose architecture is not listed.
DEFAULT = UnitLimits(2048, 32, 64 * _KIB, 65536, 32, 255)


def unit_limits(device: DeviceSpec) -> UnitLimits:
    """Limits of one compute unit of a GPU; :data:`DEFAULT` for an architecture that is not listed."""
    architecture = device.arch.split()[-1]
    return next((limits for name, limits in _LIMITS.items() if architecture.startswith(name)), DEFAULT)
