"""The collector: lowers, samples, builds and times programs until nothing is missing.

Every step is read from and written to the :class:`~cdmpp.data.measure.store.Store`, so that an interrupted collection
resumes with the same call. Building and timing alternate: a group of programs is built on all cores, then
timed while nothing else runs.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cdmpp.data.folder import STORE
from cdmpp.data.measure.building import Library, build_program, check_toolchain, import_tvm_alone
from cdmpp.data.measure.pools import Outcome, WorkerPool, WorkerSettings
from cdmpp.data.measure.sampling import (
    begin_search,
    continue_search,
    irregular_programs,
    prepare_sampler,
    prepare_search,
    sample_programs,
)
from cdmpp.data.measure.settings import Chooser, CollectSettings, ProgressListener
from cdmpp.data.measure.store import (
    FIRST,
    SECOND,
    WHOLE,
    Store,
    StoredMeasurement,
    StoredProgram,
    disk_full_error,
    is_disk_full,
)
from cdmpp.data.measure.targets import Configuration, describe
from cdmpp.data.measure.timers import LocalTimers, Timers, on_this_machine, time_in_passes
from cdmpp.data.measure.todo import is_scheduled_todo
from cdmpp.devices.host import available_cores
from cdmpp.errors import CdmppError, DataError, InvalidProgramError, MeasurementError, UnsupportedOperatorError
from cdmpp.programs.frontends.tasks import TaskList, is_file, network_name, network_tasks

logger = logging.getLogger(__name__)

#: Number of programs that are built, then timed.
GROUP = 64
#: Attempts for a program whose device was lost, before the collection stops.
TRIES = 3
LOG = "collect.log"
_LOWERING_LIMIT_S, _LOWERING_BYTES = 900.0, 16 * 2**30
_SAMPLING_LIMIT_S = 300.0


class Collector:
    """A collection in a folder.

    All configurations have one target kind; schedules are drawn for the first configuration of the folder. ``timers``
    makes the :class:`Timers` of a configuration, ``chooser`` adds schedules from a larger pool to the random ones.
    """

    def __init__(
        self,
        store: Store,
        settings: CollectSettings,
        configurations: Sequence[Configuration],
        *,
        timers: Callable[[Configuration, CollectSettings], Timers] = LocalTimers,
        progress: ProgressListener | None = None,
        chooser: Chooser | None = None,
    ) -> None:
        # Output of TVM and of crashes would disturb the progress bar.
        self.settings = settings.model_copy(update={"log": str(store.folder / LOG)})
        self.store, self.configurations = store, tuple(configurations)
        self._make_timers, self._progress, self._chooser = timers, progress, chooser
        self._spool = store.folder / "spool"
        self._tries: dict[tuple[str, str], int] = {}
        self._timers: dict[str, Timers] = {}

    def prepare(self, sources: Sequence[str], dims: Mapping[str, int] | None = None) -> None:
        """Lower the networks and draw the schedules that are missing.

        Of several networks, those that cannot be lowered are skipped: :meth:`Store.skipped` has the reasons. A device
        of the folder that was measured with other settings before is an error; completed steps stay.
        """
        first = self.configurations[0]
        self.store.settle(
            {"seed": self.settings.seed, "target_kind": first.kind, "timing": self.settings.timing.model_dump()}
        )
        self._same_devices()
        # Schedules are drawn for the first target of the folder, in any later order of the arguments: the
        # number of its cores bounds parallel loops.
        target = self.store.settings().get("sampling_target") or dict(first.target)
        chooser = self._chooser.description if self._chooser is not None else None
        self.store.settle({"sampling_target": target, "chooser": chooser, "irregular": self.settings.irregular})
        self._lower(list(dict.fromkeys(sources)), dims or {})
        tasks = self._chosen(self.store.unsampled(self.settings.schedules))
        if not tasks:
            return
        self._phase("sampling", 0, len(tasks))
        limits = self.settings.worker(_SAMPLING_LIMIT_S)
        # At most one worker per core, because each imports TVM.
        with WorkerPool(self._builders(), limits, prepare_sampler, (first.kind,)) as pool:
            drawn = self.settings.schedules + (self._chooser.pool if self._chooser else 0)
            arguments = [(text, digest, target, drawn, self.settings.seed) for digest, _, text in tasks]
            outcomes = pool.run(sample_programs, arguments)
            number = self.settings.irregular
            jobs = [(text, digest, number, self.settings.seed) for digest, _, text in tasks] if number else []
            irregular = dict(zip([digest for _, digest, *_ in jobs], pool.run(irregular_programs, jobs), strict=True))
            failed = []
            for (digest, name, text), outcome in zip(tasks, outcomes, strict=True):
                if outcome.failure:
                    logger.warning("task %s: no schedules: %s", name, outcome.failure)
                    failed.append((digest, text, outcome.failure))
                else:
                    programs = outcome.value
                    if self._chooser is not None:
                        programs = self._chooser(programs, self.settings.schedules)
                    further = irregular.get(digest, Outcome([]))
                    if further.failure:
                        logger.warning("task %s: no irregular schedules: %s", name, further.failure)
                    mixed = [p for pair in zip_longest(programs, further.value or ()) for p in pair if p is not None]
                    self.store.add_programs(digest, mixed, self.settings.schedules)
                self._step(not outcome.failure)
            # A task without a design space still has its default.
            defaults = pool.run(sample_programs, [(text, digest, target, 0, 0) for digest, text, _ in failed])
            for (digest, _, reason), outcome in zip(failed, defaults, strict=True):
                self.store.add_programs(digest, outcome.value or [], self.settings.schedules, failure=reason)

    def _chosen(self, tasks: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        """Return the tasks (hash, name, TVM JSON) to sample: all of them."""
        return tasks

    def measure(self) -> None:
        """Search, build and time what is missing, including the second measurements for the noise floor.

        If the devices are lost or the disk is full, a MeasurementError is raised, and the measurements stay: the same
        call resumes.
        """
        names = [c.name for c in self.configurations]
        shutil.rmtree(self._spool, ignore_errors=True)
        searched = not self.settings.tune or not self.store.untuned(self.settings.tune)
        if searched and not self.store.missing(names, 1) and not self._due():
            # Nothing is left to do: starting workers, which import TVM, would take seconds.
            self._phase("measuring", len(self.store.measured(names, FIRST)), self.store.count_programs() * len(names))
            return
        self._spool.mkdir()
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self._spool, True)
            self._pool = stack.enter_context(self._build_pool())
            self._pool.start()
            for configuration in self.configurations:
                timers = self._timers[configuration.name] = self._make_timers(configuration, self.settings)
                stack.callback(timers.close)
            if self.settings.tune:
                self._tune()
            total = self.store.count_programs() * len(names)
            self._phase("measuring", len(self.store.measured(names, FIRST)), total)
            while group := self.store.missing(names, GROUP):
                self._first(group, names)
                due = self._due(time.time() - self.settings.repeat_gap_s)
                if len(due) >= GROUP:
                    self._again(due)
            self._repeat_rest()

    def _tune(self) -> None:
        """Search each task for good schedules, measured on the first configuration."""
        first, trials = self.configurations[0], self.settings.tune
        tasks = self.store.untuned(trials)
        if not tasks:
            return
        self._phase("searching (programs)", 0, len(tasks) * trials)
        one_thread = {"OMP_NUM_THREADS": "1"}
        limits = self.settings.worker(_SAMPLING_LIMIT_S, environment=one_thread)
        with WorkerPool(1, limits, prepare_search, (first.kind,)) as pool:
            for digest, name, text in tasks:
                try:
                    candidates = pool.call(begin_search, text, digest, dict(first.target), trials, self.settings.seed)
                    while candidates:
                        self.store.add_programs(digest, candidates, None)
                        programs = self.store.programs({p.hash for p in candidates})
                        self._first(programs, [first.name])
                        known = self.store.latencies([p.hash for p in candidates], first.name)
                        candidates = pool.call(continue_search, [known.get(p.hash) for p in candidates])
                except MeasurementError as error:
                    if error.transient:
                        raise
                    logger.warning("task %s: the search ended early: %s", name, error)
                self.store.tuned(digest, trials)

    def _same_devices(self) -> None:
        """Raise unless each device has the same target, threads and cores as in earlier calls."""
        known = self.store.devices()
        for configuration in self.configurations:
            before, now = known.get(configuration.name, {}), describe(configuration)
            for what in ("target", "threads", "affinity"):
                if before.get(what, now[what]) != now[what]:
                    raise DataError(
                        f"{configuration.name} was measured in {self.store.folder} with {what} "
                        f"{before[what]}, not {now[what]}",
                        hint="use the same --target on the same cores to resume, or another --out",
                    )
        self.store.remember_devices({c.name: describe(c) for c in self.configurations})

    def _lower(self, given: Sequence[str], dims: Mapping[str, int]) -> None:
        selections = [source for source in given if is_scheduled_todo(Path(source))]
        for selection in selections:
            if not (self.store.folder / STORE).samefile(Path(selection) / STORE):
                self.store.take_programs(Path(selection) / STORE)
        names = {network_name(source, dims): source for source in given if source not in selections}
        digests = {
            f"file {name}": sha256(p.read_bytes()).hexdigest()
            for name, source in names.items()
            if is_file(source) and (p := Path(source)).is_file()
        }
        self.store.settle(digests)
        lowered = self.store.tasks_by_network()
        known = {name for name, unsupported in self.store.networks().items() if name in lowered or not unsupported}
        sources = {name: source for name, source in names.items() if name not in known}
        if not sources:
            return
        self._phase("lowering", 0, len(sources))
        limits = WorkerSettings(_LOWERING_LIMIT_S, _LOWERING_BYTES, log=self.settings.log)
        with WorkerPool(1, limits) as pool:
            failed: dict[str, CdmppError] = {}
            for name, source in sources.items():
                try:
                    self.store.add_network(name, pool.call(network_tasks, source, dims))
                except (UnsupportedOperatorError, InvalidProgramError, MeasurementError) as error:
                    if not (isinstance(error, UnsupportedOperatorError) or Path(source).is_file()):
                        raise
                    failed[name] = error
                self._step(name not in failed)
        if len(failed) == len(names):
            raise next(iter(failed.values()))
        for name, failure in failed.items():
            logger.warning("%s is skipped: %s", name, failure.message)
            self.store.add_network(name, TaskList(name, (), ((WHOLE, failure.message),)))

    def _repeat_rest(self) -> None:
        """Measure the last programs again, once their first measurements are old enough."""
        due = self._due()
        if not due:
            return
        wait_s = max(due.values()) + self.settings.repeat_gap_s - time.time()
        if wait_s > 0:
            self._phase(f"second measurements, in {math.ceil(wait_s)} s", 0, len(due))
            time.sleep(wait_s)
        self._phase("second measurements", 0, len(due))
        while due:  # once, unless boards were lost
            self._again(due)
            due = self._due()

    def _due(self, before: float = math.inf) -> dict[tuple[str, str], float]:
        """Return the (program, device) that need a second measurement and had the first before ``before``; and when."""
        first = self.store.once_measured([c.name for c in self.configurations])
        # The hash decides, so that the same programs are measured twice on every device.
        limit = self.settings.repeat_share * 2**32
        return {(p, d): at for p, d, at in first if at <= before and int(p[:8], 16) < limit}

    def _first(self, programs: Sequence[StoredProgram], names: Sequence[str]) -> None:
        """Measure programs for the first time on the named configurations, where they are missing."""
        pairs = {(p.hash, name) for p in programs for name in names} - self.store.measured(names, FIRST)
        self._group(programs, pairs, FIRST, names)

    def _again(self, pairs: Collection[tuple[str, str]]) -> None:
        """Measure (program, device) for the second time."""
        hashes = sorted({program for program, _ in pairs})
        names = [c.name for c in self.configurations]
        for start in range(0, len(hashes), GROUP):
            programs = self.store.programs(hashes[start : start + GROUP])
            self._group(programs, pairs, SECOND, names)

    def _group(
        self, programs: Sequence[StoredProgram], pairs: Collection[tuple[str, str]], turn: int, names: Sequence[str]
    ) -> None:
        """Build programs for the named configurations, then time the pairs, one configuration after the other."""
        chosen = [c for c in self.configurations if c.name in names]
        wanted = {name: [p for p in programs if (p.hash, name) in pairs] for name in names}
        libraries = self._build(wanted, chosen)
        # Starting workers import TVM, which would disturb the timing.
        self._pool.ready()
        for timers in self._timers.values():
            timers.ready()
        for configuration in chosen:
            ready: list[tuple[StoredProgram, Library]] = []
            for program in wanted[configuration.name]:
                outcome = libraries[configuration.build_key, program.hash]
                if outcome.failure:
                    failure = f"build: {outcome.failure}"
                    self._keep(StoredMeasurement(program.hash, configuration.name, turn, failure=failure))
                else:
                    ready.append((program, outcome.value))
            timers, built = self._timers[configuration.name], [library for _, library in ready]
            outcomes = time_in_passes(timers, built, self.settings.timing)
            for (program, library), outcome in zip(ready, outcomes, strict=True):
                self._store_outcome(program, library, configuration, turn, outcome)
        for path in self._spool.iterdir():
            path.unlink(missing_ok=True)

    def _build(
        self, wanted: dict[str, list[StoredProgram]], chosen: Sequence[Configuration]
    ) -> dict[tuple[str, str], Outcome]:
        """Return libraries by build key and program; configurations with equal keys share them."""
        jobs: dict[tuple[str, str], tuple[Any, ...]] = {}
        keys = [c.build_key for c in chosen]
        for configuration in chosen:
            for program in wanted[configuration.name]:
                path = str(self._spool / f"{program.hash}-{keys.index(configuration.build_key)}.so")
                arguments = (program.tvm_json, dict(configuration.target), path)
                jobs.setdefault((configuration.build_key, program.hash), arguments)
        outcomes = dict(zip(jobs, self._pool.run(build_program, list(jobs.values())), strict=True))
        if any(outcome.failure for outcome in outcomes.values()) and is_disk_full(self._spool):
            raise disk_full_error(self._spool)
        return outcomes

    def _build_for_export(
        self,
        pairs: Sequence[tuple[StoredProgram, str]],
        build: Callable[..., Any],
        arguments: Callable[[StoredProgram, str], Sequence[Any]],
        facts: Callable[[StoredProgram, str, Outcome], tuple[dict[str, Any], bytes]],
    ) -> dict[tuple[str, str], tuple[dict[str, Any], bytes]]:
        """Build the missing pairs of program and target in workers; return what ``facts`` makes of all outcomes."""
        known = self.store.built()
        missing = [(program, target) for program, target in pairs if (program.hash, target) not in known]
        self._phase("building", len(pairs) - len(missing), len(pairs))
        with self._build_pool() as pool:
            for start in range(0, len(missing), GROUP):
                group = missing[start : start + GROUP]
                for pair, outcome in zip(group, pool.run(build, [arguments(*p) for p in group]), strict=True):
                    self.store.add_built(pair[0].hash, pair[1], *facts(*pair, outcome))
                    self._step(not outcome.failure)
        return self.store.built()

    def _store_outcome(
        self, program: StoredProgram, library: Library, configuration: Configuration, turn: int, outcome: Outcome
    ) -> None:
        """Store a measurement or its failure; a program whose device was lost is tried again later."""
        key = (program.hash, configuration.name)
        if not outcome.failure:
            self._keep(StoredMeasurement.of_run(*key, turn, library, outcome.value))
        elif not outcome.transient:
            self._keep(StoredMeasurement(*key, turn, failure=outcome.failure))
        else:
            self._tries[key] = self._tries.get(key, 0) + 1
            if self._tries[key] >= TRIES:
                raise MeasurementError(
                    f"{configuration.name} cannot be reached: {outcome.failure}",
                    hint="once it is back, repeat the same command to resume",
                    transient=True,
                )
            logger.warning("%s: %s; trying again", configuration.name, outcome.failure)

    def _keep(self, measurement: StoredMeasurement) -> None:
        self.store.add_measurements([measurement])
        self._step(not measurement.failure)

    def _builders(self) -> int:
        return self.settings.builders or len(available_cores())

    def _build_pool(self) -> WorkerPool:
        limits = self.settings.worker(self.settings.build_limit_s)
        return WorkerPool(self._builders(), limits, import_tvm_alone)

    def _phase(self, name: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress.phase(name, done, total)

    def _step(self, ok: bool) -> None:
        if self._progress is not None:
            self._progress.step(ok)


def check_settings(
    settings: CollectSettings, configurations: Sequence[Configuration], *, measures: bool = True
) -> None:
    """Raise if a collection cannot do what its settings request: flush the caches of another device than a CPU, or
    search without measurements."""
    if settings.tune and not measures:
        raise MeasurementError("a search for good schedules needs measurements", hint="omit --tune with --build-only")
    if settings.timing.flush_cache and any(c.kind != "llvm" for c in configurations):
        raise DataError("only a CPU's caches can be flushed", hint="omit --flush-cache")


def collect(
    sources: Sequence[str],
    configurations: Sequence[Configuration],
    out: str | Path,
    settings: CollectSettings | None = None,
    *,
    timers: Callable[[Configuration, CollectSettings], Timers] = LocalTimers,
    progress: ProgressListener | None = None,
    chooser: Chooser | None = None,
    dims: Mapping[str, int] | None = None,
    command: str = "",
) -> Path:
    """Collect measurements into a dataset folder, or resume an interrupted collection; returns the folder, with
    ``records.parquet``, ``repeats.parquet`` and a card.

    ``sources`` are networks as in :func:`cdmpp.programs.frontends.tasks.network_tasks`, or a folder of ``cdmpp select
    --backend tvm``. A folder may be extended by networks and schedules; seed and timing settings must stay the same.
    ``dims`` has the sizes of dynamic dimensions of ONNX models; ``command`` reproduces the data, for the card. The
    other parameters and the errors are those of :class:`Collector`.
    """
    from cdmpp.data.measure.dataset import write_dataset

    settings = settings or CollectSettings()
    check_settings(settings, configurations)
    for configuration in configurations:
        check_toolchain(configuration.target)
    if timers is LocalTimers:  # identifies the GPU and checks its driver
        configurations = [c if c.kind == "llvm" else on_this_machine(c, settings) for c in configurations]
    with Store(Path(out)) as store:
        collector = Collector(store, settings, configurations, timers=timers, progress=progress, chooser=chooser)
        try:
            collector.prepare(sources, dims)
        except CdmppError:
            # Nothing was measured: records and card stay unchanged, and an empty folder forgets its seed.
            store.forget_settings()
            raise
        try:
            collector.measure()
        except CdmppError:
            write_dataset(store, configurations, settings.timing, command)
            raise
        return write_dataset(store, configurations, settings.timing, command)
