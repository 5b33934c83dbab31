"""Tuning logs as tuners write them: JSON lines of Ansor, and folders of MetaSchedule."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cdmpp.data.arrow import pa
from cdmpp.data.importers.tuning_logs import ANSOR, METASCHEDULE, TuningLogImporter
from cdmpp.data.labels import Labels
from cdmpp.data.raw import RawTable
from cdmpp.errors import DataError
from cdmpp.programs.frontends.metaschedule import RECORDS, WORKLOADS, workload_text
from cdmpp.utils.files import open_file, parse_json

#: TVM writes this many seconds, or more, for a candidate that failed.
_FAILED_S = 1e9
_UNKNOWN_ERROR = 8


class _Record(NamedTuple):
    """A line of a log; the default is a line that is no record."""

    workload: str = ""
    schedule: str = ""
    latency_us: float | None = None
    error_no: int = 0


def log_importer(path: Path) -> TuningLogImporter | None:
    """Importer of a tuning log, or None if the file is none. A log is a file of JSON lines of Ansor, or the records'
    file of a folder of MetaSchedule."""
    if path.name == RECORDS:
        return METASCHEDULE
    if not path.is_file():
        return None
    with open_file(path) as file:
        return ANSOR if file.read(64).lstrip().startswith(b'{"i":') else None


def read_log(path: Path, importer: TuningLogImporter) -> RawTable:
    """Rows of a tuning log. A line that is no record becomes a row without a workload."""
    texts = None if importer is ANSOR else [_workload(line) for line in _lines(path.with_name(WORKLOADS))]
    records = [_record(line, texts) for line in _lines(path)]
    workloads = Labels.of(record.workload for record in records)
    columns = {
        "device": pa.array([""] * len(records), pa.string()),
        "workload" if texts is None else "tvmscript": pa.DictionaryArray.from_arrays(
            pa.array(workloads.codes), pa.array(workloads.names, pa.string())
        ),
        importer.schedule: pa.array([record.schedule for record in records], pa.string()),
        "latency_us": pa.array([record.latency_us for record in records], pa.float64()),
        "error_no": pa.array([record.error_no for record in records], pa.int64()),
    }
    return RawTable(pa.table(columns), path)


def _lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        raise DataError(f"{path} is missing", hint=f"a folder of MetaSchedule has {WORKLOADS} and {RECORDS}")
    with open_file(path) as file:
        yield from (line for line in file if line.strip())


def _record(line: bytes, workloads: Sequence[str] | None) -> _Record:
    try:
        record = parse_json(line)
        if workloads is None:
            (task, state), (costs_s, error_no, *_) = record["i"], record["r"]
            workload, schedule = str(task[0]), state[-1]
        else:
            number, (schedule, costs_s, *_) = record
            workload, error_no = workloads[number] if number >= 0 else "", 0
        mean_s = sum(costs_s) / len(costs_s) if costs_s else math.inf
        error_no = int(error_no) or (0 if 0 <= mean_s < _FAILED_S else _UNKNOWN_ERROR)
        text = json.dumps(schedule, separators=(",", ":"))
        return _Record(workload, text, None if error_no else mean_s * 1e6, error_no)
    except (ValueError, TypeError, LookupError, AttributeError):
        return _Record()


def _workload(line: bytes) -> str:
    try:
        return workload_text(parse_json(line))
    except (ValueError, LookupError, TypeError):
        return ""
