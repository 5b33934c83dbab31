"""The specification of this machine's CPU with a fixed number of threads and one instruction set.

Found out: cores, clock and cache from the operating system; lanes from the core's kind
(:mod:`cdmpp.devices.cores`). Memory bandwidth is measured. ``source`` of the result states the origin of each figure.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
from collections.abc import Sequence

from cdmpp.devices.bandwidth import copy_bytes, measure_copy
from cdmpp.devices.cores import NEEDED_FLAGS, USUAL_LANES, Core, find_core
from cdmpp.devices.cpuinfo import HINT, CpuInfo, read_linux, read_macos
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import InvalidDeviceError

ISAS = tuple(NEEDED_FLAGS)
#: Words of a CPU's name that say nothing, and how many cores it has.
_NOISE = re.compile(r"\((r|tm|c)\)|@.*|\bcpu\b|\bprocessor\b|\b[0-9]+-core\b|\bwith\b.*", re.IGNORECASE)


def host_device(
    threads: int, isa: str, bandwidth_bytes_per_s: float | None = None, *, cores: Sequence[int] | None = None
) -> DeviceSpec:
    """Describe this machine's CPU as programs will use it.

    Parameters
    ----------
    threads : int
        Threads that a program may use: the specification's ``compute_units``.
    isa : {"sse4.2", "avx2", "avx512", "neon"}
        Widest instruction set that programs are compiled for: it decides about the lanes, and so the peak.
    bandwidth_bytes_per_s : float, optional
        Memory bandwidth; measured unless given (seconds; the machine should be idle).
    cores : sequence of int, optional
        The cores that the threads run on; the last of those this process may use otherwise.

    Returns
    -------
    DeviceSpec
        ``name`` depends on the CPU, ``threads`` and ``isa`` alone, as in ``intel-core-i7-12700h-1t-avx2``.
        The clock is the highest that the operating system states; ``l2_bytes`` the last level of cache that
        serves these cores, which other cores, on a virtual machine even other tenants, may share.

    Raises
    ------
    InvalidDeviceError
        The CPU lacks the instruction set, or a figure cannot be found out. None is ever made up.
    """
    if isa not in NEEDED_FLAGS:
        raise InvalidDeviceError(f"no instruction set {isa!r}", hint="one of: " + ", ".join(ISAS))
    available = _available()
    if not 1 <= threads <= len(available):
        raise InvalidDeviceError(
            f"{threads} threads on a machine that gives this process {len(available)} cores",
            hint=f"from 1 to {len(available)} threads",
        )
    chosen = tuple(cores) if cores is not None else available[-threads:]
    if sys.platform == "linux":
        info = read_linux(chosen)
    elif sys.platform == "darwin":
        info = read_macos()
    else:
        raise InvalidDeviceError(f"cannot look at the CPU on {sys.platform}", hint=HINT)
    described = describe(info, threads, isa)  # complains before seconds are spent on the bandwidth
    measured = "given"
    if bandwidth_bytes_per_s is None:
        size = copy_bytes(info.cache_bytes)
        bandwidth_bytes_per_s = float(f"{measure_copy(chosen, size):.3g}")
        today = datetime.datetime.now(datetime.UTC).date()
        measured = f"measured {today}: a copy of {size / 2**20:.0f} MiB, pinned threads: {threads}"
    return DeviceSpec.model_validate(
        described
        | {"mem_bandwidth_bytes_per_s": bandwidth_bytes_per_s, "source": f"{described['source']}; bandwidth {measured}"}
    )


def describe(info: CpuInfo, threads: int, isa: str) -> dict[str, object]:
    """Fields of the specification except the bandwidth, from the operating system's report."""
    lacking = [flag for flag in NEEDED_FLAGS[isa] if flag not in info.flags]
    if lacking:
        raise InvalidDeviceError(
            f"this CPU does not report {' '.join(lacking)}, which {isa} needs", hint="choose another target"
        )
    reported = find_core(info.vendor, info.family, info.model, info.stepping)
    core = reported if reported is not None and reported.fits(info.flags) else None
    lanes, lanes_source = _lanes(info, core, isa)
    if info.clock_hz is None:
        raise InvalidDeviceError("the operating system does not say the CPU's clock", hint=HINT)
    cache = f"; last cache from {info.cache_source}" if info.cache_bytes else ""
    return {
        "name": f"{_slug(info, core)}-{threads}t-{isa.replace('.', '')}",
        "vendor": info.vendor,
        "arch": _arch(info, core, reported),
        "kind": "cpu",
        "compute_units": threads,
        "cores_per_unit": lanes,
        "clock_hz": info.clock_hz,
        "peak_flops_fp32": 2.0 * threads * lanes * info.clock_hz,
        "l2_bytes": info.cache_bytes,
        "source": f"detected: clock from {info.clock_source}; lanes {lanes_source}{cache}",
    }


def _lanes(info: CpuInfo, core: Core | None, isa: str) -> tuple[int, str]:
    if core is not None and isa in core.lanes:
        return core.lanes[isa], f"of {core.name}"
    if isa in USUAL_LANES:
        return USUAL_LANES[isa], f"as usual with {isa}" if core is None else f"of {core.name}"
    if "amx_tile" in info.flags:
        return 32, "of every core with AMX"
    raise InvalidDeviceError(
        f"how many {isa} units a core of {info.model_name or info.vendor} has is not known", hint=HINT
    )


def _slug(info: CpuInfo, core: Core | None) -> str:
    """Name by model number if the CPU reports one, otherwise by microarchitecture."""
    plain = "-".join(re.findall(r"[a-z0-9]+", _NOISE.sub(" ", info.model_name).casefold()))
    if re.search(r"[0-9]", plain):
        return plain
    if core is not None:
        return f"{info.vendor.casefold()}-{core.slug}"
    parts = [plain or info.vendor.casefold()]
    if info.vendor not in ("Intel", "AMD", "Apple") and info.model is not None:
        parts.append(f"{info.model:x}")
    return "-".join(re.findall(r"[a-z0-9]+", "-".join(parts))) + ("-amx" if "amx_tile" in info.flags else "")


def _arch(info: CpuInfo, core: Core | None, reported: Core | None) -> str:
    if core is not None:
        return core.name
    text = info.model_name or f"{info.vendor} CPU {info.model}"
    if "amx_tile" in info.flags:
        text += " with AMX"
    if reported is not None:
        # Seen on virtual machines: the number of one CPU, the instructions and caches of another.
        text += f", reported under the number of {reported.name}"
    return text[:100]


def _available() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))
