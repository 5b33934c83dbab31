"""An ONNX graph written back as a model that other importers take: static, folded, without weights."""

from __future__ import annotations

from typing import Any

from cdmpp.programs.frontends.onnx_graph import OnnxGraph
from cdmpp.programs.frontends.onnx_model import import_onnx
from cdmpp.programs.frontends.onnx_shapes import SMALL_TENSOR

#: bfloat16 constants are evaluated as float32, and would change the type of what reads them.
_BFLOAT16 = 16


def static_model(graph: OnnxGraph) -> Any:
    """An ``onnx.ModelProto`` of the nodes that run: weights are inputs, small constants initializers.

    Constants are computed beforehand, as a runtime would: a transposed weight is an input of the
    transposed shape, a ``Gemm`` with ``transB`` on a weight reads it ready transposed.
    """
    onnx = import_onnx()
    source = graph.model
    model = onnx.ModelProto()
    model.ir_version = source.ir_version
    model.opset_import.extend(source.opset_import)
    model.graph.name = source.graph.name
    inputs = {i.name: i for i in source.graph.input}
    model.graph.input.extend(i for name, i in inputs.items() if not graph.is_constant(name))
    constants: dict[str, None] = {}
    for node in source.graph.node:
        if all(graph.is_constant(o) for o in node.output if o):
            continue
        copy = model.graph.node.add()
        copy.CopyFrom(node)
        if node.op_type == "Gemm" and not node.domain:
            _transpose_weight(copy, graph, model, onnx)
        constants.update((i, None) for i in copy.input if i and graph.is_constant(i))
    for name in constants:
        _constant(name, graph, model, onnx)
    for output in source.graph.output:
        if not graph.is_constant(output.name):
            info = onnx.helper.make_tensor_value_info
            elem_type, shape = graph.elem_type(output.name), graph.shape(output.name)
            # ONNX's checker, which TVM's importer calls, refuses values without a shape.
            named = shape if shape is not None else [f"{output.name}.dynamic"]
            model.graph.output.append(info(output.name, elem_type, named) if elem_type else output)
    return model


def _transpose_weight(node: Any, graph: OnnxGraph, model: Any, onnx: Any) -> None:
    flag = next((a for a in node.attribute if a.name == "transB"), None)
    shape = graph.shape(node.input[1])
    if flag is None or not flag.i or not shape or not graph.is_constant(node.input[1]):
        return
    name = f"{node.input[1]}.transposed"
    if all(i.name != name for i in model.graph.input):
        elem_type = graph.elem_type(node.input[1])
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, elem_type, [*reversed(shape)]))
    node.input[1], flag.i = name, 0


def _constant(name: str, graph: OnnxGraph, model: Any, onnx: Any) -> None:
    elem_type = graph.elem_type(name)
    value = graph.value(name, SMALL_TENSOR) if elem_type != _BFLOAT16 else None
    # Floating-point vectors are weights; scalars may steer the importer (exponents, scales, epsilons).
    if value is not None and (value.dtype.kind in "iub" or value.size == 1):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    else:
        shape = graph.shape(name)
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, elem_type, shape))
