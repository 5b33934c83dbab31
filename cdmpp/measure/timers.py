"""Where programs are timed: workers that a collection gives built programs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from cdmpp.measure.building import Library
from cdmpp.measure.pools import Outcome, WorkerPool, WorkerSettings
from cdmpp.measure.settings import CollectSettings
from cdmpp.measure.targets import Configuration
from cdmpp.measure.timing import prepare_timer, thread_environment, time_library


class Timers(Protocol):
    """Where programs are timed: workers on this machine, or on boards behind a tracker."""

    def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
        """Outcomes (:class:`TimedRun`) in the order of the libraries."""

    def close(self) -> None:
        """End the workers."""


class LocalTimers:
    """One worker of this machine, pinned to the configuration's cores, with TVM's runtime alone."""

    def __init__(self, configuration: Configuration, settings: CollectSettings) -> None:
        if configuration.kind != "llvm":
            check_machine(configuration, settings)
        arguments = (configuration.device_kind, settings.timing, configuration.cores)
        self._pool = WorkerPool(1, _limits(configuration, settings), prepare_timer, arguments)

    def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
        """See :class:`Timers`."""
        return self._pool.run(time_library, [(library.path, library.arguments) for library in libraries])

    def close(self) -> None:
        """See :class:`Timers`."""
        self._pool.close()


def check_machine(configuration: Configuration, settings: CollectSettings) -> None:
    """Raise if this machine cannot time anything on a configuration, before every program fails for it.

    Raises
    ------
    MeasurementError
        There is no such device, or its driver is missing.
    MissingDependencyError
        TVM is not installed.
    """
    with WorkerPool(1, _limits(configuration, settings)) as pool:
        pool.call(prepare_timer, configuration.device_kind, settings.timing, configuration.cores)


def _limits(configuration: Configuration, settings: CollectSettings) -> WorkerSettings:
    return WorkerSettings(
        settings.time_limit_s,
        # Drivers of other devices reserve address space by the terabyte.
        int(settings.memory_gib * 2**30) if configuration.kind == "llvm" else 0,
        cores=configuration.cores,
        environment=thread_environment(configuration.threads),
        log=settings.log,
    )
