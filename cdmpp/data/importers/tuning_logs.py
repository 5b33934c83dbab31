"""Importers of tuning logs: each row of a search with Ansor or MetaSchedule becomes a scheduled program.

A table has a device, a workload, a schedule (transform steps or a trace) and a latency per row. Building takes 30 to
50 ms a program; a cache keeps what earlier runs built (:mod:`cdmpp.data.importers.built`). Rows without a program have
a reason, and the column ``inexpressible`` says why.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from cdmpp.data.assemble import CODE, Reasons
from cdmpp.data.importers import ansor
from cdmpp.data.importers.ansor import ansor_program
from cdmpp.data.importers.base import Importer, joined
from cdmpp.data.importers.built import BuiltPrograms, ProgramCache
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import RawTable, read_raw
from cdmpp.data.table import Float64, Int64, MeasurementTable
from cdmpp.errors import DataError
from cdmpp.programs.frontends.metaschedule import metaschedule_program
from cdmpp.programs.program import TensorProgram

#: TVM's ``MeasureErrorNo``; 0 is a success.
_ERRORS = (
    *("", "instantiation error", "host compilation error", "device compilation error", "run-time error"),
    *("wrong result", "build time-out", "run time-out", "unknown error"),
)
#: Schedules of a task and device that are kept whatever their hash.
_FASTEST = 2
#: Behind it stands what is wrong, without the workload.
_REPLAY = "cannot be replayed: "
_HASH_KEY = re.compile(r"[0-9a-f]{32}")


class LogTask(NamedTuple):
    """A workload of a log, with its epilogue."""

    key: str  # text that determines a program together with the schedule
    op: str  # name for reports
    build: Callable[[str], TensorProgram]  # builds the program of a schedule
    name: str = ""  # the task; "": the hash of the program of the empty schedule
    refusal: str = ""  # why its rows have no program


ReadTasks: TypeAlias = Callable[[RawTable, str], tuple[Labels, list[LogTask]]]


@dataclass(frozen=True)
class TuningLogImporter(Importer):
    """Importer of tables of one tuner."""

    schedule: str = ""  # column with the schedule
    # Task of each row, by its number, and the tasks. Takes the table and the epilogue of rows that state none.
    read_tasks: ReadTasks = lambda raw, epilogue: (Labels.of([]), [])

    def table(self, raw: RawTable, per_task: int | None = None, epilogue: str = "") -> MeasurementTable:
        """Build the programs and the checked table.

        ``per_task``: schedules to keep of a task and device: the two fastest, and those with the smallest hashes, the
        same ones on every device. Rows without a latency are left out. Default: every row is kept. ``epilogue``: that
        of the rows that state none. TVM is needed only for programs that are not in the cache.
        """
        number, tasks = self.read_tasks(raw, epilogue)
        schedules, devices, latency_s = raw.labels(self.schedule), raw.labels("device"), raw.latency_s()
        kept: Mask = np.ones(len(raw), dtype=np.bool_)
        if per_task is not None:
            kept = _few(number, devices, schedules, latency_s, per_task)
        key: Int64 = np.full(len(raw), -1, dtype=np.int64)
        reason: Reasons = np.zeros(len(raw), dtype=np.int32)
        why, programs = np.full(len(raw), "", dtype=object), BuiltPrograms()
        for code, task in enumerate(tasks):
            rows = np.flatnonzero(kept & (number.codes == code))
            cache, name, refusal = ProgramCache(task.key, task.build), task.name, task.refusal
            if len(rows) and not name and not refusal:
                name, _, refusal = cache.get("")
            if refusal:
                reason[rows], why[rows] = CODE["unknown_workload"], refusal
            for schedule in np.unique(schedules.codes[rows]).tolist() if name else ():
                same, built = rows[schedules.codes[rows] == schedule], cache.get(schedules.names[schedule])
                if built.refusal:
                    reason[same], why[same] = CODE["inexpressible_schedule"], built.refusal.rpartition(_REPLAY)[2]
                else:
                    key[same] = programs.add(built, name)
            cache.write()
        errors = raw.ints("error_no").values
        table = programs.table(
            self,
            raw,
            key,
            reason,
            Labels(number.codes, tuple(task.op for task in tasks)).map(str),
            "search",
            latency_s=np.where(errors == 0, latency_s, np.nan),
            failure=Labels(np.clip(errors, 0, len(_ERRORS) - 1).astype(np.int32), _ERRORS),
            provenance={"collection": raw.labels("source"), "inexpressible": Labels.of(why.tolist())},
        )
        return table if per_task is None else table.select(kept)


def _few(number: Labels, devices: Labels, schedules: Labels, latency_s: Float64, per_task: int) -> Mask:
    """Mask of the rows to keep: of each task and device the fastest and those with the smallest hashes."""
    digests = [int.from_bytes(hashlib.sha256(s.encode()).digest()[:6], "big") for s in schedules.names]
    rank = np.array(digests, dtype=np.float64)[schedules.codes]
    group = number.codes.astype(np.int64) * len(devices.names) + devices.codes
    kept: Mask = np.zeros(len(number), dtype=np.bool_)
    with np.errstate(invalid="ignore"):
        usable = np.flatnonzero(latency_s > 0)
    order = usable[np.lexsort((latency_s[usable], group[usable]))]
    rank[order[_place(group[order]) < _FASTEST]] = -1.0
    order = usable[np.lexsort((rank[usable], group[usable]))]
    kept[order[_place(group[order]) < per_task]] = True
    return kept


def _place(group: Int64) -> Int64:
    """Place of each row within its group; equal groups are adjacent."""
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return np.arange(len(group)) - np.repeat(starts, np.diff(starts, append=len(group)))


# -- Ansor ----------------------------------------------------------------------------------------------------------
def _ansor_tasks(raw: RawTable, epilogue: str) -> tuple[Labels, list[LogTask]]:
    stated = raw.labels("epilogue").map(lambda text: text or epilogue)
    number, parts = joined(raw.labels("workload"), stated)
    return number, [_ansor_task(*part) for part in parts]


def _ansor_task(workload: str, epilogue: str) -> LogTask:
    def build(steps: str) -> TensorProgram:
        return ansor_program(workload, steps, epilogue=epilogue)

    try:
        name, *arguments = json.loads(workload)
        text = json.dumps([name, *arguments])
    except (ValueError, TypeError):
        return LogTask(workload, "", build, refusal="the line is not a record of Ansor")
    registered = ansor.registered(str(name))
    key = f"ansor\0{text}\0{epilogue}\0{registered}"
    if registered is not None:
        return LogTask(key, str(name), build, f"{text} {epilogue}".strip())
    if _HASH_KEY.fullmatch(str(name)):
        refusal = (
            f"workload {name} is the hash of a graph, as in TenSet's logs. Its task file is a pickle of former TVM, "
            "which is not read: register the hash with --workloads"
        )
    else:
        refusal = f"unknown workload function {str(name)[:80]!r}: register it with --workloads FILE.py"
    return LogTask(key, str(name), build, refusal=refusal)


# -- MetaSchedule ---------------------------------------------------------------------------------------------------
def _metaschedule_tasks(raw: RawTable, epilogue: str) -> tuple[Labels, list[LogTask]]:
    workloads = raw.labels("tvmscript") if "tvmscript" in raw.columns else _workloads_beside(raw)
    number, parts = joined(workloads)
    return number, [_metaschedule_task(script) for (script,) in parts]


def _workloads_beside(raw: RawTable) -> Labels:
    """Text of each row's workload, from ``NAME_workloads.*`` beside the table, whose name begins with NAME."""
    files = raw.path.parent.glob("*_workloads.*")
    paths = [file for file in files if raw.path.name.startswith(file.name.rpartition("_workloads.")[0])]
    if not paths:
        name = raw.path.name.replace(".", "_workloads.", 1)
        raise DataError(
            f"{raw.path} has no column tvmscript, and there is no {name} beside it",
            hint="the workloads' file has the columns workload and tvmscript",
        )
    path = max(paths, key=lambda file: len(file.name))
    beside = read_raw(path, ("workload", "tvmscript"))
    texts = dict(zip(beside.labels("workload").array(), beside.labels("tvmscript").array(), strict=True))
    return raw.labels("workload").map(lambda workload: texts.get(workload, ""))


def _metaschedule_task(script: str) -> LogTask:
    def build(trace: str) -> TensorProgram:
        return metaschedule_program(script, trace)

    return LogTask(f"metaschedule\0{script}", "metaschedule", build, refusal="" if script else "no such workload")


def _importer(
    name: str, file_name: str, schedule: str, tasks: ReadTasks, repository: str, commit: str, origin: str
) -> TuningLogImporter:
    return TuningLogImporter(
        name=name,
        file_name=file_name,
        repository=repository,
        commit=commit,
        origin=origin,
        licence="MIT",
        protocol="kernel",
        needs=frozenset({"device", "workload", schedule}),
        reads=frozenset({"epilogue", "error_no", "tvmscript", "source"}),
        schedule=schedule,
        read_tasks=tasks,
    )


ANSOR = _importer(
    *("ansor", "sched_ansor.parquet", "steps", _ansor_tasks),
    *("microsoft/nnfusion, lac-dcc/bennu", "a87b05c, ad71799", "osdi22_artifact; benchmarks/microkernels"),
)
METASCHEDULE = _importer(
    *("metaschedule", "sched_metaschedule.parquet", "trace", _metaschedule_tasks),
    *("lac-dcc/bennu", "ad71799", "results/ms"),
)
