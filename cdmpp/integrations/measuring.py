"""Builder and runner for MetaSchedule's tuners, with the collector's worker processes.

TVM's LocalBuilder and LocalRunner import a package of tensor intrinsics in every worker, which takes half a
minute. This module uses long-lived workers. Measurements are stored on disk by structural hash: a program is
built and timed once, and a killed search finds its measurements again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from cdmpp.data.measure.building import Library, build_program, check_toolchain, import_tvm_alone
from cdmpp.data.measure.pools import Outcome, WorkerPool
from cdmpp.data.measure.sampling import scheduled_program
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.store import FIRST, Store, StoredMeasurement
from cdmpp.data.measure.targets import Configuration, describe
from cdmpp.data.measure.timers import LocalTimers
from cdmpp.devices.host import available_cores
from cdmpp.errors import MeasurementError
from cdmpp.integrations.needed import derived_object, ms, tvm

#: Statistic of the repeats that is the latency: the median is robust against one slow repeat, the least also
#: against a busy machine.
Statistic = Literal["median", "least"]


@dataclass(frozen=True)
class Trial:
    """One measured program of a search."""

    hash: str  # structural hash of the scheduled PrimFunc
    latency_s: float | None  # None if it failed
    cost_s: float  # wall-clock seconds of building, loading and timing, possibly in an earlier search
    failure: str = ""


class Workbench:
    """A folder of measurements, and the workers that extend it; a context manager.

    Parameters
    ----------
    folder : path
        It is kept; a later search with the same folder reuses its measurements.
    configuration : Configuration
        Configuration of this machine (:func:`cdmpp.data.measure.targets.configurations`).
    settings : CollectSettings, optional
        Limits and timing; a folder has one timing.
    statistic : {"median", "least"}
        Statistic of the repeats that is the latency.

    Raises
    ------
    DataError
        On entering: another process uses the folder, or it has other settings.
    MissingDependencyError
        On entering: there is no linker.

    Attributes
    ----------
    asked : list of str
        Hashes of all programs passed to the builder, in order.

    Examples
    --------
    >>> with Workbench("trials", configurations(("native@1",))[0]) as bench:  # doctest: +SKIP
    ...     ms.tune_tir(module, bench.target, work_dir, 64, builder=bench.builder, runner=bench.runner)
    """

    def __init__(
        self,
        folder: str | Path,
        configuration: Configuration,
        settings: CollectSettings | None = None,
        *,
        statistic: Statistic = "median",
    ) -> None:
        self.folder, self.configuration, self.statistic = Path(folder), configuration, statistic
        chosen = settings or CollectSettings()
        self.settings = chosen.model_copy(update={"log": chosen.log or str(self.folder / "workers.log")})
        self.asked: list[str] = []
        self._known: dict[str, Trial] = {}
        self._libraries: dict[str, Library] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        check_toolchain(self.configuration.target)
        with ExitStack() as stack:
            self._store = stack.enter_context(Store(self.folder))
            self._store.settle({"timing": self.settings.timing.model_dump(), "statistic": self.statistic})
            self._store.remember_devices({self.configuration.name: describe(self.configuration)})
            for measurement in self._store.measurements(FIRST):
                if measurement.device == self.configuration.name:
                    self._remember(measurement)
            self._spool = Path(tempfile.mkdtemp(prefix="cdmpp-build-"))
            stack.callback(shutil.rmtree, self._spool, True)
            limits = self.settings.worker(self.settings.build_limit_s)
            count = self.settings.builders or len(available_cores())
            self._builders = stack.enter_context(WorkerPool(count, limits, import_tvm_alone))
            self._builders.start()
            self._timers = LocalTimers(self.configuration, self.settings)
            stack.callback(self._timers.close)
            self._stack = stack.pop_all()
        self.builder, self.runner = _Builder(self), _Runner(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __len__(self) -> int:
        """Number of measured programs, including failed ones."""
        return len(self._known)

    @property
    def target(self) -> Any:
        """The configuration's target as a TVM object."""
        return tvm.target.Target(dict(self.configuration.target))

    def trial(self, digest: str) -> Trial:
        """Return the measurement of the program with this hash; KeyError if there is none."""
        return self._known[digest]

    def build(self, modules: Sequence[Any], targets: Sequence[Any]) -> list[tuple[str, str]]:
        """Return artifact path and reason of failure of each module; measured programs are not built again."""
        programs = [scheduled_program(module, "tuned") for module in modules]
        paths: dict[str, Path] = {}
        jobs: dict[str, tuple[Any, ...]] = {}
        artifacts = []
        for program, target in zip(programs, targets, strict=True):
            # One folder per trial, because the tuner removes it afterwards.
            path = Path(tempfile.mkdtemp(dir=self._spool)) / f"{program.hash}.so"
            artifacts.append(path)
            if program.hash not in self._known and program.hash not in jobs:
                paths[program.hash] = path
                jobs[program.hash] = (program.tvm_json, json.loads(str(target)), str(path))
        outcomes = dict(zip(jobs, self._builders.run(build_program, list(jobs.values())), strict=True))
        for digest, outcome in outcomes.items():
            if outcome.failure:
                self._fail(digest, "build: ", outcome.failure, self.settings.build_limit_s)
            else:
                self._libraries[digest] = outcome.value
        self.asked += [program.hash for program in programs]
        known = self._known
        return [
            (str(path), known[p.hash].failure if p.hash in known else "")
            for p, path in zip(programs, artifacts, strict=True)
        ]

    def run(self, artifacts: Sequence[str]) -> list[Trial]:
        """Time the artifacts of :meth:`build`, one after the other, while nothing is built."""
        digests = [Path(path).stem for path in artifacts]
        wanted = [d for d in dict.fromkeys(digests) if d not in self._known]
        if wanted:
            # Starting workers import TVM, which would disturb the timing.
            self._builders.ready()
            self._timers.ready()
            libraries = [self._libraries.pop(d) for d in wanted]
            outcomes = self._timers.time(libraries)
            for digest, library, outcome in zip(wanted, libraries, outcomes, strict=True):
                self._keep(digest, library, outcome)
        return [self._known[d] for d in digests]

    def _keep(self, digest: str, library: Library, outcome: Outcome) -> None:
        if outcome.failure:
            if outcome.transient:
                raise MeasurementError(
                    f"{self.configuration.name} cannot be reached: {outcome.failure}",
                    hint="repeat the same call to resume with the measurements so far",
                    transient=True,
                )
            self._fail(digest, "", outcome.failure, self.settings.time_limit_s)
            return
        name = self.configuration.name
        self._add(StoredMeasurement.of_run(digest, name, FIRST, library, outcome.value))

    def _fail(self, digest: str, step: str, why: str, limit_s: float) -> None:
        # The duration of other failures is unknown, but small.
        cost_s = limit_s if why.startswith("timeout") else 0.0
        name = self.configuration.name
        self._add(StoredMeasurement(digest, name, FIRST, failure=f"{step}{why}", overhead_s=cost_s))

    def _add(self, measurement: StoredMeasurement) -> None:
        self._store.add_measurements([measurement])
        self._remember(measurement)

    def _remember(self, measurement: StoredMeasurement) -> None:
        latency_s = measurement.latency_s
        if latency_s is not None and self.statistic == "least":
            latency_s = min(measurement.repeats_s)
        cost_s = measurement.overhead_s + (measurement.number or 0) * sum(measurement.repeats_s)
        self._known[measurement.program] = Trial(measurement.program, latency_s, cost_s, measurement.failure)


@derived_object
class _Builder(ms.builder.PyBuilder):  # type: ignore[misc]
    """Builder of a workbench."""

    def __init__(self, bench: Workbench) -> None:
        super().__init__()
        self.bench = bench

    def build(self, build_inputs: list[Any]) -> list[Any]:
        """Return one result per input, in order."""
        built = self.bench.build([i.mod for i in build_inputs], [i.target for i in build_inputs])
        return [
            ms.builder.BuilderResult(None, failure) if failure else ms.builder.BuilderResult(path, None)
            for path, failure in built
        ]


@derived_object
class _Done(ms.runner.PyRunnerFuture):  # type: ignore[misc]
    """A completed result."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> Any:
        """Return the seconds of the run, or the reason of failure."""
        trial = self.trial
        if trial.latency_s is None:
            return ms.runner.RunnerResult(None, trial.failure)
        return ms.runner.RunnerResult([trial.latency_s], None)


@derived_object
class _Runner(ms.runner.PyRunner):  # type: ignore[misc]
    """Runner of a workbench."""

    def __init__(self, bench: Workbench) -> None:
        super().__init__()
        self.bench = bench

    def run(self, runner_inputs: list[Any]) -> list[Any]:
        """Return one completed future per input, in order."""
        return [_Done(trial) for trial in self.bench.run([i.artifact_path for i in runner_inputs])]
