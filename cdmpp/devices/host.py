"""The specification of this machine's CPU, and ``native``, which names it as a device.

Found out: cores, clock and cache from the operating system; lanes from the core's kind
(:mod:`cdmpp.devices.cpuinfo`). Memory bandwidth is measured: as a plain copy sees it, with as many pinned threads as
programs will have. ``source`` of the result states the origin of each figure.
"""

from __future__ import annotations

import datetime
import logging
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cdmpp.devices.cpuinfo import HINT, NEEDED_FLAGS, USUAL_LANES, Core, CpuInfo, find_core, read_linux, read_macos
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, InvalidDeviceError, UnknownDeviceError

logger = logging.getLogger(__name__)


ISAS = tuple(NEEDED_FLAGS)
#: Words of a CPU's name that say nothing, and how many cores it has.
_NOISE = re.compile(r"\((r|tm|c)\)|@.*|\bcpu\b|\bprocessor\b|\b[0-9]+-core\b|\bwith\b.*", re.IGNORECASE)


def host_device(
    threads: int, isa: str, bandwidth_bytes_per_s: float | None = None, *, cores: Sequence[int] | None = None
) -> DeviceSpec:
    """Describe this machine's CPU as programs will use it; a figure that cannot be found out is an InvalidDeviceError,
    and none is ever made up.

    ``threads`` that a program may use are the specification's ``compute_units``. ``isa`` ("sse4.2", "avx2", "avx512" or
    "neon") is the widest instruction set that programs are compiled for: it decides about the lanes, and so the peak.
    The memory bandwidth is measured unless given (seconds; the machine should be idle). ``cores`` that the threads run
    on are by default the last of those this process may use.

    ``name`` depends on the CPU, ``threads`` and ``isa`` alone, as in ``intel-core-i7-12700h-1t-avx2``. The clock is the
    highest that the operating system states; ``l2_bytes`` the last level of cache that serves these cores, which other
    cores, on a virtual machine even other tenants, may share.
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


#: All arrays together are this much larger than the last cache, so that the copy is one of memory ...
CACHE_FACTOR = 4.0
#: ... but no larger than this share of the memory that is free, and not more than this.
MEMORY_SHARE = 0.25
MOST_BYTES = 2**32
LEAST_BYTES = 2**28
_PASSES = 9


def copy_bytes(cache_bytes: float | None) -> int:
    """Size of all arrays together."""
    wanted = max(LEAST_BYTES, CACHE_FACTOR * (cache_bytes or 0.0))
    if sys.platform == "linux":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        wanted = min(wanted, max(MEMORY_SHARE * free, LEAST_BYTES / 4))
    return int(min(wanted, MOST_BYTES))


def measure_copy(cores: Sequence[int], total_bytes: int) -> float:
    """Bytes read and written per second by one copying thread per core, as STREAM counts them.

    The best of some passes after one that is not counted, as STREAM reports it: whatever else the machine
    does makes a pass slower, never faster. A pass lasts from its first thread's start to its last one's end, by their
    own clocks: the calling thread may get no core meanwhile. numpy gives up the interpreter's lock while it copies.

    ``cores``: one thread is pinned to each (on Linux; elsewhere the number counts alone). ``total_bytes``: size of all
    arrays together.
    """
    count = max(total_bytes // (2 * len(cores) * 8), 1)
    barrier = threading.Barrier(len(cores) + 1)

    spans: list[tuple[float, float]] = []

    def work(core: int) -> None:
        try:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {core})  # of this thread alone
            source, target = np.ones(count), np.zeros(count)  # touched here, by the thread that copies them
            for _ in range(_PASSES + 1):
                barrier.wait()
                start = time.perf_counter()
                np.copyto(target, source)
                spans.append((start, time.perf_counter()))
                barrier.wait()
        except BaseException:
            barrier.abort()  # nobody waits for this thread
            raise

    rates: list[float] = []
    with ThreadPoolExecutor(len(cores)) as pool:
        workers = [pool.submit(work, core) for core in cores]
        try:
            for _ in range(_PASSES + 1):
                barrier.wait()
                barrier.wait()
                starts, ends = zip(*spans, strict=True)
                rates.append(2 * 8 * count * len(cores) / (max(ends) - min(starts)))
                spans.clear()
        except threading.BrokenBarrierError:
            pass  # a worker failed: its error is raised below
        except BaseException:
            barrier.abort()  # Ctrl-C: the workers would wait for this thread for ever
            raise
        failed = [error for error in (w.exception() for w in workers) if error]
    for error in sorted(failed, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return max(rates[1:])


#: Instruction sets, widest first; the widest one of a CPU determines its figures.
_WIDEST_FIRST = ("avx512", "avx2", "sse4.2", "neon")
_NATIVE = re.compile(r"native(@(?P<threads>[0-9]+))?")


def is_native(text: str) -> bool:
    """Whether a text is ``native`` (all cores) or ``native@THREADS``, as in ``cdmpp collect --target``."""
    return _NATIVE.fullmatch(text) is not None


def native_device(text: str, known: Callable[[str], DeviceSpec] = lookup) -> DeviceSpec:
    """Return the device of a text for which :func:`is_native` holds.

    ``known`` finds devices by name. A CPU that it does not know is inspected, and its bandwidth measured.

    Raises InvalidDeviceError: this process may not use as many cores; also as :func:`this_cpu`.
    """
    name = native_name(text)
    try:
        return known(name)
    except UnknownDeviceError:
        spec = this_cpu(native_threads(text))
    logger.warning(
        "%s: measured a memory bandwidth of %.3g GB/s, which differs a little from run to run. For equal answers save "
        "it: cdmpp devices %s > my-cpu.toml, and use --device my-cpu.toml",
        name,
        spec.mem_bandwidth_bytes_per_s / 1e9,
        text,
    )
    return spec


def native_name(text: str) -> str:
    """Return the name of :func:`native_device` without a measurement."""
    return this_cpu_name(native_threads(text))


def native_threads(text: str) -> int:
    """Return the threads of a text for which :func:`is_native` holds.

    Raises InvalidDeviceError: this process may not use as many cores.
    """
    match, cores = _NATIVE.fullmatch(text), len(available_cores())
    threads = int(match["threads"] or cores) if match else cores
    if not 1 <= threads <= cores:
        raise InvalidDeviceError(
            f"{text}: this process may use {cores} cores", hint=f"write native, or native@1 to native@{cores}"
        )
    return threads


def this_cpu(threads: int) -> DeviceSpec:
    """Return this CPU with ``threads`` threads and its widest instruction set, as libraries use it.

    The device table describes known CPUs. Others are inspected, and their bandwidth is measured.

    Raises InvalidDeviceError: the operating system does not describe the CPU sufficiently.
    """
    name, isa = _widest(threads)
    try:
        return lookup(name)
    except UnknownDeviceError:
        return host_device(threads, isa)


def this_cpu_name(threads: int) -> str:
    """Return the name of this CPU without a measurement; raises as :func:`this_cpu`."""
    return _widest(threads)[0]


def available_cores() -> tuple[int, ...]:
    """Return the cores that this process may use: one number per core, even if it runs two threads."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    allowed = sorted(os.sched_getaffinity(0))
    first: dict[str, int] = {}
    for core in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        # Without information on siblings, each number counts as a core.
        first.setdefault(siblings.read_text().strip() if siblings.is_file() else str(core), core)
    return tuple(sorted(first.values()))


def _widest(threads: int) -> tuple[str, str]:
    """Return name and instruction set of this CPU."""
    info = read_macos() if platform.system() == "Darwin" else read_linux(available_cores()[-threads:])
    problem: CdmppError = InvalidDeviceError("no known vector instructions on this CPU", hint=HINT)
    for isa in _WIDEST_FIRST:
        try:
            return str(describe(info, threads, isa)["name"]), isa
        except InvalidDeviceError as error:
            problem = error
    raise problem
