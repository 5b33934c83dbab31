"""ONNX's shape inference for single nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Bodies of If, Loop and Scan are inferred by ONNX at one go: only small ones, in which ranks cannot explode
#: (a Gather of a tensor with itself doubles the rank).
_MAX_BODY_NODES = 256
_MAX_BODY_GATHERS = 4
_MAX_BODY_DEPTH = 8


class OnnxRules:
    """The inference functions of an ONNX operator set.

    Parameters
    ----------
    onnx : module
    opsets : mapping of str to int
        Version by domain; the standard domain is ``""``.
    ir_version : int
        As in the model.
    """

    def __init__(self, onnx: Any, opsets: Mapping[str, int], ir_version: int) -> None:
        self._onnx = onnx
        self._imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        self._opsets = opsets
        self._ir_version = ir_version
        self._schemas: dict[tuple[str, str], Any] = {}

    def outputs(self, node: Any, types: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Types of a node's outputs; nothing for an operator without a rule.

        Parameters
        ----------
        node : onnx.NodeProto
        types : mapping of str to onnx.TypeProto
            Types of its inputs, and of the outer values that its bodies read.
        values : mapping of str to onnx.TensorProto
            Values of constant inputs, where they are known.

        Raises
        ------
        Exception
            Any error of ONNX for inputs that do not fit the operator.
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
