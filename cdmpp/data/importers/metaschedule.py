"""Schedules of MetaSchedule databases as TensorIR programs of today's TVM. Needs the extra ``tvm``."""

from __future__ import annotations

import json
from functools import lru_cache
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
    if trace:
        applied = _checked_trace(trace)
        if any(instruction[0] == "Tensorize" for instruction in applied[0]):
            import tvm.s_tir.tensor_intrin  # half a minute, once
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
    """A trace in the form of TVM 0.27.

    A decision for no instruction crashes TVM, and a sampling instruction without one is drawn at random.
    """
    try:
        instructions, decisions = json.loads(trace) if isinstance(trace, str) else trace
        given = {index: value for index, value in decisions}
        renewed = [_renewed(*instruction) for instruction in instructions]
        names = [instruction[0] for instruction in renewed]
        if any(type(index) is not int or not 0 <= index < len(names) for index in given):
            raise ValueError("a decision for no instruction")
        drawn = [n for i, n in enumerate(names) if n.startswith("Sample") and given.get(i) is None]
        if drawn:
            raise ValueError(f"{drawn[0]} has no decision")
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidProgramError(
            f"not a trace: {str(error)[:200]}",
            hint="[[[name, inputs, attributes, outputs], ...], [[index, value], ...]]",
        ) from None
    return [renewed, decisions]


def _renewed(name: str, inputs: list[Any], attributes: list[Any], outputs: list[Any]) -> list[Any]:
    name = _FORMER.get(name, name)
    attributes = [*attributes, *_ATTRIBUTES.get(name, [])[len(attributes) :]]
    if name in _CONSUMERS and len(inputs) == 1:
        inputs = [*inputs, []]
    return [name, ["None" if value is None else value for value in inputs], attributes, outputs]
