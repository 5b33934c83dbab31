"""Relax and ONNX models -> the fused PrimFuncs that TVM makes of them. TVM is imported on first use.

An ONNX model is frozen first (static shapes, weights as inputs). Relax is legalised and fused: one call of
a PrimFunc for each kernel. The functions are as lowered, not scheduled. torch programs take the same way
(:mod:`cdmpp.programs.frontends.torch_programs`).

A reshape launches nothing. Relax writes it as a PrimFunc that copies, but its own build pipeline
(``RewriteDataflowReshape``) turns it into a view of the same memory, as every runtime does, so a latency
would be of a kernel that nobody runs. The same analysis decides here; transposes, pads, concatenations and
broadcasts move data and stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdmpp.errors import CdmppError, InvalidProgramError, UnsupportedOperatorError
from cdmpp.programs.frontends.graph import GraphBuilder, ProgramGraph
from cdmpp.programs.frontends.onnx_model import load_onnx
from cdmpp.programs.frontends.onnx_static import static_model
from cdmpp.programs.frontends.tir import import_tvm
from cdmpp.programs.program import TensorProgram

_HINT = "with backend 'library' each kernel that a framework launches is taken by itself, without TVM"


def onnx_tvm_graph(source: str | Path | bytes, dims: Mapping[str, int] | None = None) -> ProgramGraph:
    """The fused PrimFuncs of an ONNX model.

    Parameters
    ----------
    source : path or bytes
        The model.
    dims : mapping of str to int, optional
        Sizes of dynamic dimensions, as for :func:`~cdmpp.programs.frontends.onnx_library.onnx_library_graph`.

    Returns
    -------
    ProgramGraph
        Nodes are the bindings of Relax's main function. Functions whose shapes are still dynamic, and
        calls that were not lowered to a PrimFunc, are listed as unsupported by name.

    Raises
    ------
    InvalidProgramError
        The model cannot be read.
    UnsupportedOperatorError
        TVM's importer does not know an operator (the message names it), or fails on the graph.
    MissingDependencyError
        TVM or onnx is not installed.
    """
    graph = load_onnx(source, dims)
    import_tvm()  # raises with the install command
    model = static_model(graph)
    with importing(graph.name, hint=_HINT):
        from tvm.relax.frontend.onnx import from_onnx

        module = fused(from_onnx(model))
    fed = sum(not graph.is_constant(i.name) for i in graph.model.graph.input)
    weights = module["main"].params[fed:] if len(module["main"].params) == len(model.graph.input) else []
    return programs_of_fused(module, graph.name, weights)


def relax_graph(module: Any, name: str = "main") -> ProgramGraph:
    """The fused PrimFuncs of a Relax module.

    Parameters
    ----------
    module : tvm.IRModule
        With a Relax function ``main``, legalised or not. If its attribute ``num_input`` states how many
        parameters are inputs, the others are weights, and what depends on them alone runs beforehand.
    name : str
        What to call it in messages.

    Raises
    ------
    InvalidProgramError
        No module, or one without a Relax function ``main``.
    UnsupportedOperatorError
        A pass of TVM fails on it.
    """
    tvm = import_tvm()
    if not isinstance(module, tvm.IRModule) or "main" not in _relax_functions(tvm, module):
        raise InvalidProgramError(
            f"{name}: no Relax function 'main'", hint="pass a tvm.IRModule with a Relax function called main"
        )
    with importing(name):
        lowered = fused(module)
    return programs_of_fused(lowered, name)


def relax_json_graph(text: str, name: str) -> ProgramGraph:
    """:func:`relax_graph` of a module as TVM JSON.

    Raises
    ------
    InvalidProgramError
        As there, or TVM cannot read it.
    """
    tvm = import_tvm()
    try:
        module = tvm.ir.load_json(text)
    except Exception as error:  # TVM's reader raises a dozen kinds
        raise InvalidProgramError(
            f"{name}: TVM cannot read it: {str(error).strip().splitlines()[-1][:200]}",
            hint="pass what tvm.ir.save_json(module) of apache-tvm 0.27 writes",
        ) from None
    return relax_graph(module, name)


@contextmanager
def importing(name: str, hint: str = "") -> Iterator[None]:
    """Turns whatever TVM's importers and passes raise into one error, and silences their remarks."""
    try:
        with warnings.catch_warnings():  # remarks on models that are then imported
            warnings.simplefilter("ignore")
            yield
    except CdmppError:
        raise
    except Exception as error:  # of whatever kind TVM's checks are made of
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = next((line for line in lines if "not supported" in line), lines[-1] if lines else repr(error))
        raise UnsupportedOperatorError(f"{name}: TVM cannot import it: {what[:300]}", hint=hint) from None


def fused(module: Any) -> Any:
    """A Relax module, legalised and fused: ``main`` calls one PrimFunc for each kernel."""
    tvm = import_tvm()
    from tvm.relax import transform

    attributes = module["main"].attrs
    if attributes and "num_input" in attributes:
        # What weights alone determine becomes a function of its own, which runs before the model does.
        before = (
            transform.DecomposeOpsForInference(),
            transform.CanonicalizeBindings(),
            transform.LiftTransformParams(),
        )
        module = tvm.transform.Sequential(list(before))(module)
        module = tvm.IRModule({"main": module["main"], **_prim_funcs(tvm, module)})
    # DeadCodeElimination comes last: fusion leaves the unfused functions behind.
    passes = (
        transform.DecomposeOpsForInference(),
        transform.CanonicalizeBindings(),
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        transform.FoldConstant(),
        transform.FuseOps(),
        transform.FuseTIR(),
        transform.DeadCodeElimination(),
    )
    return tvm.transform.Sequential(list(passes))(module)


def _relax_functions(tvm: Any, module: Any) -> set[str]:
    pairs = module.functions_items()
    return {str(v.name_hint) for v, function in pairs if isinstance(function, tvm.relax.Function)}


def _prim_funcs(tvm: Any, module: Any) -> dict[Any, Any]:
    return {v: f for v, f in module.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}


def programs_of_fused(module: Any, name: str, weights: Iterable[Any] = ()) -> ProgramGraph:
    """Programs, counts and dataflow of a fused module; ``weights`` are parameters of ``main``."""
    tvm = import_tvm()
    relax = tvm.relax
    builder = GraphBuilder(name)
    texts: dict[str, tuple[TensorProgram | None, str]] = {}
    keys: dict[Any, str] = {}
    taken: set[str] = set()

    def key(variable: Any) -> str:
        if variable not in keys:
            base = str(getattr(variable, "name", "") or "v")
            keys[variable] = base if base not in taken else f"{base}.{len(keys)}"
            taken.add(keys[variable])
        return keys[variable]

    #: Weights and what is computed from them alone: a runtime folds it before the model runs.
    fixed = {key(variable) for variable in weights}

    def reads(expression: Any) -> list[str]:
        if isinstance(expression, tvm.ir.Var | relax.Var):
            return [key(expression)]
        if isinstance(expression, relax.Tuple):
            return [r for item in expression.fields for r in reads(item)]
        if isinstance(expression, relax.TupleGetItem):
            return reads(expression.tuple_value)
        if isinstance(expression, tvm.ir.Call | relax.Call):
            return [r for item in expression.args for r in reads(item)]
        return []

    for block in module["main"].body.blocks:
        for binding in block.bindings:
            value, node, written = binding.value, key(binding.var), [key(binding.var)]
            read = reads(value)
            if not isinstance(value, tvm.ir.Call | relax.Call):
                builder.skip(node, type(value).__name__, "free: another name", reads=read, writes=written)
                continue
            operator, function = _callee(tvm, module, value)
            if all(r in fixed for r in read):
                fixed.add(node)
                builder.skip(node, operator, "constant: computed before the model runs", reads=(), writes=written)
            elif function is None:
                builder.unsupported(node, operator, "not lowered to a PrimFunc", reads=read, writes=written)
            elif relax.analysis.has_reshape_pattern(function):
                builder.skip(node, operator, "free: a view of the same memory", reads=read, writes=written)
            else:
                if operator not in texts:
                    texts[operator] = _program(tvm, operator, function)
                program, reason = texts[operator]
                if program is None:
                    builder.unsupported(node, operator, reason, reads=read, writes=written)
                else:
                    builder.launch(node, operator, program, reads=read, writes=written)
    return builder.build()


def _callee(tvm: Any, module: Any, call: Any) -> tuple[str, Any]:
    """Name and PrimFunc of a ``call_tir``; for any other call its name and None."""
    operator = str(getattr(call.op, "name", None) or getattr(call.op, "global_symbol", None) or call.op)
    if operator.startswith("relax.call_tir") and isinstance(call.args[0], tvm.ir.GlobalVar):
        function = module[call.args[0]]
        if isinstance(function, tvm.tirx.PrimFunc):
            return str(call.args[0].name_hint), function
    if call.args and (extern := getattr(call.args[0], "global_symbol", None)):
        operator = f"{operator}({extern})"
    return operator, None


def _program(tvm: Any, name: str, function: Any) -> tuple[TensorProgram | None, str]:
    for parameter in function.params:
        shape = getattr(parameter.ty, "shape", None)
        if shape is None or not all(isinstance(extent, tvm.tirx.IntImm) for extent in shape):
            return None, "its shapes are dynamic"
    # One name for all: what schedules and builds them looks for "main".
    function = function.without_attr("op_pattern").with_attr("global_symbol", "main")
    return TensorProgram.from_tvm_json(str(tvm.ir.save_json(function)), "tvm", name), ""
