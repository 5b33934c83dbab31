"""Static shapes of an ONNX graph: ONNX's own inference, and the folding that it needs to get through."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cdmpp.errors import InvalidProgramError
from cdmpp.frontends.onnx_graph import OnnxGraph

if TYPE_CHECKING:
    import onnx

#: Initializers up to this many elements stay in the model that shapes are inferred on.
SMALL_TENSOR = 4096
#: Rounds of "infer shapes, evaluate what became constant"; real models need one to three.
MAX_ROUNDS = 12

CHECK_HINT = "check the model with onnx.checker.check_model(path, full_check=True)"
#: What inference says of a node behind one that it knows nothing of: no contradiction.
_UNKNOWN_INPUT = "expected to have type but instead is null"


def stripped_model(model: onnx.ModelProto, onnx: Any) -> onnx.ModelProto:
    """The model with large initializers as typed inputs: small enough to infer shapes on, at any size."""
    stripped: onnx.ModelProto = onnx.ModelProto()
    stripped.ir_version = model.ir_version
    stripped.opset_import.extend(model.opset_import)
    graph = stripped.graph
    graph.name = "model"
    graph.node.extend(model.graph.node)
    named = {i.name for i in model.graph.initializer}
    graph.input.extend(i for i in model.graph.input if i.name not in named)
    for tensor in model.graph.initializer:
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if external or math.prod(tensor.dims) > SMALL_TENSOR or not (tensor.dims or _has_data(tensor)):
            graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
        else:
            graph.initializer.append(tensor)
    # Declared shapes of inner values and outputs may be symbolic; they are inferred anew.
    for output in model.graph.output:
        kept = graph.output.add()
        kept.name = output.name
        if output.type.HasField("tensor_type"):
            kept.type.tensor_type.elem_type = output.type.tensor_type.elem_type
    return stripped


def _has_data(tensor: onnx.TensorProto) -> bool:
    return bool(
        tensor.raw_data or tensor.float_data or tensor.int32_data or tensor.int64_data
        or tensor.double_data or tensor.uint64_data
    )  # fmt: skip


def infer_shapes(model: onnx.ModelProto, graph: OnnxGraph, declared: Mapping[str, Any], onnx: Any) -> None:
    """Fill in the graph's shapes and types, folding constants until nothing more becomes known.

    Parameters
    ----------
    model : onnx.ModelProto
        What :func:`stripped_model` made; folded constants are written into it.
    graph : OnnxGraph
        Receives shapes and types.
    declared : mapping of str to onnx.ValueInfoProto
        Static shapes by the exporter's word, used only where inference does not get any further (for an
        operator of another domain, or one that ONNX has no inference for).

    Raises
    ------
    InvalidProgramError
        The shapes contradict each other.
    """
    folded: set[str] = set()
    for _ in range(MAX_ROUNDS):
        inferred, complaint = _infer_once(model, onnx, graph.name)
        graph.set_types(_types(inferred, onnx))
        unknown = {o for n in graph.nodes for o in n.outputs if o and graph.shape(o) is None}
        if not unknown:
            return
        fresh = _fold_small(graph, folded)
        if fresh:
            _write_constants(model, fresh, onnx)
            folded |= set(fresh)
            continue
        told = [declared[name] for name in unknown if name in declared]
        if complaint and _UNKNOWN_INPUT not in complaint:
            raise InvalidProgramError(f"{graph.name}: {complaint}", hint=CHECK_HINT)
        if not told:
            return
        declared = {}
        outputs = {o.name for o in model.graph.output}
        model.graph.value_info.extend(info for info in told if info.name not in outputs)
        for output in model.graph.output:
            output.CopyFrom(next((info for info in told if info.name == output.name), output))


def _write_constants(model: onnx.ModelProto, values: Mapping[str, Any], onnx: Any) -> None:
    """Replace nodes, or inputs without a value, by initializers."""
    kept = [n for n in model.graph.node if not set(n.output) & set(values)]
    inputs = [i for i in model.graph.input if i.name not in values]
    del model.graph.node[:], model.graph.input[:]
    model.graph.node.extend(kept)
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in values.items()
    )


def _infer_once(model: onnx.ModelProto, onnx: Any, name: str) -> tuple[onnx.ModelProto, str]:
    try:
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True), ""
    except Exception as error:
        complaint = first_line(error)
    try:  # an operator outside the standard leaves unknown shapes behind, but is no fault of the model
        return onnx.shape_inference.infer_shapes(model, strict_mode=False, data_prop=True), complaint
    except Exception as error:
        raise InvalidProgramError(f"{name}: {first_line(error)}", hint=CHECK_HINT) from None


def _types(model: onnx.ModelProto, onnx: Any) -> dict[str, tuple[int, tuple[int, ...] | None]]:
    types: dict[str, tuple[int, tuple[int, ...] | None]] = {}
    for value in [*model.graph.value_info, *model.graph.output, *model.graph.input]:
        tensor = value.type.tensor_type
        if not value.type.HasField("tensor_type"):
            continue
        shape: tuple[int, ...] | None = None
        if tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim):
            shape = tuple(d.dim_value for d in tensor.shape.dim)
        types[value.name] = (tensor.elem_type, shape)
    for tensor in model.graph.initializer:
        types[tensor.name] = (tensor.data_type, tuple(tensor.dims))
    return types


def _fold_small(graph: OnnxGraph, replaced: set[str]) -> dict[str, Any]:
    """Values of constant nodes that shapes may depend on and that shape inference does not know yet."""
    fresh: dict[str, Any] = {}
    for tensor in graph.initializers.values():
        external = tensor.name not in replaced and tensor.data_location == tensor.EXTERNAL
        if external and tensor.data_type in (tensor.INT32, tensor.INT64):
            value = graph.value(tensor.name, SMALL_TENSOR)
            if value is not None:
                fresh[tensor.name] = value
    for node in graph.nodes:
        if node.op == "Constant" or len(node.outputs) != 1 or node.outputs[0] in replaced:
            continue
        name = node.outputs[0]
        if graph.dtype(name) == "bfloat16":  # evaluated as float32: would change the type
            continue
        if graph.is_constant(name) and (value := graph.value(name, SMALL_TENSOR)) is not None:
            fresh[name] = value
    return fresh


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
