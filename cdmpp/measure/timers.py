"""Where programs are timed: workers that a collection gives built programs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from cdmpp.devices.host import ISAS, host_device
from cdmpp.devices.registry import lookup
from cdmpp.errors import InvalidDeviceError, UnknownDeviceError
from cdmpp.measure.building import Library
from cdmpp.measure.pools import Outcome, WorkerPool, WorkerSettings
from cdmpp.measure.settings import CollectSettings
from cdmpp.measure.targets import Configuration
from cdmpp.measure.timing import driver_name, prepare_timer, thread_environment, time_library

_SAY_SO = "if that is meant, say what measures: --device NAME or FILE.toml"


class Timers(Protocol):
    """Where programs are timed: workers on this machine, or on boards behind a tracker."""

    def ready(self) -> None:
        """Wait until nothing is busy but what will be timed."""

    def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
        """Outcomes (:class:`TimedRun`) in the order of the libraries."""

    def close(self) -> None:
        """End the workers."""


class LocalTimers:
    """One worker of this machine, pinned to the configuration's cores, with TVM's runtime alone."""

    def __init__(self, configuration: Configuration, settings: CollectSettings) -> None:
        arguments = (configuration.device_kind, settings.timing, configuration.cores)
        self._pool = WorkerPool(1, _limits(configuration, settings), prepare_timer, arguments)
        self._pool.start()  # while the first programs are built

    def ready(self) -> None:
        """See :class:`Timers`."""
        self._pool.ready()

    def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
        """See :class:`Timers`."""
        yield from self._pool.run(time_library, [(library.path, library.arguments) for library in libraries])
        # A worker that replaces a crashed one imports TVM: not while another configuration is timed.
        self._pool.ready()

    def close(self) -> None:
        """See :class:`Timers`."""
        self._pool.close()


def on_this_machine(configuration: Configuration, settings: CollectSettings) -> Configuration:
    """The configuration with the device that this machine is.

    Of a GPU that was named by a family, such as ``cuda:a100``, the driver says which board it is.

    Raises
    ------
    InvalidDeviceError
        This machine is seen to be another device than the one that was named.
    MeasurementError
        There is no such device, or its driver is missing: nothing can be timed.
    MissingDependencyError
        TVM is not installed.
    """
    with WorkerPool(1, _limits(configuration, settings)) as pool:
        pool.call(prepare_timer, configuration.device_kind, settings.timing, configuration.cores)
        if not configuration.names:
            return configuration
        is_cpu = configuration.kind == "llvm"
        return named(configuration, _this_cpu(configuration) if is_cpu else pool.call(driver_name))


def named(configuration: Configuration, seen: str) -> Configuration:
    """The configuration with the device of a name that was seen.

    Raises
    ------
    InvalidDeviceError
        That is none of the configuration's names.
    """
    wanted = " or ".join(configuration.names)
    try:
        found = lookup(seen)
    except UnknownDeviceError:
        if seen in configuration.names:  # a CPU that is described where it was first measured
            return configuration
        raise InvalidDeviceError(f"{wanted} was named, this machine has {seen!r}", hint=_SAY_SO) from None
    if found.name not in configuration.names:
        raise InvalidDeviceError(f"{wanted} was named, this machine has {found.name}", hint=_SAY_SO)
    return configuration if found.name == configuration.name else replace(configuration, device=found)


def _this_cpu(configuration: Configuration) -> str:
    """Name of this CPU with the threads and the instruction set of a device that was named like one."""
    suffix = configuration.names[0].rpartition("-")[2]
    isa = next(isa for isa in ISAS if isa.replace(".", "") == suffix)
    try:
        # The name does not depend on the bandwidth, which is not measured.
        return host_device(configuration.threads, isa, 1e9, cores=configuration.cores).name
    except InvalidDeviceError as error:
        raise InvalidDeviceError(
            f"{configuration.names[0]} was named, this machine is another: {error.message}", hint=_SAY_SO
        ) from None


def _limits(configuration: Configuration, settings: CollectSettings) -> WorkerSettings:
    return WorkerSettings(
        settings.time_limit_s,
        # Drivers of other devices reserve address space by the terabyte.
        int(settings.memory_gib * 2**30) if configuration.kind == "llvm" else 0,
        cores=configuration.cores,
        environment=thread_environment(configuration.threads),
        log=settings.log,
    )
