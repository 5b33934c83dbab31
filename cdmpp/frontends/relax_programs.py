"""ONNX model -> the fused PrimFuncs that TVM makes of it (``backend="tvm"``). TVM is imported on first use.

The model is frozen first (static shapes, weights as inputs), then goes through Relax: legalised, fused,
one call of a PrimFunc for each kernel. The functions are as lowered, not scheduled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cdmpp.errors import CdmppError, UnsupportedOperatorError
from cdmpp.frontends.graph import GraphBuilder, ProgramGraph
from cdmpp.frontends.onnx_model import load_onnx
from cdmpp.frontends.onnx_static import static_model
from cdmpp.frontends.tir import import_tvm
from cdmpp.programs.program import TensorProgram

_HINT = "with backend 'library' each kernel that a framework launches is taken by itself, without TVM"


def onnx_tvm_graph(source: str | Path | bytes, dims: Mapping[str, int] | None = None) -> ProgramGraph:
    """The fused PrimFuncs of an ONNX model.

    Parameters
    ----------
    source : path or bytes
        The model.
    dims : mapping of str to int, optional
        Sizes of dynamic dimensions, as for :func:`~cdmpp.frontends.onnx_library.onnx_library_graph`.

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
    tvm = import_tvm()
    model = static_model(graph)
    module = _fused(tvm, model, graph.name)
    fed = sum(not graph.is_constant(i.name) for i in graph.model.graph.input)
    weights = module["main"].params[fed:] if len(module["main"].params) == len(model.graph.input) else []
    return _programs(tvm, module, graph.name, weights)


def _fused(tvm: Any, model: Any, name: str) -> Any:
    from tvm.relax import transform
    from tvm.relax.frontend.onnx import from_onnx

    try:
        with warnings.catch_warnings():  # of the importer: remarks on models that it then imports
            warnings.simplefilter("ignore")
            module = from_onnx(model)
        # DeadCodeElimination comes last: fusion leaves the unfused functions behind.
        passes = (
            transform.DecomposeOpsForInference(), transform.CanonicalizeBindings(), transform.LegalizeOps(),
            transform.AnnotateTIROpPattern(), transform.FoldConstant(), transform.FuseOps(),
            transform.FuseTIR(), transform.DeadCodeElimination(),
        )  # fmt: skip
        return tvm.transform.Sequential(list(passes))(module)
    except CdmppError:
        raise
    except Exception as error:  # the importer and the passes raise whatever their checks are made of
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = next((line for line in lines if "not supported" in line), lines[-1] if lines else repr(error))
        raise UnsupportedOperatorError(f"{name}: TVM cannot import it: {what[:300]}", hint=_HINT) from None


def _programs(tvm: Any, module: Any, name: str, weights: Iterable[Any]) -> ProgramGraph:
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
                builder.skip(
                    node, operator, "constant: computed before the model runs", reads=(), writes=written
                )
            elif function is None:
                builder.unsupported(node, operator, "not lowered to a PrimFunc", reads=read, writes=written)
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
    return TensorProgram.from_tvm_json(str(tvm.ir.save_json(function)), "tvm", name), ""
