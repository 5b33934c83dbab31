"""Any network -> tuning tasks: its distinct fused PrimFuncs, unscheduled, with how often each runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.graph import ProgramGraph
from cdmpp.programs.zoo.registry import ZooNetwork, parse_network

FORMS = (
    "a network (resnet18, bert-tiny:batch=4,seq=128), model.onnx, program.pt2 (torch.export.save), "
    "module.json (Relax module as TVM JSON)"
)


@dataclass(frozen=True)
class TuningTask:
    """One fused PrimFunc of a network, as lowered."""

    name: str  # what TVM called it, e.g. ``"fused_conv2d_add_relu"``; for people
    hash: str  # structural hash (hex, 32 characters), blind to names: equal tasks of all networks have one
    tvm_json: str  # what ``tvm.ir.save_json`` wrote of the PrimFunc; its ``global_symbol`` is ``"main"``
    calls: int  # launches in one run of the network


@dataclass(frozen=True)
class TaskList:
    """The tasks of a network."""

    network: str  # the network's name without parameters, or the file's without its ending
    tasks: tuple[TuningTask, ...]  # distinct by hash, in the order of their first launch
    unsupported: tuple[tuple[str, str], ...] = ()  # what has no task: the function's or operator's name, and why
    source: str = ""  # name of the source: the network with its parameters, or the file's name


#: ``NAME@float16`` is a network of the zoo in mixed precision.
HALF = "float16"
#: Endings of files that are networks.
SUFFIXES = (".onnx", ".pt2", ".json")


def is_file(source: str) -> bool:
    """Whether a text names a file, and not a network of :mod:`cdmpp.programs.zoo`."""
    return Path(source).suffix.lower() in SUFFIXES


def network_name(source: str, dims: Mapping[str, int] | None = None) -> str:
    """Name of a network in records: its text, or the file's name with the given sizes.

    The folder of a file is not part of the name, because ``;`` separates networks.
    """
    if not is_file(source):
        return source.strip()
    sizes = ",".join(f"{name}={size}" for name, size in sorted((dims or {}).items()))
    return Path(source).name.replace(";", "_") + (f":{sizes}" if sizes else "")


def network_tasks(source: str | Path | ZooNetwork | Any, dims: Mapping[str, int] | None = None) -> TaskList:
    """The tuning tasks of a network.

    ``source``: a network of :mod:`cdmpp.programs.zoo` as text (``@float16`` at its end: in mixed precision) or object;
    the path of an ``.onnx``, ``.pt2`` (``torch.export.save``) or ``.json`` (Relax module as TVM JSON) file; an exported
    program; a module with a Relax function ``main``.
    ``dims``: sizes of an ONNX model's dynamic dimensions.
    Reshapes are no tasks: see :mod:`cdmpp.programs.frontends.relax_programs`.
    Raises InvalidProgramError: none of these; the hint lists the forms, or the networks.
    Raises UnsupportedOperatorError: TVM cannot import it (the message names the operator).
    Raises MissingDependencyError: TVM, torch or onnx is not installed.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        if isinstance(source, Path) or is_file(source):
            return _tasks(path.stem, path.name, _read(path, dims))
        text, _, dtype = source.partition("@")
        if dtype not in ("", HALF):
            raise InvalidProgramError(f"{source!r}: unknown type {dtype!r}", hint=f"allowed: {text}, {text}@{HALF}")
        network = parse_network(text)
        return _tasks(network.name, source.strip(), _network_graph(network, half=dtype == HALF))
    if isinstance(source, ZooNetwork):
        return _tasks(source.name, source.text, _network_graph(source))
    kind = type(source).__name__
    if kind == "ExportedProgram":
        from cdmpp.programs.frontends.relax_programs import torch_graph

        return _tasks("torch", kind, torch_graph(source))
    if kind == "IRModule":
        from cdmpp.programs.frontends.relax_programs import relax_graph

        return _tasks("relax", kind, relax_graph(source))
    raise InvalidProgramError(f"a {kind} is no network", hint=f"pass {FORMS}, or one of these as an object")


def _read(path: Path, dims: Mapping[str, int] | None) -> ProgramGraph:
    from cdmpp.programs.frontends.load import load_programs

    if not path.is_file():
        raise InvalidProgramError(f"{path}: no such file", hint=f"pass {FORMS}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InvalidProgramError(f"{path.name}: files of this kind are no networks", hint=f"pass {FORMS}")
    return load_programs(path, backend="tvm", dims=dims if suffix == ".onnx" else None)


def _network_graph(network: ZooNetwork, *, half: bool = False) -> ProgramGraph:
    from cdmpp.programs.frontends.imports import import_torch
    from cdmpp.programs.frontends.relax_programs import torch_graph

    torch = import_torch()
    return torch_graph(torch.export.export(network.module, network.inputs), network.text, half=half)


def _tasks(network: str, source: str, graph: ProgramGraph) -> TaskList:
    return TaskList(
        network,
        tuple(
            TuningTask(program.name, program.hash, program.tvm_json or "", calls)
            for program, calls in zip(graph.programs, graph.counts, strict=True)
        ),
        tuple((item.operator, item.reason) for item in graph.unsupported),
        source,
    )
