"""``torch.export`` programs -> the fused PrimFuncs that TVM makes of them. TVM and torch on first use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdmpp.errors import InvalidProgramError, MissingDependencyError
from cdmpp.frontends.graph import ProgramGraph
from cdmpp.frontends.relax_programs import fused, importing, programs_of_fused
from cdmpp.frontends.tir import import_tvm


def torch_graph(exported: Any, name: str = "torch program") -> ProgramGraph:
    """The fused PrimFuncs of an exported torch program.

    Parameters
    ----------
    exported : torch.export.ExportedProgram
        Static shapes; functions that keep dynamic ones are listed as unsupported. Weights are inputs of the
        programs, and what weights alone determine (a transposed weight) is computed before the model runs.
    name : str
        What to call it in messages.

    Raises
    ------
    InvalidProgramError
        Not an exported program.
    UnsupportedOperatorError
        TVM's importer does not know an operator (the message names it), or fails on the graph.
    MissingDependencyError
        TVM or torch is not installed.
    """
    with importing(name):
        lowered = fused(relax_module(exported, name))
    return programs_of_fused(lowered, name)


def relax_module(exported: Any, name: str = "torch program") -> Any:
    """The Relax module of an exported program, with batch normalisation folded into convolutions.

    ``main`` takes the inputs, then the weights; its attribute ``num_input`` counts the inputs.
    """
    torch = import_torch()
    if not isinstance(exported, torch.export.ExportedProgram):
        raise InvalidProgramError(
            f"{name}: a {type(exported).__name__} is no exported program",
            hint="pass torch.export.export(module.eval(), inputs)",
        )
    tvm = import_tvm()
    from tvm.relax.frontend.torch import from_exported_program

    try:
        # As exported: torch's decompositions turn a linear layer into reshapes and broadcasts around a
        # product, which then fuse with nothing.
        module = from_exported_program(exported, keep_params_as_input=True, run_ep_decomposition=False)
    except Exception:  # an operator that the importer knows decomposed only
        module = from_exported_program(exported, keep_params_as_input=True)
    module = tvm.relax.frontend.detach_params(module)[0]
    module["main"] = _fold_batch_norm(tvm, module["main"])
    return module


def read_exported(path: str | Path) -> Any:
    """The ``torch.export.ExportedProgram`` of a ``.pt2`` file.

    Raises
    ------
    InvalidProgramError
        The file cannot be read, or holds something else.
    """
    torch, path = import_torch(), Path(path)
    try:
        return torch.export.load(path)
    except OSError as error:
        raise InvalidProgramError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # zip, JSON and pickle each raise their own
        what = str(error).strip().splitlines()
        raise InvalidProgramError(
            f"{path.name}: not an exported torch program: {what[0][:200] if what else type(error).__name__}",
            hint="write it with torch.export.save(torch.export.export(module.eval(), inputs), path)",
        ) from None


def import_torch() -> Any:
    """torch, or an error that says how to get it."""
    try:
        import torch
        import torch.export
    except ImportError as error:
        raise MissingDependencyError(
            "torch programs need torch", hint="pip install 'cdmpp[predict,tvm]'"
        ) from error
    return torch


def _fold_batch_norm(tvm: Any, function: Any) -> Any:
    """Batch normalisation behind a convolution becomes a factor of its weight and a bias.

    Every compiler for inference does it; TVM's own pass wants the weights as constants. The factor depends
    on weights alone, so that it is computed before the model runs.
    """
    relax = tvm.relax
    from tvm.relax import dpl

    data, weight, scale, shift, mean, variance = (dpl.wildcard() for _ in range(6))
    convolution = dpl.is_op("relax.nn.conv2d")(data, weight)
    norm = dpl.is_op("relax.nn.batch_norm")(convolution, scale, shift, mean, variance)

    def rewrite(expression: Any, matches: Any) -> Any:
        conv, norm_call = matches[convolution], matches[norm]
        if conv.attrs["kernel_layout"] != "OIHW" or not isinstance(matches[weight], relax.Var):
            return expression
        epsilon = relax.const(float(norm_call.attrs["epsilon"]), "float32")
        factor = relax.op.divide(matches[scale], relax.op.sqrt(relax.op.add(matches[variance], epsilon)))
        bias = relax.op.subtract(matches[shift], relax.op.multiply(matches[mean], factor))
        channels = matches[weight].ty.shape[0]
        folded = relax.op.multiply(matches[weight], relax.op.reshape(factor, (channels, 1, 1, 1)))
        product = relax.Call(conv.op, (matches[data], folded), conv.attrs)
        return relax.op.add(product, relax.op.reshape(bias, (1, channels, 1, 1)))

    return dpl.rewrite_call(dpl.TupleGetItemPattern(norm, 0), rewrite, function)
