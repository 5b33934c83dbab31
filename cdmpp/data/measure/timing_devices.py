"""Devices for timing library kernels: PyTorch's device, its specification and its free memory."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from cdmpp.devices.cpuinfo import read_linux
from cdmpp.devices.host import available_cores, this_cpu, this_cpu_name
from cdmpp.devices.loading import load_device
from cdmpp.devices.registry import find_known, lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import InvalidDeviceError, MeasurementError, UnknownDeviceError

#: Suffix of CPU names from :func:`cdmpp.devices.host.host_device`.
_THREADS_AND_ISA = re.compile(r"-[0-9]+t-[a-z0-9]+$")


@dataclass(frozen=True)
class TimingDevice:
    """A timing device: PyTorch's device, its specification, and the threads on a CPU."""

    torch_device: torch.device
    device: DeviceSpec
    threads: int


def find_timing_device(on: str, device: str | DeviceSpec | None = None, threads: int | None = None) -> TimingDevice:
    """Find the device to measure on.

    Parameters
    ----------
    on : str
        "cpu", "cuda" or "cuda:N".
    device : str or DeviceSpec, optional
        Known name, specification file or specification. Default: the GPU that the driver names, or this CPU
        as the operating system describes it; its bandwidth is then measured, which takes some seconds.
    threads : int, optional
        Threads on a CPU. Default: ``compute_units`` of the specification, or all cores.

    Raises
    ------
    MeasurementError
        PyTorch has no such device.
    UnknownDeviceError, InvalidDeviceError
        The device is unknown, is of another kind, or differs from ``device``.
    """
    try:
        where = torch.device(on)
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda") or (where.type == "cpu" and where.index):
        raise MeasurementError(f"cannot measure on {on!r}", hint="use cpu, cuda or cuda:N")
    spec = load_device(device) if isinstance(device, str) else device
    if where.type == "cuda":
        return _cuda_place(where, spec)
    cores = len(available_cores())
    count = threads or (min(spec.compute_units, cores) if spec is not None else cores)
    if count > cores:
        raise MeasurementError(f"{count} threads on a machine with {cores} cores", hint="choose fewer with --threads N")
    cpu = spec or this_cpu(count)
    if cpu.kind != "cpu":
        raise InvalidDeviceError(f"{cpu.name} is a {cpu.kind}, not a CPU", hint="measure it with --on cuda")
    if spec is not None and find_known(spec.name) is not None:
        _check_cpu(spec)
    return TimingDevice(where, cpu, count)


def _cuda_place(where: torch.device, spec: DeviceSpec | None) -> TimingDevice:
    number = where.index or 0
    if not torch.cuda.is_available() or number >= torch.cuda.device_count():
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise MeasurementError(
            f"PyTorch finds {seen} CUDA devices, so there is no number {number}",
            hint="check the driver and that this PyTorch is built for CUDA; --on cpu measures this CPU",
        )
    name = torch.cuda.get_device_name(number)
    try:
        seen_as: DeviceSpec | None = lookup(name)
    except UnknownDeviceError as error:
        if spec is None:
            raise UnknownDeviceError(
                f"the driver calls this GPU {name!r}: {error.message}",
                hint="describe it: --device FILE.toml (cdmpp devices shows the fields)",
            ) from None
        seen_as = None
    gpu = spec or seen_as
    assert gpu is not None
    if gpu.kind != "gpu":
        raise InvalidDeviceError(f"{gpu.name} is a {gpu.kind}, not a GPU", hint="measure it with --on cpu")
    known = find_known(gpu.name)
    if seen_as is not None and known is not None and known.name != seen_as.name:
        raise InvalidDeviceError(f"this GPU is a {seen_as.name}, not a {gpu.name}", hint="omit --device, or correct it")
    return TimingDevice(torch.device("cuda", number), gpu, 1)


def _check_cpu(spec: DeviceSpec) -> None:
    """Raise if this machine's CPU differs from a known device."""
    try:
        here = this_cpu_name(1)
    except InvalidDeviceError:
        return  # the CPU cannot be identified
    if _THREADS_AND_ISA.sub("", here) != _THREADS_AND_ISA.sub("", spec.name):
        raise InvalidDeviceError(
            f"this CPU is {here}, not {spec.name}",
            hint="omit --device, or describe the CPU in a file: --device FILE.toml",
        )


def free_bytes(place: TimingDevice) -> float:
    """Return the free memory of the device in bytes."""
    if place.torch_device.type == "cuda":
        torch.cuda.empty_cache()  # frees the cache of the last program
        return float(torch.cuda.mem_get_info(place.torch_device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * float(line.split()[1])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def matrix_types(place: TimingDevice) -> tuple[str, ...]:
    """Return the element types with matrix instructions on the device, float32 first.

    Other types run with conversions or scalar instructions, which do not show the device's peak rate.
    """
    if place.torch_device.type == "cuda":
        capability = torch.cuda.get_device_capability(place.torch_device)
        types = [("float16", (7, 0)), ("bfloat16", (8, 0)), ("int8", (7, 5))]
        return ("float32", *(name for name, least in types if capability >= least))
    if platform.system() != "Linux":
        return ("float32",)
    flags = read_linux(available_cores()[-place.threads :]).flags
    return ("float32", "bfloat16") if flags & {"amx_bf16", "avx512_bf16", "bf16"} else ("float32",)
