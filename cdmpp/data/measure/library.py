"""Timing of library kernels: an operator as a PyTorch call, on a device that PyTorch finds.

:func:`cdmpp.data.measure.timing.time_program` chooses the number of runs and the label, as for TVM programs. The
protocol defines one run (:mod:`cdmpp.data.measure.library_calls`).
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cdmpp.data.measure.library_calls import EVALUATORS, CallError, Tensors, make_call, precision
from cdmpp.data.measure.timing import Timing, TimingSettings, time_program
from cdmpp.data.physics import UNSTABLE, needed_bytes
from cdmpp.data.records import Measurement
from cdmpp.devices.cpuinfo import read_linux
from cdmpp.devices.host import available_cores, this_cpu, this_cpu_name
from cdmpp.devices.loading import load_device
from cdmpp.devices.registry import find_known, lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, InvalidDeviceError, MeasurementError, UnknownDeviceError
from cdmpp.programs.operators import OperatorSpec

#: Suffix of CPU names from :func:`cdmpp.devices.host.host_device`.
_THREADS_AND_ISA = re.compile(r"-[0-9]+t-[a-z0-9]+$")
#: Share of the free memory that a program's tensors may use.
MEMORY_SHARE = 0.8
_HINT = "choose other programs, or measure it with another tool and enter the latency into the CSV file"


@dataclass(frozen=True)
class TimingDevice:
    """A timing device: PyTorch's device, its specification, and the threads on a CPU."""

    torch_device: torch.device
    device: DeviceSpec
    threads: int


def find_timing_device(on: str, device: str | DeviceSpec | None = None, threads: int | None = None) -> TimingDevice:
    """Find the device to measure on: ``on`` is "cpu", "cuda" or "cuda:N".

    ``device`` is a known name, a specification file or a specification. Default: the GPU that the driver names, or this
    CPU as the operating system describes it; its bandwidth is then measured, which takes some seconds. ``threads`` on a
    CPU are by default the ``compute_units`` of the specification, or all cores. A device of another kind, or that
    differs from ``device``, is an error.
    """
    try:
        where = torch.device(on)
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda") or (where.type == "cpu" and where.index):
        raise MeasurementError(f"cannot measure on {on!r}", hint="use cpu, cuda or cuda:N")
    spec = load_device(device) if isinstance(device, str) else device
    if where.type == "cuda":
        return _cuda_device(where, spec)
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


def _cuda_device(where: torch.device, spec: DeviceSpec | None) -> TimingDevice:
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


def free_bytes(timing_device: TimingDevice) -> float:
    """Return the free memory of the device in bytes."""
    if timing_device.torch_device.type == "cuda":
        torch.cuda.empty_cache()  # frees the cache of the last program
        return float(torch.cuda.mem_get_info(timing_device.torch_device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * float(line.split()[1])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def matrix_types(timing_device: TimingDevice) -> tuple[str, ...]:
    """Return the element types with matrix instructions on the device, float32 first.

    Other types run with conversions or scalar instructions, which do not show the device's peak rate.
    """
    if timing_device.torch_device.type == "cuda":
        capability = torch.cuda.get_device_capability(timing_device.torch_device)
        types = [("float16", (7, 0)), ("bfloat16", (8, 0)), ("int8", (7, 5))]
        return ("float32", *(name for name, least in types if capability >= least))
    if platform.system() != "Linux":
        return ("float32",)
    flags = read_linux(available_cores()[-timing_device.threads :]).flags
    return ("float32", "bfloat16") if flags & {"amx_bf16", "avx512_bf16", "bf16"} else ("float32",)


class LibraryTimer:
    """Times operators on one device with one protocol ("eager", "graph" or "kernel"), inside :meth:`ready`.
    ``memory_bytes``: memory limit of a program, by default :data:`MEMORY_SHARE` of the free memory."""

    def __init__(
        self,
        timing_device: TimingDevice,
        protocol: str,
        settings: TimingSettings | None = None,
        memory_bytes: float | None = None,
    ) -> None:
        if protocol not in EVALUATORS:
            raise MeasurementError(f"unknown protocol {protocol!r}", hint="one of: " + ", ".join(EVALUATORS))
        if protocol != "eager" and timing_device.torch_device.type != "cuda":
            raise MeasurementError(
                f"a CPU does not support the protocol {protocol!r} for library calls",
                hint="use --protocol eager; on a CPU it adds about a microsecond to the kernel",
            )
        self.timing_device, self.protocol = timing_device, protocol
        self.settings = settings or TimingSettings()
        self._memory_bytes = memory_bytes

    @contextmanager
    def ready(self) -> Iterator[LibraryTimer]:
        """Set up PyTorch for measuring, and restore it afterwards."""
        threads = torch.get_num_threads()
        if self.timing_device.torch_device.type == "cpu":
            torch.set_num_threads(self.timing_device.threads)
        try:
            with torch.inference_mode():
                yield self
        finally:
            torch.set_num_threads(threads)

    def time(self, spec: OperatorSpec) -> Timing:
        """Time one operator; it must fit into memory."""
        limit = MEMORY_SHARE * free_bytes(self.timing_device)
        limit = limit if self._memory_bytes is None else min(limit, self._memory_bytes)
        needed = needed_bytes(spec, gpu=self.timing_device.torch_device.type == "cuda")
        if needed > limit:
            raise MeasurementError(
                f"{spec.text()} needs {needed / 2**30:.2f} GiB, and {limit / 2**30:.2f} GiB may be used",
                hint="choose smaller programs",
            )
        fields = spec.canonical()
        try:
            with precision(fields):
                call = make_call(fields, Tensors(self.timing_device.torch_device))
                call()  # the first call selects a kernel and allocates workspaces, which is not timed
                return time_program(EVALUATORS[self.protocol](call, self.timing_device.torch_device), self.settings)
        except CallError as error:
            raise MeasurementError(str(error), hint=_HINT) from None
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, CdmppError):
                raise
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise MeasurementError(
                f"PyTorch cannot run {spec.text()}: {line[:200]}", hint="choose other programs"
            ) from None

    def record(self, spec: OperatorSpec, source: str) -> Measurement:
        """Time one operator and return a record; a failure is part of the record."""
        timing_device = self.timing_device
        provenance = {
            "measured_with": f"torch {torch.__version__}",
            "measured_on": str(timing_device.torch_device),
            "threads": str(timing_device.threads) if timing_device.torch_device.type == "cpu" else "",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        outcome: dict[str, Any]
        try:
            timing = self.time(spec)
            noisy = UNSTABLE if timing.spread > self.settings.max_spread else ""
            outcome = {"latency_s": timing.latency_s, "repeats_s": timing.repeats_s, "excluded_reason": noisy}
        except MeasurementError as error:
            outcome = {"latency_s": None, "failure": error.message}
        return Measurement(
            program=spec.text(),
            program_kind="operator",
            program_hash=spec.hash(),
            device=timing_device.device.name,
            device_spec=timing_device.device,
            backend="library",
            protocol=self.protocol,
            framework="pytorch",
            source=source,
            provenance=provenance,
            **outcome,
        )
