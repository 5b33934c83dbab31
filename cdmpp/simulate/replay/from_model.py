"""Replay requests for one inference of a model: its programs on one stream, with gaps of the framework."""

from __future__ import annotations

from typing import Any

from cdmpp.errors import FieldError, UnsupportedOperatorError
from cdmpp.predict.requests.request import MAX_NAME, MAX_TEXT
from cdmpp.programs.frontends.graph import ProgramGraph
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Framework, Protocol


def request_of(
    graph: ProgramGraph,
    device: str | dict[str, Any],
    *,
    gap_s: float = 0.0,
    launch_s: float = 0.0,
    protocol: Protocol = DEFAULT_PROTOCOL,
    framework: Framework | None = None,
) -> dict[str, Any]:
    """The request for one pass of a model, as JSON values of ``make_plan("replay", ...)``.

    Nodes run on one stream in the model's order. Operators without a program are listed under ``missing``; they are not
    in the makespan.

    ``gap_s``: idle seconds between one kernel and the next: what the framework needs to launch it, where the device
    waits for that. ``launch_s``: seconds that the host needs to launch a kernel. Above 0 the host is a stream of its
    own, which runs ahead while the device works, and is waited for where kernels are short. With the protocol "eager" a
    launch is in each prediction already.
    Raises UnsupportedOperatorError: no node has a program, or the graph is that of a search.
    Raises FieldError: a program that JSON cannot carry alone.
    """
    if graph.alternatives:
        raise UnsupportedOperatorError(
            f"{graph.source or 'the search'}: its {len(graph.programs)} programs are alternative schedules of tasks "
            f"({', '.join(list(graph.alternatives)[:4])}), not one pass of a model",
            hint="cdmpp predict ranks them; replay the network itself, as ONNX or a Relax module",
        )
    launched = [node for node in graph.nodes if node.program is not None]
    if not launched:
        raise UnsupportedOperatorError(
            f"{graph.source or 'the model'}: nothing to predict",
            hint="; ".join(f"{kernel.operator}: {kernel.reason}" for kernel in graph.unsupported)
            or "cdmpp support lists what is covered",
        )
    ids = {node.id: _short(node.id, i) for i, node in enumerate(graph.nodes)}
    before: dict[str, list[str]] = {}
    for source, target in graph.edges:
        before.setdefault(target, []).append(ids[source])
    forms = [_form(program) for program in graph.programs]
    name = device if isinstance(device, str) else str(device.get("name", "device"))
    entry: dict[str, Any] = {"gap_s": gap_s}
    if not isinstance(device, str):
        entry["device"] = device
    nodes: list[dict[str, Any]] = []
    for i, node in enumerate(launched):
        deps = before.get(node.id, [])
        if launch_s:
            launch = _short(f"launch {ids[node.id]}", i)
            nodes.append({"id": launch, "device": "host", "duration_s": launch_s, "class": "launch"})
            deps = [*deps, launch]
        nodes.append(
            {
                "id": ids[node.id],
                "device": name,
                "program": forms[node.program or 0],
                "deps": deps,
                "class": node.operator[:MAX_NAME],
            }
        )
    made: dict[str, Any] = {"nodes": nodes, "devices": {name: entry}, "order": "listed", "protocol": protocol}
    backends = {program.backend for program in graph.programs}
    if len(backends) == 1:
        made["backend"] = next(iter(backends))
    if framework is not None:
        made["framework"] = framework
    if graph.unsupported:
        made["missing"] = [
            {"operator": kernel.operator[:MAX_TEXT], "count": kernel.count, "reason": kernel.reason[:MAX_TEXT]}
            for kernel in graph.unsupported
        ]
    return made


def _short(name: str, number: int) -> str:
    """A shorter name where that of an exported node is longer than names of a request may be."""
    return name if len(name) <= MAX_NAME else f"{name[:60]}...{name[-100:]} ({number})"


def _form(program: TensorProgram) -> dict[str, Any]:
    if program.operator is not None:
        return program.operator.canonical()
    if program.function is not None:
        raise FieldError(
            f"{program.name}: one function of a module with several cannot be sent by itself",
            path="nodes",
            hint="save each function as a module of its own",
        )
    return {"tvm_json": program.tvm_json}
