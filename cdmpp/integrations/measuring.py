"""Builder and runner for MetaSchedule's tuners, over the collector's worker processes.

TVM's LocalBuilder and LocalRunner import a tensor-intrinsics package of half a minute into every worker. Here
long-lived workers build and time; what was measured is kept on disk by structural hash, so that a program is
built and timed once, whoever proposes it, and a search that was killed finds its measurements again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from cdmpp.errors import MeasurementError
from cdmpp.integrations.needed import derived_object, ms, tvm
from cdmpp.measure.building import Library, build_program, check_toolchain, prepare_builder
from cdmpp.measure.pools import Outcome, WorkerPool
from cdmpp.measure.sampling import scheduled_program
from cdmpp.measure.settings import CollectSettings
from cdmpp.measure.store import FIRST, Store, StoredMeasurement
from cdmpp.measure.targets import Configuration, available_cores, describe
from cdmpp.measure.timers import LocalTimers
from cdmpp.measure.timing import TimedRun

#: Which of a program's repeats is its latency: the median resists one slow repeat, the least also a machine
#: that is busy with other things.
Statistic = Literal["median", "least"]


@dataclass(frozen=True)
class Trial:
    """One measured program of a search.

    Attributes
    ----------
    hash : str
        Structural hash of the scheduled PrimFunc.
    latency_s : float or None
        None when it failed.
    cost_s : float
        Wall-clock seconds of building, loading and timing it, whenever that was.
    failure : str
    """

    hash: str
    latency_s: float | None
    cost_s: float
    failure: str = ""


class Workbench:
    """A folder of measurements with the workers that add to it; a context manager.

    Parameters
    ----------
    folder : path
        Kept; the same folder goes on with what it has.
    configuration : Configuration
        Of this machine (:func:`cdmpp.measure.targets.configurations`).
    settings : CollectSettings, optional
        Limits and timing; timing is part of the folder.
    statistic : {"median", "least"}
        Which of a program's repeats is its latency.

    Raises
    ------
    DataError
        On entering: another process is at work in the folder, or it was begun with other settings.
    MissingDependencyError
        On entering: no linker.

    Attributes
    ----------
    asked : list of str
        Hashes of the programs that were handed to the builder, in order, whether known or not.

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
            for found in self._store.measurements(FIRST):
                if found.device == self.configuration.name:
                    self._remember(found)
            self._spool = Path(tempfile.mkdtemp(prefix="cdmpp-build-"))
            stack.callback(shutil.rmtree, self._spool, True)
            limits = self.settings.worker(self.settings.build_limit_s)
            count = self.settings.builders or len(available_cores())
            self._builders = stack.enter_context(WorkerPool(count, limits, prepare_builder))
            self._builders.start()
            self._timers = LocalTimers(self.configuration, self.settings)
            stack.callback(self._timers.close)
            self._stack = stack.pop_all()
        self.builder, self.runner = _Builder(self), _Runner(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __len__(self) -> int:
        """Programs that were measured, failed ones included."""
        return len(self._known)

    @property
    def target(self) -> Any:
        """The configuration's target as TVM's object."""
        return tvm.target.Target(dict(self.configuration.target))

    def trial(self, digest: str) -> Trial:
        """The measurement of a program of this hash; KeyError where there is none."""
        return self._known[digest]

    def build(self, modules: Sequence[Any], targets: Sequence[Any]) -> list[tuple[str, str]]:
        """Artifact path and reason of failure of each module; what is known is not built again."""
        programs = [scheduled_program(module, "tuned") for module in modules]
        paths: dict[str, Path] = {}
        jobs: dict[str, tuple[Any, ...]] = {}
        found = []
        for program, target in zip(programs, targets, strict=True):
            # A folder of its own for each trial: the tuner removes it when it is done.
            path = Path(tempfile.mkdtemp(dir=self._spool)) / f"{program.hash}.so"
            found.append(path)
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
            for p, path in zip(programs, found, strict=True)
        ]

    def run(self, artifacts: Sequence[str]) -> list[Trial]:
        """Time what :meth:`build` made, one after the other; nothing is built meanwhile."""
        digests = [Path(path).stem for path in artifacts]
        wanted = [d for d in dict.fromkeys(digests) if d not in self._known]
        if wanted:
            # Workers that start import TVM: not while something is timed.
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
                    hint="the same call goes on with what was measured",
                    transient=True,
                )
            self._fail(digest, "", outcome.failure, self.settings.time_limit_s)
            return
        run: TimedRun = outcome.value
        timing = run.timing
        self._add(
            StoredMeasurement(
                digest,
                self.configuration.name,
                FIRST,
                timing.repeats_s,
                timing.latency_s,
                timing.spread,
                timing.number,
                timing.once,
                "",
                time.time(),
                library.build_s + run.elapsed_s - run.timed_s,
            )
        )

    def _fail(self, digest: str, step: str, why: str, limit_s: float) -> None:
        # How long the others took nobody knows; it is not much.
        cost_s = limit_s if why.startswith("timeout") else 0.0
        name = self.configuration.name
        self._add(StoredMeasurement(digest, name, FIRST, failure=f"{step}{why}", overhead_s=cost_s))

    def _add(self, found: StoredMeasurement) -> None:
        self._store.add_measurements([found])
        self._remember(found)

    def _remember(self, found: StoredMeasurement) -> None:
        latency_s = found.latency_s
        if latency_s is not None and self.statistic == "least":
            latency_s = min(found.repeats_s)
        cost_s = found.overhead_s + (found.number or 0) * sum(found.repeats_s)
        self._known[found.program] = Trial(found.program, latency_s, cost_s, found.failure)


@derived_object
class _Builder(ms.builder.PyBuilder):  # type: ignore[misc]
    """Builds in the bench's workers."""

    def __init__(self, bench: Workbench) -> None:
        super().__init__()
        self.bench = bench

    def build(self, build_inputs: list[Any]) -> list[Any]:
        """One result for each input, in order."""
        built = self.bench.build([i.mod for i in build_inputs], [i.target for i in build_inputs])
        return [
            ms.builder.BuilderResult(None, failure) if failure else ms.builder.BuilderResult(path, None)
            for path, failure in built
        ]


@derived_object
class _Done(ms.runner.PyRunnerFuture):  # type: ignore[misc]
    """A result that is there."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial

    def done(self) -> bool:
        """Always."""
        return True

    def result(self) -> Any:
        """The run's seconds, or why there are none."""
        trial = self.trial
        if trial.latency_s is None:
            return ms.runner.RunnerResult(None, trial.failure)
        return ms.runner.RunnerResult([trial.latency_s], None)


@derived_object
class _Runner(ms.runner.PyRunner):  # type: ignore[misc]
    """Times in the bench's worker."""

    def __init__(self, bench: Workbench) -> None:
        super().__init__()
        self.bench = bench

    def run(self, runner_inputs: list[Any]) -> list[Any]:
        """One future for each input, in order; all are done."""
        return [_Done(trial) for trial in self.bench.run([i.artifact_path for i in runner_inputs])]
