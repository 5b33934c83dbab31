"""``torch.export`` programs -> the fused PrimFuncs that TVM makes of them. TVM and torch on first use."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.graph import ProgramGraph
from cdmpp.programs.frontends.relax_programs import fused, importing, programs_of_fused
from cdmpp.programs.frontends.tir import import_tvm
from cdmpp.programs.frontends.torch_import import import_torch
from cdmpp.programs.frontends.torch_norms import CONVERTERS, fold_batch_norm


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
    torch = import_torch()
    if not isinstance(exported, torch.export.ExportedProgram):
        raise InvalidProgramError(
            f"{name}: a {type(exported).__name__} is no exported program",
            hint="pass torch.export.export(module.eval(), inputs)",
        )
    with importing(name):
        lowered = fused(relax_module(exported)[0])
    return programs_of_fused(lowered, name)


def relax_module(exported: Any) -> tuple[Any, list[Any]]:
    """The Relax module of an exported program, with batch normalisation folded into convolutions.

    Returns
    -------
    module : tvm.IRModule
        ``main`` takes the inputs, then the weights; its attribute ``num_input`` counts the inputs.
    weights : list of tvm.runtime.Tensor
        Values of the weights, in the order of ``main``'s parameters.
    """
    tvm = import_tvm()
    from tvm.relax.frontend.torch import from_exported_program

    options = {"keep_params_as_input": True, "custom_convert_map": CONVERTERS}
    try:
        # As exported: torch's decompositions turn a linear layer into reshapes and broadcasts around a
        # product, which then fuse with nothing.
        module = from_exported_program(exported, run_ep_decomposition=False, **options)
    except Exception:  # an operator that the importer knows decomposed only
        module = from_exported_program(exported, **options)
    module, weights = tvm.relax.frontend.detach_params(module)
    function, buffers = _buffers_as_parameters(tvm, module["main"])
    module["main"] = fold_batch_norm(function)
    return module, [*weights["main"], *buffers]


def read_exported(path: str | Path) -> Any:
    """The ``torch.export.ExportedProgram`` of a ``.pt2`` file.

    Raises
    ------
    InvalidProgramError
        The file cannot be read, or holds something else.
    """
    torch, path = import_torch(), Path(path)
    log = logging.getLogger("torch.export")
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)  # torch logs a traceback, then tries an older format
        return torch.export.load(path)
    except OSError as error:
        raise InvalidProgramError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # zip, JSON and pickle each raise their own
        what = str(error).strip().splitlines()
        raise InvalidProgramError(
            f"{path.name}: not an exported torch program: {what[0][:200] if what else type(error).__name__}",
            hint="write it with torch.export.save(torch.export.export(module.eval(), inputs), path)",
        ) from None
    finally:
        log.setLevel(level)


def _buffers_as_parameters(tvm: Any, function: Any) -> tuple[Any, list[Any]]:
    """Constant floating-point tensors (masks, statistics) become parameters like other weights.

    As constants, what is computed from them would be folded, one compiler run for each small expression.
    Integers may be positions or sizes, and stay.
    """
    relax = tvm.relax
    from tvm.relax.expr_functor import PyExprMutator, mutator

    parameters: list[Any] = []
    values: list[Any] = []

    @mutator
    class Lift(PyExprMutator):  # type: ignore[misc]
        def visit_generic_const_(self, op: Any) -> Any:
            if not isinstance(op.value, tvm.runtime.Tensor) or not op.value.shape or "float" not in str(op.ty.dtype):
                return op
            if not any(op.value.same_as(value) for value in values):
                parameters.append(relax.Var(f"buffer{len(values)}", op.ty))
                values.append(op.value)
            return next(p for p, v in zip(parameters, values, strict=True) if op.value.same_as(v))

    lifted = Lift().visit_expr(function)
    parameters = [*lifted.params, *parameters]
    return relax.Function(parameters, lifted.body, lifted.ret_ty, lifted.is_pure, lifted.attrs), values
