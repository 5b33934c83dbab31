"""A MetaSchedule database folder -> the scheduled programs of its tuning records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.graph import GraphBuilder, ProgramGraph
from cdmpp.programs.frontends.metaschedule import scheduled_module, workload_module, workload_text
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend
from cdmpp.utils.files import MAX_REQUEST_BYTES, read_text

WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
_HINT = f"pass the work_dir of a MetaSchedule run: a folder with {WORKLOADS} and {RECORDS}"


def metaschedule_graph(folder: str | Path, backend: Backend = "tvm") -> ProgramGraph:
    """The program of every tuning record, made by applying its trace to its workload.

    ``folder``: the ``work_dir`` of a MetaSchedule run. It is only read.
    ``backend``: what runs the programs.
    Returns one node for each record, named ``record0``, ``record1``, ... in the file's order; no edges. Records whose
    trace cannot be applied are listed as unsupported. The programs are ``alternatives``: each function of a workload is
    a task, named ``task0`` or ``task0:FUNCTION``.
    Raises InvalidProgramError: not a database, damaged, or without records.
    """
    folder = Path(folder)
    for name in (WORKLOADS, RECORDS):
        # TVM would make a missing file, and silently read an empty one.
        if not (folder / name).is_file():
            raise InvalidProgramError(f"{folder}: no {name}", hint=_HINT)
    from cdmpp.programs.frontends.tir import import_tvm

    tvm = import_tvm()
    workloads = [_workload(entry, i) for i, entry in enumerate(_lines(folder / WORKLOADS))]
    records = _lines(folder / RECORDS)
    if not records:
        raise InvalidProgramError(f"{folder.name}: the database has no tuning records", hint=_HINT)
    builder = GraphBuilder(folder.name)
    tasks: dict[str, list[int]] = {}
    for line, entry in enumerate(records):
        node = f"record{line}"
        try:
            number, body = int(entry[0]), entry[1]
            workload = workloads[number]
        except (LookupError, TypeError, ValueError):
            raise InvalidProgramError(
                f"{folder.name}/{RECORDS}, line {line + 1}: not a record of a known workload", hint=_HINT
            ) from None
        try:
            functions = _functions(tvm, scheduled_module(workload, body[0]))
        except (InvalidProgramError, LookupError, TypeError) as error:
            reason = getattr(error, "message", "not a record").removeprefix("the trace cannot be applied: ")
            builder.unsupported(node, "trace", f"cannot be applied: {reason}", reads=(), writes=())
            functions = []
        for name, _ in _functions(tvm, workload_module(workload)):
            tasks.setdefault(_task(number, name), [])  # a task stays without programs if no trace can be applied
        for i, (name, function) in enumerate(functions):
            task = _task(number, name)
            program = TensorProgram.from_tvm_json(str(tvm.ir.save_json(function)), backend, f"{task}/{node}")
            index = builder.launch(node if not i else f"{node}/{name}", name, program, reads=(), writes=())
            tasks.setdefault(task, []).append(index)
    return builder.build(tasks)


def _task(workload: int, function: str) -> str:
    return f"task{workload}" if function == "main" else f"task{workload}:{function}"


def _lines(path: Path) -> list[Any]:
    """Read the JSON values of a table, one per line. TVM's reader fails for the whole file if one trace is invalid."""
    try:
        text = read_text(path, MAX_REQUEST_BYTES)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidProgramError(f"{path.name}: {_line(error)}", hint=_HINT) from None


def _workload(entry: Any, index: int) -> str:
    try:
        text = workload_text(entry)
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidProgramError(f"{WORKLOADS}, line {index + 1}: {_line(error)}", hint=_HINT) from None
    workload_module(text)  # raises for damaged ones
    return text


def _functions(tvm: Any, module: Any) -> list[tuple[str, Any]]:
    return [
        (str(variable.name_hint), function)
        for variable, function in module.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc)
    ]


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else repr(error))[:300]
