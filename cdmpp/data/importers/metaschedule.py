"""Schedules of MetaSchedule databases as TensorIR programs of today's TVM. Needs the extra ``tvm``."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import import_module
from typing import Any

from cdmpp.data.importers.workload_script import tvmscript_of_json
from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.tir import import_tvm, module_from_tvmscript, programs_from_tir
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

    Parameters
    ----------
    workload : str
        The module before tuning: TVMScript, or TVM JSON of this or an older version.
    trace : str or list
        ``[instructions, decisions]`` as MetaSchedule writes them, also by TVM before 0.27; "": not scheduled.

    Raises
    ------
    InvalidProgramError
        The workload cannot be read, the trace cannot be applied, or a sampled value has no decision.
    """
    tvm = import_tvm()
    schedule = tvm.s_tir.Schedule(_module(workload))
    if trace != "":
        applied = _checked_trace(trace)
        if any(instruction[0] == "Tensorize" for instruction in applied[0]):
            import_module("tvm.s_tir.tensor_intrin")  # half a minute, once
        try:
            tvm.s_tir.schedule.Trace.apply_json_to_schedule(applied, schedule)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise InvalidProgramError(
                f"the trace cannot be applied: {(str(error).strip().splitlines() or ['?'])[-1][:200]}",
                hint="the trace is of another workload, or has an instruction that TVM 0.27 lacks",
            ) from None
    programs = programs_from_tir(schedule.mod)
    if len(programs) != 1:
        raise InvalidProgramError(f"a workload of {len(programs)} functions", hint="a workload has one PrimFunc")
    return programs[0]


@lru_cache(maxsize=8)
def _module(workload: str) -> Any:
    """The module before tuning."""
    return module_from_tvmscript(tvmscript_of_json(workload) if workload.lstrip().startswith("{") else workload)


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

    Raises
    ------
    ValueError
        A name is no text, or a value is neither text nor a number nor a list of these.
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
