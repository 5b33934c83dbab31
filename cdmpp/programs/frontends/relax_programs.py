"""Relax, ONNX and ``torch.export`` models -> the fused PrimFuncs that TVM makes of them.

TVM and torch are imported on first use. An ONNX model is frozen first (static shapes, weights as inputs). Relax is
legalised and fused: one call of a PrimFunc for each kernel. The functions are as lowered, not scheduled.

A reshape launches nothing. Relax writes it as a PrimFunc that copies, but its own build pipeline
(``RewriteDataflowReshape``) turns it into a view of the same memory, as every runtime does, so a latency
would be of a kernel that nobody runs. The same analysis decides here; transposes, pads, concatenations and
broadcasts move data and stay.

Normalisations of torch programs are imported by converters of this module: TVM 0.27 takes the momentum of an
undecomposed ``batch_norm`` for its epsilon and its mode for training, and stops at a ``layer_norm`` without weights.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdmpp.errors import CdmppError, InvalidProgramError, UnsupportedOperatorError
from cdmpp.programs.frontends.exported_archive import copy_checked
from cdmpp.programs.frontends.graph import GraphBuilder, ProgramGraph
from cdmpp.programs.frontends.imports import import_torch
from cdmpp.programs.frontends.onnx_model import load_onnx, static_model
from cdmpp.programs.frontends.tir import import_tvm
from cdmpp.programs.program import TensorProgram

_HINT = "with backend 'library' each kernel that a framework launches is taken by itself, without TVM"


def onnx_tvm_graph(source: str | Path | bytes, dims: Mapping[str, int] | None = None) -> ProgramGraph:
    """The fused PrimFuncs of an ONNX model.

    ``dims``: sizes of dynamic dimensions, as for :func:`~cdmpp.programs.frontends.onnx_library.onnx_library_graph`.
    The nodes are the bindings of Relax's main function. Functions whose shapes are still dynamic, and calls that
    were not lowered to a PrimFunc, are listed as unsupported by name.
    Raises InvalidProgramError: the model cannot be read.
    Raises UnsupportedOperatorError: TVM's importer does not know an operator (the message names it), or fails on the
    graph.
    Raises MissingDependencyError: TVM or onnx is not installed.
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

    ``module``: with a Relax function ``main``, legalised or not. If its attribute ``num_input`` states how many
    parameters are inputs, the others are weights, and what depends on them alone runs beforehand.
    ``name``: what to call it in messages.
    Raises InvalidProgramError: no module, or one without a Relax function ``main``.
    Raises UnsupportedOperatorError: a pass of TVM fails on it.
    """
    tvm = import_tvm()
    if not isinstance(module, tvm.IRModule) or not any(
        v.name_hint == "main" and isinstance(f, tvm.relax.Function) for v, f in module.functions_items()
    ):
        raise InvalidProgramError(
            f"{name}: no Relax function 'main'", hint="pass a tvm.IRModule with a Relax function called main"
        )
    with importing(name):
        lowered = fused(module)
    return programs_of_fused(lowered, name)


def torch_graph(exported: Any, name: str = "torch program", *, half: bool = False) -> ProgramGraph:
    """The fused PrimFuncs of an exported torch program.

    ``exported``: static shapes; functions that keep dynamic ones are listed as unsupported. Weights are inputs of the
    programs, and what weights alone determine (a transposed weight) is computed before the model runs. ``half``: in
    float16, by TVM's mixed precision: inputs, weights, products and their sums; what TVM deems sensitive, such as a
    softmax, stays in float32. ``name``: what to call it in messages.
    Raises InvalidProgramError: not an exported program.
    Raises UnsupportedOperatorError: TVM's importer does not know an operator (the message names it), or fails on the
    graph.
    Raises MissingDependencyError: TVM or torch is not installed.
    """
    torch = import_torch()
    if not isinstance(exported, torch.export.ExportedProgram):
        raise InvalidProgramError(
            f"{name}: a {type(exported).__name__} is no exported program",
            hint="pass torch.export.export(module.eval(), inputs)",
        )
    with importing(name):
        module = relax_module(exported)[0]
        lowered = fused(_in_half(module) if half else module)
    return programs_of_fused(lowered, name)


def _in_half(module: Any) -> Any:
    from tvm.relax import transform

    inputs = [parameter.name for parameter in module["main"].params]
    # Sums in float16: TVM 0.27 fails on half of the schedules that sum in float32 ("tvm_access_ptr element type").
    return transform.ToMixedPrecision("float16", inputs)(transform.ConvertToDataflow()(module))


def relax_module(exported: Any) -> tuple[Any, list[Any]]:
    """The Relax module of an exported program with batch normalisation folded into convolutions, and its weights.

    ``main`` takes the inputs, then the weights in their order; its attribute ``num_input`` counts the inputs.
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

    Raises InvalidProgramError: the file cannot be read, holds something else, or needs more than tensors and operators:
    code of the file is never run.
    """
    torch, path = import_torch(), Path(path)
    try:
        with tempfile.TemporaryFile() as copy, _without_tracebacks():
            copy_checked(path, copy, torch)
            return torch.export.load(copy)
    except CdmppError:
        raise
    except OSError as error:
        raise InvalidProgramError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # zip, JSON and pickle each raise their own
        what = str(error).strip().splitlines()
        raise InvalidProgramError(
            f"{path.name}: not an exported torch program: {what[0][:200] if what else type(error).__name__}",
            hint="write it with torch.export.save(torch.export.export(module.eval(), inputs), path)",
        ) from None


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Silences torch's log, which has a traceback for each program that fails, beside the error."""
    log = logging.getLogger("torch")
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)
        yield
    finally:
        log.setLevel(level)


def relax_json_graph(text: str, name: str) -> ProgramGraph:
    """:func:`relax_graph` of a module as TVM JSON. Raises InvalidProgramError: as there, or TVM cannot read it."""
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
        with warnings.catch_warnings(), _without_tracebacks():  # remarks on models that are then imported
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

    def passes(*names: str) -> Any:
        return tvm.transform.Sequential([getattr(transform, name)() for name in names])

    attributes = module["main"].attrs
    if attributes and "num_input" in attributes:
        # What weights alone determine becomes a function of its own, which runs before the model does.
        module = passes("DecomposeOpsForInference", "CanonicalizeBindings", "LiftTransformParams")(module)
        module = tvm.IRModule({"main": module["main"], **_prim_funcs(tvm, module)})
    # DeadCodeElimination comes last: fusion leaves the unfused functions behind.
    return passes(
        *("DecomposeOpsForInference", "CanonicalizeBindings", "LegalizeOps", "AnnotateTIROpPattern", "FoldConstant"),
        *("FuseOps", "FuseTIR", "DeadCodeElimination"),
    )(module)


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


def _batch_norm(node: Any, importer: Any) -> Any:
    from tvm import relax

    data, *pieces = (importer.env.get(argument) for argument in node.args[:5])
    training, momentum, epsilon = node.args[5:8]
    channels, dtype = int(data.ty.shape[1]), str(data.ty.dtype)
    fill = ("ones", "zeros", "zeros", "ones")  # scale, shift, mean, variance
    filled = [
        getattr(relax.op, how)((channels,), dtype) if piece is None else piece
        for piece, how in zip(pieces, fill, strict=True)
    ]
    result = importer.block_builder.emit(
        relax.op.nn.batch_norm(data, *filled, axis=1, epsilon=epsilon, momentum=momentum, training=training)
    )
    return importer.block_builder.emit(result[0])


def _layer_norm(node: Any, importer: Any) -> Any:
    # Weight, bias and epsilon may be left out from the end.
    data, shape, scale, shift, epsilon = (*node.args, *(None, None, 1e-5)[len(node.args) - 2 :])[:5]
    env = importer.env
    pieces = (None if piece is None else env[piece] for piece in (scale, shift))
    return importer._layer_norm_impl(env[data], *pieces, epsilon, shape)


#: Operator -> how to import it, in place of TVM's own way.
CONVERTERS = {"batch_norm.default": _batch_norm, "layer_norm.default": _layer_norm}


def fold_batch_norm(function: Any) -> Any:
    """Batch normalisation becomes a factor and a bias, the factor part of the weight behind a convolution.

    Every compiler for inference does it; TVM's own pass wants the weights as constants. Both depend on
    weights alone, so that they are computed before the model runs.
    """
    from tvm import relax
    from tvm.relax import dpl

    data, weight = dpl.wildcard(), dpl.wildcard()
    before = (
        (dpl.is_op("relax.nn.conv2d")(data, weight), "OIHW"),
        (dpl.is_op("relax.nn.conv2d_transpose")(data, weight), "IOHW"),
        (dpl.wildcard(), ""),
    )
    for product, layout in before:
        statistics = [dpl.wildcard() for _ in range(4)]
        norm = dpl.is_op("relax.nn.batch_norm")(product, *statistics)

        def rewrite(
            expression: Any,
            matches: Any,
            product: Any = product,
            norm: Any = norm,
            layout: str = layout,
            statistics: Any = statistics,
        ) -> Any:
            values = [matches[pattern] for pattern in statistics]
            pair = (matches[data], matches[weight]) if layout else None
            return _folded(relax, layout, matches[product], pair, values, matches[norm].attrs, expression)

        function = dpl.rewrite_call(dpl.TupleGetItemPattern(norm, 0), rewrite, function)
    return function


def _folded(relax: Any, layout: str, product: Any, pair: Any, statistics: Any, attributes: Any, expression: Any) -> Any:
    """Replacement of a normalisation of ``product``; with a layout that is a convolution of ``pair``."""
    op, (scale, shift, mean, variance) = relax.op, statistics
    channels = shift.ty.shape[0]
    epsilon = relax.const(float(attributes["epsilon"]), str(variance.ty.dtype))
    factor = op.divide(scale, op.sqrt(op.add(variance, epsilon)))
    bias = op.subtract(shift, op.multiply(mean, factor))
    rank = len(product.ty.shape)
    if attributes["training"]:  # TVM would lower it as if it were not
        raise ValueError("batch_norm in training mode is not supported: export module.eval()")
    if attributes["axis"] != 1:
        return expression
    along = (1, channels, *[1] * (rank - 2))
    if not layout:
        return op.add(op.multiply(product, op.reshape(factor, along)), op.reshape(bias, along))
    data, weight = pair
    if product.attrs["kernel_layout"] != layout or (layout == "IOHW" and product.attrs["groups"] != 1):
        return expression
    spread = (1, channels, 1, 1) if layout == "IOHW" else (channels, 1, 1, 1)
    folded = op.multiply(weight, op.reshape(factor, spread))
    return op.add(relax.Call(product.op, (data, folded), product.attrs), op.reshape(bias, along))
