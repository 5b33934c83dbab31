"""Tuning logs as tuners write them: JSON lines of Ansor, and folders of MetaSchedule."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from cdmpp.data.arrow import pa
from cdmpp.data.importers.tuning_logs import ANSOR, METASCHEDULE, TuningLogImporter
from cdmpp.data.raw import RawTable
from cdmpp.errors import DataError
from cdmpp.programs.frontends.metaschedule import workload_text
from cdmpp.programs.frontends.metaschedule_db import RECORDS, WORKLOADS
from cdmpp.utils.files import open_file, parse_json

#: TVM writes this many seconds, or more, for a candidate that failed.
_FAILED_S = 1e9
_UNKNOWN_ERROR = 8
_COSTS = pa.float64()
Row: TypeAlias = dict[str, Any]
_ANSOR_COLUMNS = {"workload": pa.string(), "steps": pa.string(), "latency_us": _COSTS, "error_no": pa.int64()}
_METASCHEDULE_COLUMNS = {"tvmscript": pa.string(), "trace": pa.string(), "latency_us": _COSTS, "error_no": pa.int64()}


def log_importer(path: Path) -> TuningLogImporter | None:
    """Importer of a tuning log, or None if the file is none.

    Parameters
    ----------
    path : Path
        File of JSON lines of Ansor, or the records' file of a folder of MetaSchedule.
    """
    if path.name == RECORDS:
        return METASCHEDULE
    if not path.is_file():
        return None
    with open_file(path) as file:
        return ANSOR if file.read(64).lstrip().startswith(b'{"i":') else None


def read_log(path: Path, importer: TuningLogImporter) -> RawTable:
    """Rows of a tuning log. A line that is no record becomes a row without a workload.

    Raises
    ------
    DataError
        A file is missing or cannot be read.
    """
    if importer is ANSOR:
        return _table([_read(line, _ansor_record) for line in _lines(path)], _ANSOR_COLUMNS, path)
    texts = [_workload(line) for line in _lines(path.with_name(WORKLOADS))]
    rows = [_read(line, lambda record: _tuning_record(record, texts)) for line in _lines(path)]
    return _table(rows, _METASCHEDULE_COLUMNS, path)


def _lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        hint = f"a folder of MetaSchedule has {WORKLOADS} and {RECORDS}"
        raise DataError(f"{path} is missing", hint=hint)
    with open_file(path) as file:
        yield from (line for line in file if line.strip())


def _read(line: bytes, parse: Callable[[Any], Row]) -> Row:
    try:
        return parse(parse_json(line))
    except (ValueError, TypeError, LookupError, AttributeError):
        return {}


def _table(rows: list[Row], columns: dict[str, Any], path: Path) -> RawTable:
    arrays = {name: pa.array([row.get(name) for row in rows], kind) for name, kind in columns.items()}
    return RawTable(pa.table({"device": pa.array([""] * len(rows), pa.string()), **arrays}), path)


def _ansor_record(record: Any) -> Row:
    (task, state), (costs_s, error_no, *_) = record["i"], record["r"]
    return {"workload": str(task[0]), "steps": json.dumps(state[-1]), **_result(costs_s, int(error_no))}


def _tuning_record(record: Any, texts: list[str]) -> Row:
    index, (trace, costs_s, *_) = record
    if type(index) is not int or index < 0:
        raise ValueError("not the number of a workload")
    return {"tvmscript": texts[index], "trace": json.dumps(trace), **_result(costs_s or [math.inf], 0)}


def _result(costs_s: list[float], error_no: int) -> Row:
    mean_s = sum(costs_s) / len(costs_s) if costs_s else math.inf
    if not error_no and not mean_s < _FAILED_S:
        error_no = _UNKNOWN_ERROR
    return {"latency_us": None if error_no else mean_s * 1e6, "error_no": error_no}


def _workload(line: bytes) -> str:
    try:
        return workload_text(parse_json(line))
    except (ValueError, LookupError, TypeError):
        return ""
