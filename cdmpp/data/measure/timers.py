"""Timers: worker processes that time the built programs of a collection, in passes until two agree on each program.

On a shared machine other tenants slow a program down for tenths of a second. Repeats in a row are slowed down
together, so their spread does not show it. Passes are seconds apart: the smaller of two that agree is the label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from cdmpp.data.measure.building import Library
from cdmpp.data.measure.pools import Outcome, WorkerPool, WorkerSettings
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.targets import Configuration
from cdmpp.data.measure.timing import TimedRun, TimingSettings, driver_name, prepare_timer, time_library
from cdmpp.devices.host import ISAS, host_device
from cdmpp.devices.registry import lookup
from cdmpp.errors import InvalidDeviceError, MeasurementError, UnknownDeviceError

_NAME_DEVICE = "if this is intended, name the device: --device NAME or FILE.toml"


class Timers(Protocol):
    """Times built programs, on this machine or on boards behind a tracker."""

    def ready(self) -> None:
        """Wait until no other work disturbs the timing."""

    def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
        """Yield outcomes (:class:`TimedRun`) in the order of the libraries."""

    def close(self) -> None:
        """End the workers."""


class LocalTimers:
    """One worker of this machine, pinned to the configuration's cores, with TVM's runtime only."""

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
        # A replacement worker imports TVM, which would disturb the timing of another configuration.
        self._pool.ready()

    def close(self) -> None:
        """See :class:`Timers`."""
        self._pool.close()


def on_this_machine(configuration: Configuration, settings: CollectSettings) -> Configuration:
    """Return the configuration with the device of this machine, which must be the named one. For a GPU named by a
    family, such as ``cuda:a100``, the driver identifies the board."""
    with WorkerPool(1, _limits(configuration, settings)) as pool:
        pool.call(prepare_timer, configuration.device_kind, settings.timing, configuration.cores)
        if not configuration.names:
            return configuration
        is_cpu = configuration.kind == "llvm"
        return named(configuration, _this_cpu(configuration) if is_cpu else pool.call(driver_name))


def named(configuration: Configuration, seen: str) -> Configuration:
    """Return the configuration with the device that was found, which must be one of its names."""
    wanted = " or ".join(configuration.names)
    try:
        device = lookup(seen)
    except UnknownDeviceError:
        if seen in configuration.names:  # a CPU that an earlier call has described
            return configuration
        raise InvalidDeviceError(
            f"the target names {wanted}, but this machine has {seen!r}", hint=_NAME_DEVICE
        ) from None
    if device.name not in configuration.names:
        raise InvalidDeviceError(f"the target names {wanted}, but this machine has {device.name}", hint=_NAME_DEVICE)
    return configuration if device.name == configuration.name else replace(configuration, device=device)


def _this_cpu(configuration: Configuration) -> str:
    """Return the name of this CPU with the threads and instruction set of the named device."""
    suffix = configuration.names[0].rpartition("-")[2]
    isa = next(isa for isa in ISAS if isa.replace(".", "") == suffix)
    try:
        # The name does not depend on the bandwidth, which is not measured.
        return host_device(configuration.threads, isa, 1e9, cores=configuration.cores).name
    except InvalidDeviceError as error:
        raise InvalidDeviceError(
            f"{configuration.names[0]} is the target, but this machine differs: {error.message}", hint=_NAME_DEVICE
        ) from None


def _limits(configuration: Configuration, settings: CollectSettings) -> WorkerSettings:
    threads = str(configuration.threads)
    return WorkerSettings(
        settings.time_limit_s,
        # Drivers of other devices reserve address space by the terabyte.
        int(settings.memory_gib * 2**30) if configuration.kind == "llvm" else 0,
        cores=configuration.cores,
        environment={"TVM_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "TVM_USE_RUNTIME_LIB": "1"},
        log=settings.log,
    )


def time_in_passes(timers: Timers, libraries: Sequence[Library], settings: TimingSettings) -> Iterator[Outcome]:
    """Time programs; yields outcomes in the order of the libraries, each with the repeats of the pass with the smallest
    median.

    There is one pass for programs that ran on a quiet CPU (:class:`~cdmpp.data.measure.timing.QuietCheck`), ``passes``
    for the others, then up to ``max_passes`` for those whose two fastest passes differ by more than ``agreement``. A
    program that fails in its first pass has that failure. Later failures leave its earlier passes. If the device is
    lost, the MeasurementError comes after the outcomes of the programs that were timed.
    """
    outcomes: list[Outcome] = []
    runs: dict[int, list[TimedRun]] = {}
    lost: MeasurementError | None = None
    try:
        for i, outcome in enumerate(timers.time(libraries)):
            outcomes.append(outcome)
            if not outcome.failure:
                runs[i] = [outcome.value]
        for _ in range(1, settings.max_passes):
            again = [i for i in runs if not _settled(runs[i], settings)]
            if not again:
                break
            for i, outcome in zip(again, timers.time([libraries[i] for i in again]), strict=True):
                if outcome.failure:
                    outcomes[i] = replace(outcomes[i], value=_merged(runs.pop(i)))
                else:
                    runs[i].append(outcome.value)
    except MeasurementError as error:
        lost = error
    for i, passes in runs.items():
        outcomes[i] = replace(outcomes[i], value=_merged(passes))
    yield from outcomes
    if lost is not None:
        raise lost


def _settled(runs: Sequence[TimedRun], settings: TimingSettings) -> bool:
    """Whether a program needs no further pass: a quiet one, or enough that agree."""
    if any(run.quiet for run in runs):
        return True
    return len(runs) >= settings.passes and _disagreement(runs) <= settings.agreement


def _disagreement(runs: Sequence[TimedRun]) -> float:
    """Relative difference of the two fastest passes; 0 for one pass."""
    medians = sorted(run.timing.latency_s for run in runs)
    return medians[1] / medians[0] - 1 if len(medians) > 1 else 0.0


def _merged(runs: Sequence[TimedRun]) -> TimedRun:
    quiet = [run for run in runs if run.quiet]
    fastest = min(quiet or runs, key=lambda run: run.timing.latency_s)
    disagreement = 0.0 if quiet else _disagreement(runs)
    timing = replace(fastest.timing, disagreement=disagreement)
    return TimedRun(timing, sum(r.elapsed_s for r in runs), sum(r.timed_s for r in runs), bool(quiet))
