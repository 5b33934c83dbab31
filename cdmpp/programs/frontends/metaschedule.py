"""Schedules of MetaSchedule databases, and of single tuning records, as TensorIR programs of today's TVM.

Needs the extra ``tvm``.
"""

from __future__ import annotations

import base64
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.graph import GraphBuilder, ProgramGraph
from cdmpp.programs.frontends.imports import import_intrinsics
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend
from cdmpp.utils.files import MAX_REQUEST_BYTES, read_text

WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
_HINT = f"pass the work_dir of a MetaSchedule run: a folder with {WORKLOADS} and {RECORDS}"
#: Instructions that TVM renamed.
_FORMER = {"GetBlock": "GetSBlock", "GetChildSBlocks": "GetChildBlocks"}
#: Attributes that instructions got later, with the values that older versions used.
_ATTRIBUTES: dict[str, list[Any]] = {
    "Split": [1, 0],
    "Fuse": [1],
    "ComputeAt": [1, -1],
    "ReverseComputeAt": [1, -1],
    "Blockize": [1],
    "Tensorize": ["", 1],
}
#: Instructions that got a list of consumers as their second input.
_CONSUMERS = ("CacheRead", "CacheWrite")


def metaschedule_program(workload: str, trace: str | list[Any]) -> TensorProgram:
    """The scheduled program of a tuning record.

    ``workload``: the module before tuning: TVMScript, or TVM JSON of this or an older version.
    ``trace``: ``[instructions, decisions]`` as MetaSchedule writes them, also by TVM before 0.27; "": not scheduled.
    Raises InvalidProgramError: the workload cannot be read, the trace cannot be applied, or the workload has several
    functions.
    Raises MissingDependencyError: TVM is not installed.
    """
    # A service that imports this module reads no program itself: the reader of TVMScript is loaded on use.
    from cdmpp.programs.frontends.tir import programs_from_tir

    programs = programs_from_tir(scheduled_module(workload, trace) if trace != "" else workload_module(workload))
    if len(programs) != 1:
        raise InvalidProgramError(f"a workload of {len(programs)} functions", hint="a workload has one PrimFunc")
    return programs[0]


def scheduled_module(workload: str, trace: str | list[Any]) -> Any:
    """The ``tvm.IRModule`` of a tuning record; parameters and errors as :func:`metaschedule_program`."""
    from cdmpp.programs.frontends.tir import import_tvm

    tvm = import_tvm()
    schedule = tvm.s_tir.Schedule(workload_module(workload))
    applied = _checked_trace(trace)
    if any(instruction[0] == "Tensorize" for instruction in applied[0]):
        # Some seconds, once per process: only traces that name an intrinsic need them registered.
        import_intrinsics()
    try:
        tvm.s_tir.schedule.Trace.apply_json_to_schedule(applied, schedule)
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        raise InvalidProgramError(
            f"the trace cannot be applied: {_line(error)[:200]}",
            hint="the trace is of another workload, or has an instruction that TVM 0.27 lacks",
        ) from None
    return schedule.mod


@lru_cache(maxsize=64)
def workload_module(workload: str) -> Any:
    """The ``tvm.IRModule`` before tuning; parameters and errors as :func:`metaschedule_program`."""
    from cdmpp.programs.frontends.tir import module_from_tvmscript
    from cdmpp.programs.frontends.workload_script import tvmscript_of_json

    return module_from_tvmscript(tvmscript_of_json(workload) if workload.lstrip().startswith("{") else workload)


def workload_text(entry: Any) -> str:
    """TVM JSON of an entry of the workloads' file: ``[hash, text]``, or base64 of the text behind its length (8 bytes).

    Raises ValueError, TypeError or LookupError: not such an entry.
    """
    content = entry[1]
    if not isinstance(content, str):
        return json.dumps(content)
    return content if content.lstrip().startswith("{") else base64.b64decode(content)[8:].decode()


def _checked_trace(trace: str | list[Any]) -> list[Any]:
    """A trace in the form of TVM 0.27, which crashes on values of wrong types and draws values without a decision."""
    try:
        instructions, decisions = json.loads(trace) if isinstance(trace, str) else trace
        renewed = [_renewed(*instruction) for instruction in instructions]
        decided = {index: decision for index, decision in decisions}
        for index, decision in decided.items():
            name = renewed[index][0] if type(index) is int and 0 <= index < len(renewed) else ""
            values = decision if isinstance(decision, list) else [decision]
            if not name.startswith("Sample") or not all(type(v) is int and (v > 0 or v is decision) for v in values):
                raise ValueError(f"decision {decision} of instruction {index} {name}")
        for index, (name, *_) in enumerate(renewed):
            if name.startswith("Sample") and index not in decided:
                raise ValueError(f"{name} has no decision")
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidProgramError(
            f"not a trace: {str(error)[:200]}",
            hint="pass [[[name, inputs, attributes, outputs], ...], [[index, decision], ...]]",
        ) from None
    return [renewed, decisions]


def _renewed(name: str, inputs: list[Any], attributes: list[Any], outputs: list[str]) -> list[Any]:
    """An instruction in the form of TVM 0.27.

    Raises ValueError: a name is no text, or a value is neither text nor a number nor a list of these.
    """
    name = _FORMER.get(name, name)
    attributes = [*attributes, *_ATTRIBUTES.get(name, [])[len(attributes) :]]
    if name in _CONSUMERS and len(inputs) == 1:
        inputs = [*inputs, []]
    inputs = ["None" if value is None else value for value in inputs]
    absent = "None" in inputs and name != "Split"  # Split infers that factor
    if absent or not (all(isinstance(o, str) for o in outputs) and _is_plain([*inputs, *attributes])):
        raise ValueError(f"arguments of {name}")
    return [name, inputs, attributes, outputs]


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, str | int | float)


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
