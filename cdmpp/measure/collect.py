"""The collector: decides what is lowered, sampled, built and timed next, until nothing is missing.

Every step is read from and written to the :class:`~cdmpp.measure.store.Store`, so that a collection which was
stopped, by whatever, goes on with the same call. Building and timing take turns: first a group of programs is
built on all cores, then it is timed while nothing else runs.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.errors import CdmppError, MeasurementError
from cdmpp.frontends.tasks import network_tasks
from cdmpp.measure.building import Library, build_program, prepare_builder
from cdmpp.measure.pools import Outcome, WorkerPool, WorkerSettings
from cdmpp.measure.sampling import SampledProgram, prepare_sampler, sample_programs
from cdmpp.measure.store import FIRST, SECOND, Store, StoredMeasurement, StoredProgram
from cdmpp.measure.targets import Configuration, available_cores
from cdmpp.measure.timing import TimedRun, TimingSettings, prepare_timer, thread_environment, time_library

logger = logging.getLogger(__name__)

#: Programs that are built before they are timed together.
GROUP = 64
#: Tries of a program whose device was lost under it, before the collection stops.
TRIES = 3
_LOWERING = WorkerSettings(time_limit_s=900.0, memory_bytes=16 * 2**30)
_NO_SPACE = "No space left on device"


class CollectSettings(BaseModel):
    """What is collected, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedules: int = Field(64, ge=0, description="random schedules of each task, beside the untuned default")
    seed: int = Field(0, ge=0)
    tune: int = Field(0, ge=0, description="measured trials of a search for good schedules, for each task")
    timing: TimingSettings = TimingSettings()
    repeat_share: float = Field(0.05, ge=0, le=1, description="programs that are measured a second time")
    repeat_gap_s: float = Field(180.0, ge=0, description="seconds between first and second measurement")
    build_limit_s: float = Field(60.0, gt=0, description="time limit of one build")
    time_limit_s: float = Field(30.0, gt=0, description="time limit of all runs of one program")
    memory_gib: float = Field(8.0, gt=0, description="address space of a worker")
    builders: int | None = Field(None, ge=1, description="building processes; default: one a core")

    def worker(self, time_limit_s: float, **rest: Any) -> WorkerSettings:
        """Limits of one kind of worker."""
        return WorkerSettings(time_limit_s, int(self.memory_gib * 2**30), **rest)


class Progress(Protocol):
    """Who wants to see how far it is."""

    def phase(self, name: str, done: int, total: int) -> None:
        """A phase begins, or its size is known better."""

    def step(self, ok: bool) -> None:
        """One more piece is done."""


class Timers(Protocol):
    """Where programs are timed: workers on this machine, or on boards behind a tracker."""

    def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
        """Outcomes (:class:`TimedRun`) in the order of the libraries."""

    def close(self) -> None:
        """End the workers."""


class LocalTimers:
    """One worker of this machine, pinned to the configuration's cores, with TVM's runtime alone."""

    def __init__(self, configuration: Configuration, settings: CollectSettings) -> None:
        limits = WorkerSettings(
            settings.time_limit_s,
            # Drivers of other devices reserve address space by the terabyte.
            int(settings.memory_gib * 2**30) if configuration.kind == "llvm" else 0,
            cores=configuration.cores,
            environment=thread_environment(configuration.threads),
        )
        arguments = (configuration.device_kind, settings.timing, configuration.cores)
        self._pool = WorkerPool(1, limits, prepare_timer, arguments)

    def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
        """See :class:`Timers`."""
        return self._pool.run(time_library, [(library.path, library.arguments) for library in libraries])

    def close(self) -> None:
        """See :class:`Timers`."""
        self._pool.close()


class Collector:
    """A collection in a folder.

    Parameters
    ----------
    store : Store
    settings : CollectSettings
    configurations : sequence of Configuration
        All of one target kind; schedules are drawn for the first.
    timers : callable, optional
        Makes the :class:`Timers` of a configuration; default: on this machine.
    progress : Progress, optional
    """

    def __init__(
        self,
        store: Store,
        settings: CollectSettings,
        configurations: Sequence[Configuration],
        *,
        timers: Callable[[Configuration, CollectSettings], Timers] = LocalTimers,
        progress: Progress | None = None,
    ) -> None:
        self.store, self.settings, self.configurations = store, settings, tuple(configurations)
        self._make_timers, self._progress = timers, progress
        self._spool = store.folder / "spool"
        self._tries: dict[tuple[str, str], int] = {}

    def prepare(self, sources: Sequence[str]) -> None:
        """Lower the networks and draw the schedules that are missing.

        Raises
        ------
        CdmppError
            A network cannot be read or lowered; what was done before stays.
        """
        first = self.configurations[0]
        self.store.settle(
            {
                "seed": self.settings.seed,
                "target_kind": first.kind,
                "timing": self.settings.timing.model_dump(),
            }
        )
        self._lower([source for source in sources if source not in self.store.networks()])
        tasks = self.store.unsampled(self.settings.schedules)
        if not tasks:
            return
        self._phase("sampling", 0, len(tasks))
        limits = self.settings.worker(300.0)
        # No more workers than cores, each with a TVM of its own.
        with WorkerPool(self._builders(), limits, prepare_sampler, (first.kind,)) as pool:
            arguments = [
                (text, digest, dict(first.target), self.settings.schedules, self.settings.seed)
                for digest, _, text in tasks
            ]
            outcomes = pool.run(sample_programs, arguments)
            for (digest, name, text), outcome in zip(tasks, outcomes, strict=True):
                if outcome.failure:
                    logger.warning("task %s: no schedules: %s", name, outcome.failure)
                    self.store.add_programs(
                        digest, [SampledProgram(digest, text, "default")], self.settings.schedules
                    )
                    self.store.fail_task(digest, outcome.failure)
                else:
                    self.store.add_programs(digest, outcome.value, self.settings.schedules)
                self._step(not outcome.failure)

    def measure(self) -> None:
        """Build and time what is missing, the second measurements of the noise floor among it.

        Raises
        ------
        MeasurementError
            The devices are gone, or the disk is full: what was measured stays, the same call goes on.
        """
        names = [c.name for c in self.configurations]
        total = self.store.count_programs() * len(names)
        done = len(self.store.measured(names, FIRST))
        self._phase("measuring", done, total)
        shutil.rmtree(self._spool, ignore_errors=True)
        self._spool.mkdir()
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self._spool, True)
            limits = self.settings.worker(self.settings.build_limit_s)
            builders = stack.enter_context(WorkerPool(self._builders(), limits, prepare_builder))
            timers: dict[str, Timers] = {}
            for configuration in self.configurations:
                made = self._make_timers(configuration, self.settings)
                stack.callback(made.close)
                timers[configuration.name] = made
            while group := self.store.missing(names, GROUP):
                self._group(group, FIRST, builders, timers)
                if len(due := self._due(time.time() - self.settings.repeat_gap_s)) >= GROUP:
                    self._group(self.store.programs(sorted({p for p, _ in due})), SECOND, builders, timers)
            self._repeat_rest(builders, timers)

    def _lower(self, sources: Sequence[str]) -> None:
        if not sources:
            return
        self._phase("lowering", 0, len(sources))
        with WorkerPool(1, _LOWERING) as pool:
            for source in sources:
                self.store.add_network(source, pool.call(network_tasks, source))
                self._step(True)

    def _repeat_rest(self, builders: WorkerPool, timers: dict[str, Timers]) -> None:
        """Second measurements of the last programs, when they are old enough."""
        due = self._due()
        if not due:
            return
        self._phase("second measurements", 0, len(due))
        wait_s = max(due.values()) + self.settings.repeat_gap_s - time.time()
        if wait_s > 0:
            logger.info("waiting %.0f s before the second measurements", wait_s)
            time.sleep(wait_s)
        hashes = sorted({program for program, _ in due})
        for start in range(0, len(hashes), GROUP):
            self._group(self.store.programs(hashes[start : start + GROUP]), SECOND, builders, timers)

    def _due(self, before: float = math.inf) -> dict[tuple[str, str], float]:
        """(program, device) that need a second measurement and had the first before a moment; and when."""
        found = self.store.once_measured([c.name for c in self.configurations])
        return {(p, d): at for p, d, at in found if at <= before and self._repeated(p)}

    def _repeated(self, digest: str) -> bool:
        """The share of programs that are measured twice: by hash, the same ones on every device."""
        return int(digest[:8], 16) < self.settings.repeat_share * 2**32

    def _group(
        self, programs: Sequence[StoredProgram], turn: int, builders: WorkerPool, timers: dict[str, Timers]
    ) -> None:
        """Build some programs for all configurations, then time them on one after the other."""
        names = [c.name for c in self.configurations]
        if turn == FIRST:
            done = self.store.measured(names, FIRST)
            pairs = {(p.hash, name) for p in programs for name in names} - done
        else:
            pairs = set(self._due())
        wanted = {name: [p for p in programs if (p.hash, name) in pairs] for name in names}
        libraries = self._build(wanted, builders)
        for configuration in self.configurations:
            ready: list[tuple[StoredProgram, Library]] = []
            for program in wanted[configuration.name]:
                outcome = libraries[configuration.build_key, program.hash]
                if outcome.failure:
                    failure = f"build: {outcome.failure}"
                    self._keep(StoredMeasurement(program.hash, configuration.name, turn, failure=failure))
                else:
                    ready.append((program, outcome.value))
            outcomes = timers[configuration.name].time([library for _, library in ready])
            for (program, library), outcome in zip(ready, outcomes, strict=True):
                self._judge(program, library, configuration, turn, outcome)
        for path in self._spool.iterdir():
            path.unlink(missing_ok=True)

    def _build(
        self, wanted: dict[str, list[StoredProgram]], builders: WorkerPool
    ) -> dict[tuple[str, str], Outcome]:
        """Libraries by build key and program; configurations with one key share them."""
        jobs: dict[tuple[str, str], tuple[Any, ...]] = {}
        for configuration in self.configurations:
            number = [c.build_key for c in self.configurations].index(configuration.build_key)
            for program in wanted[configuration.name]:
                path = str(self._spool / f"{program.hash}-{number}.so")
                arguments = (program.tvm_json, dict(configuration.target), path, program.origin != "default")
                jobs.setdefault((configuration.build_key, program.hash), arguments)
        outcomes = dict(zip(jobs, builders.run(build_program, list(jobs.values())), strict=True))
        if any(_NO_SPACE in outcome.failure for outcome in outcomes.values()):
            raise MeasurementError(
                f"no space left on the disk of {self._spool}",
                hint="make room and give the same command again: it goes on",
                transient=True,
            )
        return outcomes

    def _judge(
        self,
        program: StoredProgram,
        library: Library,
        configuration: Configuration,
        turn: int,
        outcome: Outcome,
    ) -> None:
        """Keep a measurement or its failure; a program whose device was lost is tried again later."""
        if outcome.failure:
            key = (program.hash, configuration.name)
            if outcome.transient:
                self._tries[key] = self._tries.get(key, 0) + 1
                if self._tries[key] >= TRIES:
                    raise MeasurementError(
                        f"{configuration.name} cannot be reached: {outcome.failure}",
                        hint="when it is back, give the same command again: it goes on",
                        transient=True,
                    )
                logger.warning("%s: %s; once more", configuration.name, outcome.failure)
                return
            self._keep(StoredMeasurement(program.hash, configuration.name, turn, failure=outcome.failure))
            return
        run: TimedRun = outcome.value
        timing = run.timing
        self._keep(
            StoredMeasurement(
                program.hash, configuration.name, turn, timing.repeats_s, timing.latency_s, timing.spread,
                timing.number, timing.once, "", time.time(), library.build_s + run.elapsed_s - run.timed_s,
            )
        )  # fmt: skip

    def _keep(self, measurement: StoredMeasurement) -> None:
        self.store.add_measurements([measurement])
        self._step(not measurement.failure)

    def _builders(self) -> int:
        return self.settings.builders or len(available_cores())

    def _phase(self, name: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress.phase(name, done, total)

    def _step(self, ok: bool) -> None:
        if self._progress is not None:
            self._progress.step(ok)


def collect(
    sources: Sequence[str],
    configurations: Sequence[Configuration],
    out: str | Path,
    settings: CollectSettings | None = None,
    *,
    timers: Callable[[Configuration, CollectSettings], Timers] = LocalTimers,
    progress: Progress | None = None,
) -> Path:
    """Collect measurements into a data set folder, or go on with a collection that was stopped.

    Parameters
    ----------
    sources : sequence of str
        Networks as :func:`cdmpp.frontends.tasks.network_tasks` takes them. A folder may be extended by
        networks and schedules; seed and timing settings must stay.
    configurations : sequence of Configuration
    out : path
    settings : CollectSettings, optional
    timers, progress
        See :class:`Collector`.

    Returns
    -------
    Path
        The folder, with ``records.parquet``, ``repeats.parquet`` and a card.

    Raises
    ------
    CdmppError
        See :meth:`Collector.prepare` and :meth:`Collector.measure`.
    """
    from cdmpp.measure.dataset import write_dataset

    settings = settings or CollectSettings()
    limit = settings.timing.max_spread
    with Store(Path(out)) as store:
        collector = Collector(store, settings, configurations, timers=timers, progress=progress)
        try:
            collector.prepare(sources)
            collector.measure()
        except CdmppError:
            write_dataset(store, configurations, limit)
            raise
        return write_dataset(store, configurations, limit)
