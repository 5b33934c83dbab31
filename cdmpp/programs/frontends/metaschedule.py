"""Schedules of MetaSchedule databases as TensorIR programs of today's TVM. Needs the extra ``tvm``."""

from __future__ import annotations

import base64
import json
from functools import lru_cache
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.imports import import_intrinsics
from cdmpp.programs.program import TensorProgram

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
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["?"]
        reason = next((line for line in reversed(lines) if "rror" in line), lines[-1])[:200]
        raise InvalidProgramError(
            f"the trace cannot be applied: {reason}",
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
