"""Static shapes of an ONNX graph: ONNX's own rules, and the folding that they need to get through."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.elements import MAX_ELEMENTS
from cdmpp.programs.frontends.onnx_contrib import contrib_types
from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode

if TYPE_CHECKING:
    import onnx


#: Initializers up to this many elements stay in the model that shapes are inferred on.
SMALL_TENSOR = 4096
#: Maximum number of dimensions of a tensor.
MAX_RANK = 64

CHECK_HINT = "check the model with onnx.checker.check_model(path, full_check=True)"


def refused(model: object, problem: str, hint: str = CHECK_HINT) -> InvalidProgramError:
    """The error for a model that cannot be read."""
    return InvalidProgramError(f"{model}: {problem}", hint=hint)


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
        has_data = any(
            getattr(tensor, f"{kind}_data") for kind in ("raw", "float", "int32", "int64", "double", "uint64")
        )
        if external or math.prod(tensor.dims) > SMALL_TENSOR or not (tensor.dims or has_data):
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            graph.initializer.append(tensor)
    # Declared shapes of inner values and outputs may be symbolic; they are inferred anew.
    for output in model.graph.output:
        kept = graph.output.add()
        kept.name = output.name
        if output.type.HasField("tensor_type"):
            kept.type.tensor_type.elem_type = output.type.tensor_type.elem_type
    return stripped


def infer_shapes(model: onnx.ModelProto, graph: OnnxGraph, declared: Mapping[str, Any], onnx: Any) -> None:
    """Fill in the graph's shapes and types, node by node, folding the small constants that sizes come from.

    ONNX infers one node at a time, with the values that :class:`OnnxGraph` could compute. Its own propagation of values
    through a whole graph has no bound: 32 ``Concat`` nodes of a tensor with itself would build a list of 2^32 numbers.

    ``model``: of :func:`stripped_model`, with the nodes of ``graph``. ``declared``: static shapes by the exporter's
    word, used only where inference does not get any further (for an operator of another domain, or one that ONNX has no
    inference for).
    Raises InvalidProgramError: the shapes contradict each other, or a tensor exceeds the size limit.
    """
    opsets = {o.domain if o.domain != "ai.onnx" else "": o.version for o in model.opset_import}
    rules = OnnxRules(onnx, opsets, model.ir_version)
    types: dict[str, Any] = {}

    def learn(name: str, kind: Any) -> None:
        types[name] = kind
        if kind.HasField("tensor_type"):
            shape = static_shape(kind)
            _check_size(graph.name, name, shape)
            graph.set_type(name, kind.tensor_type.elem_type, shape)

    for value in model.graph.input:
        learn(value.name, value.type)
    for tensor in model.graph.initializer:
        learn(tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
    for proto, node in zip(model.graph.node, graph.nodes, strict=True):
        graph.settle(node)
        inputs = {name: types.get(name, onnx.TypeProto()) for name in (*node.inputs, *node.captured) if name}
        values = _small_values(graph, node, onnx)
        try:
            inferred = rules.outputs(proto, inputs, values)
        except Exception as error:
            # Behind a node that nothing is known of there is no rule to break.
            if all(inputs[name].WhichOneof("value") for name in node.inputs if name):
                raise refused(graph.name, first_line(error)) from None
            inferred = {}
        for name, (elem_type, shape) in contrib_types(graph, node).items():
            inferred = {**inferred, name: onnx.helper.make_tensor_type_proto(elem_type, list(shape))}
        for name in filter(None, node.outputs):
            kind = inferred.get(name, onnx.TypeProto())
            if not kind.WhichOneof("value") or (kind.HasField("tensor_type") and static_shape(kind) is None):
                kind = declared[name].type if name in declared else _folded_type(graph, name, kind, onnx)
            learn(name, kind)


def _check_size(model: str, name: str, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        return
    if len(shape) > MAX_RANK:
        raise refused(model, f"tensor {name!r} has {len(shape)} dimensions", f"at most {MAX_RANK} are read")
    if min(shape, default=0) < 0:
        raise refused(model, f"tensor {name!r} has a negative size")
    if (elements := math.prod(shape)) > MAX_ELEMENTS:
        raise refused(
            model,
            f"tensor {name!r} has 2^{math.log2(elements):.1f} elements",
            "at most 2^48 elements are believed; check the sizes",
        )


def _small_values(graph: OnnxGraph, node: OnnxNode, onnx: Any) -> dict[str, Any]:
    """Values of a node's constant inputs that its output's shape may depend on, as tensors."""
    values = {}
    for name in filter(None, node.inputs):
        # Sizes, axes and the like are whole numbers; floating-point scales are as few as a shape's axes.
        integer = graph.dtype(name) in ("int64", "int32")
        if not graph.is_constant(name) or graph.dtype(name) == "bfloat16":
            continue
        value = graph.value(name, SMALL_TENSOR if integer else MAX_RANK)
        if value is not None:
            values[name] = onnx.numpy_helper.from_array(value, name)
    return values


def _folded_type(graph: OnnxGraph, name: str, kind: Any, onnx: Any) -> Any:
    """The type of a constant that can be computed though ONNX has no rule for its shape."""
    value = graph.value(name, SMALL_TENSOR) if graph.is_constant(name) else None
    if value is None:
        return kind
    elem_type = kind.tensor_type.elem_type or onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    return onnx.helper.make_tensor_type_proto(elem_type, list(value.shape))


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


#: Bodies of If, Loop and Scan are inferred by ONNX at one go: only small ones, in which ranks cannot explode
#: (a Gather of a tensor with itself doubles the rank).
_MAX_BODY_NODES = 256
_MAX_BODY_GATHERS = 4
_MAX_BODY_DEPTH = 8


class OnnxRules:
    """The inference functions of an ONNX operator set, by the version of each domain; the standard domain is ``""``."""

    def __init__(self, onnx: Any, opsets: Mapping[str, int], ir_version: int) -> None:
        self._onnx = onnx
        self._imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        self._opsets = opsets
        self._ir_version = ir_version
        self._schemas: dict[tuple[str, str], Any] = {}

    def outputs(self, node: Any, types: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Types of a node's outputs; nothing for an operator without a rule.

        ``types``: types of its inputs, and of the outer values that its bodies read.
        ``values``: values of constant inputs, where they are known.
        Raises Exception: any error of ONNX for inputs that do not fit the operator.
        """
        schema = self._schema(node.domain if node.domain != "ai.onnx" else "", node.op_type)
        if schema is None or not _bodies_are_small(node):
            return {}
        inference = self._onnx.shape_inference
        if not schema.has_type_and_shape_inference_function:
            # The body is ONNX's own, so following values through it is safe.
            return self._alone(node, types, values, data_prop=True) if schema.has_function else {}
        try:
            inferred: dict[str, Any] = inference.infer_node_outputs(
                schema, node, types, values, opset_imports=self._imports, ir_version=self._ir_version
            )
        except self._onnx.checker.ValidationError:  # such as an attribute too many: no obstacle to a shape
            return self._alone(node, types, values, data_prop=False)
        return inferred

    def _schema(self, domain: str, op: str) -> Any:
        key = (domain, op)
        if key not in self._schemas:
            try:
                self._schemas[key] = self._onnx.defs.get_schema(op, self._opsets.get(domain, 1), domain)
            except self._onnx.defs.SchemaError:
                self._schemas[key] = None
        return self._schemas[key]

    def _alone(
        self, node: Any, types: Mapping[str, Any], values: Mapping[str, Any], *, data_prop: bool
    ) -> dict[str, Any]:
        """A model of this node alone: ONNX does not check it, and looks into the operator's function body."""
        make = self._onnx.helper
        known = [name for name, kind in types.items() if name not in values and kind.WhichOneof("value")]
        inputs = [make.make_value_info(name, types[name]) for name in known]
        outputs = [self._onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = make.make_graph([node], "node", inputs, outputs, [*values.values()])
        model = make.make_model(graph, opset_imports=self._imports, ir_version=self._ir_version)
        inferred = self._onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=data_prop)
        return {output.name: output.type for output in inferred.graph.output}


def static_shape(kind: Any) -> tuple[int, ...] | None:
    """The shape of a tensor's TypeProto, or None when it is not wholly known."""
    tensor = kind.tensor_type
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in tensor.shape.dim):
        return None
    return tuple(d.dim_value for d in tensor.shape.dim)


def _bodies_are_small(node: Any) -> bool:
    nodes = gathers = 0
    stack = [(node, 0)]
    while stack:
        current, depth = stack.pop()
        for attribute in current.attribute:
            for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                nodes += len(body.node)
                gathers += sum(inner.op_type in ("Gather", "GatherND") for inner in body.node)
                if nodes > _MAX_BODY_NODES or gathers > _MAX_BODY_GATHERS or depth >= _MAX_BODY_DEPTH:
                    return False
                stack += [(inner, depth + 1) for inner in body.node]
    return True
