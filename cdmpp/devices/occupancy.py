"""What one compute unit of a GPU holds at a time: threads, blocks, shared memory and registers, by architecture.

NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". AMD: the CDNA2, CDNA3, RDNA2 and
RDNA3 instruction-set and architecture documents (waves and registers of a SIMD, LDS of a compute unit).
"""

from __future__ import annotations

from typing import NamedTuple

from cdmpp.devices.spec import DeviceSpec


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
