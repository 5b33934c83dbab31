"""Export of scheduled CUDA programs as parts: sources and launches travel, TIR stays in ``home/``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cdmpp.data.measure.collect import Collector, check_flushing
from cdmpp.data.measure.cuda import require_nvcc
from cdmpp.data.measure.imports import import_tvm_alone
from cdmpp.data.measure.kit.launches import launches, work
from cdmpp.data.measure.kit.parts import HOME, Entry, write_parts
from cdmpp.data.measure.pools import WorkerPool
from cdmpp.data.measure.settings import CollectSettings, Progress
from cdmpp.data.measure.store import Store
from cdmpp.data.measure.targets import Configuration, describe
from cdmpp.errors import DataError, InvalidDeviceError, MeasurementError

KIND = "programs"
#: Flags with which TVM 0.27 calls nvcc (tvm.support.nvcc), without the architecture.
NVCC_FLAGS = (
    "--cubin",
    "-O3",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT162_OPERATORS__",
    "-U__CUDA_NO_BFLOAT162_CONVERSIONS__",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--use_fast_math",
    "--ptxas-options=-v,--register-usage-level=10,--warn-on-local-memory-usage",
)


def nvcc_flags(arch: str) -> list[str]:
    """Return the flags of nvcc for an architecture such as "sm_90"."""
    suffix = arch.removeprefix("sm_")
    return [*NVCC_FLAGS[:2], "-gencode", f"arch=compute_{suffix},code=sm_{suffix}", *NVCC_FLAGS[2:]]


def export_programs(
    sources: Sequence[str],
    configuration: Configuration,
    out: str | Path,
    settings: CollectSettings | None = None,
    *,
    part_mib: float = 20.0,
    tasks: int = 0,
    cubins: bool = False,
    progress: Progress | None = None,
    dims: Mapping[str, int] | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Lower, sample and export programs; a repeated call resumes the lowering of networks and the sampling.

    Parameters
    ----------
    sources, settings, progress, dims
        As for :func:`cdmpp.data.measure.collect.collect`.
    configuration : Configuration
        Of a CUDA target.
    out : path
        Job folder. It is complete once it has ``home/job.json``, which is written last.
    part_mib : float
        Largest size of a part file in MiB.
    tasks : int
        Largest number of tasks, taken from the networks in turn; 0: all.
    cubins : bool
        Compile here, with nvcc, so that the GPU machine needs no compiler.
    command : str
        Command that reproduces the job, for the card.

    Returns
    -------
    dict
        Content of ``home/job.json``.

    Raises
    ------
    InvalidDeviceError
        The target is not CUDA.
    MeasurementError
        The settings request a search, which needs measurements.
    MissingDependencyError
        ``cubins``, and nvcc is not installed.
    DataError
        No program can be exported, a task exceeds the size of a part, or the settings request a flush of a CPU's
        caches.
    CdmppError
        See :meth:`cdmpp.data.measure.collect.Collector.prepare`.
    """
    settings = settings or CollectSettings()
    if configuration.kind != "cuda":
        raise InvalidDeviceError(
            f"--standalone is for CUDA, not for {configuration.kind}", hint="use --target cuda:DEVICE"
        )
    if settings.tune:
        raise MeasurementError("a search for good schedules needs measurements", hint="omit --tune with --build-only")
    check_flushing(settings, [configuration])
    if cubins:
        require_nvcc()
    folder = Path(out)
    with Store(folder / HOME) as store:
        exporter = _Exporter(store, settings, configuration, tasks, progress)
        exporter.prepare(sources, dims)
        entries, failures = exporter.entries(cubins)
        if not entries:
            raise DataError(
                f"no program can be exported: {next(iter(failures.values()), 'there are none')}",
                hint="name other networks or another target",
            )
        job = write_parts(
            folder,
            {KIND: entries},
            device=configuration.name,
            part_mib=part_mib,
            about={KIND: exporter.about(failures, command)},
            settings={KIND: exporter.part_settings()},
        )
    return job


class _Exporter(Collector):
    """A collector that returns entries of parts and times nothing."""

    def __init__(
        self,
        store: Store,
        settings: CollectSettings,
        configuration: Configuration,
        tasks: int,
        progress: Progress | None,
    ) -> None:
        super().__init__(store, settings, (configuration,), progress=progress)
        self._configuration, self._tasks = configuration, tasks

    def _chosen(self, tasks: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        wanted = choose_tasks(self.store.tasks_by_network(), self._tasks)
        return [task for task in tasks if task[0] in wanted]

    def entries(self, cubins: bool) -> tuple[list[Entry], dict[str, str]]:
        """Return an entry for each program that can be lowered, and the reasons of the others by hash."""
        wanted = choose_tasks(self.store.tasks_by_network(), self._tasks)
        programs = [p for p in self.store.all_programs() if p.task in wanted]
        tasks = list(dict.fromkeys(p.task for p in programs))
        target = dict(self._configuration.target)
        limits = self.settings.worker(self.settings.build_limit_s)
        self._phase("lowering to CUDA", 0, len(programs))
        entries: list[Entry] = []
        failures: dict[str, str] = {}
        with WorkerPool(self._builders(), limits, import_tvm_alone) as pool:
            works = pool.run(work, [(self.store.task_program(task),) for task in tasks])
            counts = {task: outcome.value or {} for task, outcome in zip(tasks, works, strict=True)}
            outcomes = pool.run(launches, [(program.tvm_json, target, cubins) for program in programs])
            for program, outcome in zip(programs, outcomes, strict=True):
                if outcome.failure:
                    failures[program.hash] = outcome.failure
                else:
                    lowered = dict(outcome.value)
                    code = lowered.pop("code")
                    member = f"code/{sha256(code).hexdigest()[:16]}.{'cubin' if cubins else 'cu'}"
                    item = {"id": program.hash, "task": program.task, "origin": program.origin}
                    item |= {"cubin" if cubins else "source": member, **lowered, **counts[program.task]}
                    entries.append(Entry(item, {member: code}, group=program.task))
                self._step(not outcome.failure)
        return entries, failures

    def about(self, failures: Mapping[str, str], command: str) -> dict[str, Any]:
        """Return what the import of the results needs."""
        from importlib.metadata import version

        return {
            **describe(self._configuration),
            "names": list(self._configuration.names),
            "tvm": version("apache-tvm"),
            "seed": self.settings.seed,
            "command": command,
            "failures": dict(failures),
        }

    def part_settings(self) -> dict[str, Any]:
        """Return what compiling needs on the GPU machine."""
        arch = str(self._configuration.target["arch"])
        return {"arch": arch, "nvcc_flags": nvcc_flags(arch)}


def choose_tasks(networks: Mapping[str, Sequence[str]], count: int) -> set[str]:
    """Return at most ``count`` tasks, one of each network in turn, each network's in the order of their hashes.

    ``count`` = 0 means all tasks.
    """
    ordered = [sorted(tasks) for tasks in networks.values()]
    in_turn = [task for turn in zip_longest(*ordered) for task in turn if task is not None]
    chosen = list(dict.fromkeys(in_turn))
    return set(chosen[:count] if count else chosen)
