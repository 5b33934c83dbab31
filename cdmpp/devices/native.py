"""``native``: this machine's CPU, named as a device."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

from cdmpp.devices.cpuinfo import HINT, read_linux, read_macos
from cdmpp.devices.host import describe, host_device
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, InvalidDeviceError, UnknownDeviceError

logger = logging.getLogger(__name__)

#: Instruction sets, widest first; the widest one of a CPU determines its figures.
_WIDEST_FIRST = ("avx512", "avx2", "sse4.2", "neon")
_NATIVE = re.compile(r"native(@(?P<threads>[0-9]+))?")


def is_native(text: str) -> bool:
    """Whether a text is ``native`` (all cores) or ``native@THREADS``, as in ``cdmpp collect --target``."""
    return _NATIVE.fullmatch(text) is not None


def native_device(text: str, known: Callable[[str], DeviceSpec] = lookup) -> DeviceSpec:
    """Return the device of a text for which :func:`is_native` holds.

    ``known`` finds devices by name. A CPU that it does not know is inspected, and its bandwidth measured.

    Raises
    ------
    InvalidDeviceError
        This process may not use as many cores; also as :func:`this_cpu`.
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

    Raises
    ------
    InvalidDeviceError
        This process may not use as many cores.
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

    Raises
    ------
    InvalidDeviceError
        The operating system does not describe the CPU sufficiently.
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
