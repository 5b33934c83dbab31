"""Exported torch program -> the library kernels that eager PyTorch launches for it."""

from __future__ import annotations

import warnings
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.graph import GraphBuilder, ProgramGraph
from cdmpp.programs.frontends.torch_import import import_torch
from cdmpp.programs.program import TensorProgram


def exported_library_graph(exported: Any, name: str) -> ProgramGraph:
    """The kernels of one forward pass, each after the one before, as on a stream.

    Parameters
    ----------
    exported : torch.export.ExportedProgram
        With the example inputs that it was exported with; their shapes are those of the kernels.
    name : str
        What to call it in messages.

    Raises
    ------
    InvalidProgramError
        Not an exported program, one without example inputs, or one that does not run without data.
    MissingDependencyError
        torch is not installed.
    """
    torch = import_torch()
    from cdmpp.programs.frontends.torch_eager import eager_trace

    if not isinstance(exported, torch.export.ExportedProgram) or exported.example_inputs is None:
        raise InvalidProgramError(
            f"{name}: not an exported program with example inputs",
            hint="write it with torch.export.save(torch.export.export(module.eval(), inputs), path)",
        )
    arguments, keywords = exported.example_inputs
    builder = GraphBuilder(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch copies exported programs with its own old calls
        trace = eager_trace(exported.module(), arguments, keywords=keywords)
    last: tuple[str, ...] = ()
    for number, launch in enumerate(trace.launches):
        node = f"{launch.call}_{number}"
        program = TensorProgram.from_operator(launch.spec)
        builder.launch(node, launch.call, program, reads=last, writes=(node,), remark=launch.remark)
        last = (node,)
    for entry in trace.unsupported:
        for copy in range(entry.count):
            node = f"{entry.operator}_unsupported_{copy}"
            builder.unsupported(node, entry.operator, entry.reason, reads=(), writes=())
    return builder.build()
