"""Reading of ONNX models into a plain graph with static shapes; the bytes are untrusted.

The weights' values are not needed for a latency and are not read: external data may be missing as
long as no size depends on it. :func:`static_model` writes a graph back for other importers.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.errors import InvalidProgramError, MissingDependencyError, install_hint
from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_shapes import SMALL_TENSOR, first_line, infer_shapes, refused, stripped_model
from cdmpp.utils.files import read_bytes

if TYPE_CHECKING:
    import onnx


#: Protobuf itself ends at 2 GB; a model beyond it keeps its weights in external files.
MAX_BYTES = (1 << 31) - 1
MAX_NODES = 100_000


def load_onnx(source: str | Path | bytes, dims: Mapping[str, int] | None = None) -> OnnxGraph:
    """Parse, check and freeze a model, a file or its content.

    ``dims``: a size for each dynamic dimension: by its symbolic name (``{"batch": 1}``), or, for one without a name, by
    input and axis (``{"x.0": 1}``).
    Raises InvalidProgramError: not an ONNX model, truncated, contradictory, or with a dynamic dimension that ``dims``
    does not set.
    Raises MissingDependencyError: the ``onnx`` package is not installed.
    """
    onnx = import_onnx()
    model, folder, name = _read(source, onnx)
    if model.functions:
        model = _inline(model, onnx, name)
    if len(model.graph.node) > MAX_NODES:
        raise refused(name, f"{len(model.graph.node)} nodes", f"at most {MAX_NODES} nodes are read")
    initializers = {t.name: t for t in model.graph.initializer}
    if model.graph.sparse_initializer:
        raise refused(name, "sparse initializers are not read", "export the model with dense weights")
    _freeze_inputs(model, initializers, dict(dims or {}), onnx, name)
    _check_names(model, initializers, name)
    _check_attributes(model, onnx, name)
    stripped = stripped_model(model, onnx)
    outputs = [o.name for o in model.graph.output]
    graph = OnnxGraph(_nodes(stripped, onnx), initializers, outputs, folder, name)
    infer_shapes(stripped, graph, _declared(model, dims or {}), onnx)
    graph.model = stripped
    return graph


def import_onnx() -> Any:
    """Import ``onnx``, or raise an error with the install command."""
    try:
        import onnx
        import onnx.shape_inference
    except ImportError as error:
        raise MissingDependencyError(
            "reading an ONNX model needs the onnx package", hint=f"{install_hint('predict')}, or: pip install onnx"
        ) from error
    return onnx


def _read(source: str | Path | bytes, onnx: Any) -> tuple[onnx.ModelProto, Path | None, str]:
    if isinstance(source, bytes):
        data, folder, name = source, None, "ONNX model"
    else:
        path = Path(source)
        folder, name = path.parent, path.name
        try:
            data = read_bytes(path, MAX_BYTES)
        except OSError as error:
            large = "save large models with external data: onnx.save(..., save_as_external_data=True)"
            raise refused(
                path,
                f"cannot be read: {error.strerror or error}",
                large if error.errno == errno.EFBIG else "give the path of an .onnx file",
            ) from None
    hint = "export the model again; a download may have been cut off"
    if not data:
        raise refused(name, "the file is empty", hint)
    model: onnx.ModelProto = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        what = f"{name}: not an ONNX model, or truncated ({len(data)} bytes)"
        raise InvalidProgramError(what, hint=hint) from None
    # Protobuf reads many a random byte string as a message of unknown fields.
    if not model.ir_version or not model.opset_import or not model.graph.output:
        raise refused(name, "not an ONNX model: no version, operator set or output", hint)
    return model, folder, name


def _inline(model: onnx.ModelProto, onnx: Any, name: str) -> onnx.ModelProto:
    """Replace calls of model-local functions by their bodies, after bounding the result's size."""
    from onnx import inliner

    bodies = {(f.domain, f.name): f.node for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(key: tuple[str, str], above: frozenset[tuple[str, str]]) -> int:
        if key in above or len(above) > 64:
            raise refused(name, f"function {key[1]} calls itself, or is nested too deeply")
        if key not in sizes:
            sizes[key] = sum(
                size(inner, above | {key}) if (inner := (n.domain, n.op_type)) in bodies else 1 for n in bodies[key]
            )
        return sizes[key]

    total = 0
    for node in model.graph.node:
        key = (node.domain, node.op_type)
        total += size(key, frozenset()) if key in bodies else 1
    if total > MAX_NODES:
        raise refused(name, f"{total} nodes", f"at most {MAX_NODES} nodes are read")
    try:
        inlined: onnx.ModelProto = inliner.inline_local_functions(model)
    except Exception as error:
        raise refused(name, first_line(error)) from None
    return inlined


def _freeze_inputs(
    model: onnx.ModelProto, initializers: Mapping[str, Any], dims: dict[str, int], onnx: Any, name: str
) -> None:
    for key, value in dims.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise InvalidProgramError(f"dimension {key}={value!r} is not a positive whole number")
    dynamic: dict[str, str] = {}
    known: set[str] = set()
    for value_info in model.graph.input:
        if value_info.name in initializers:
            continue
        kind = value_info.type
        if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
            raise refused(
                name,
                f"input {value_info.name!r} is not a tensor with a shape",
                "export the model with fixed input shapes",
            )
        for axis, dim in enumerate(kind.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value > 0:
                continue
            label = dim.dim_param or f"{value_info.name}.{axis}"
            known.add(label)
            if dim.HasField("dim_value") and dim.dim_value == 0:
                raise refused(
                    name,
                    f"input {value_info.name!r} has a dimension of 0 (axis {axis})",
                    "export the model with a batch of at least 1",
                )
            if label in dims:
                dim.dim_value = dims[label]
            else:
                dynamic.setdefault(label, f"{label} (input {value_info.name!r}, axis {axis})")
    if dynamic:
        wanted = ", ".join(f"{label!r}: 1" for label in dynamic)
        raise InvalidProgramError(
            f"{name}: dynamic dimensions without a size: {'; '.join(dynamic.values())}",
            hint=f"a latency needs sizes: pass dims={{{wanted}}} (command line: --dim "
            f"{next(iter(dynamic))}=1), or export with static shapes",
        )
    if unknown := sorted(set(dims) - known):
        raise InvalidProgramError(
            f"{name}: no dynamic dimension named {', '.join(map(repr, unknown))}",
            hint=f"its dynamic dimensions: {', '.join(sorted(known)) or 'none, all shapes are static'}",
        )


def _check_names(model: onnx.ModelProto, initializers: Mapping[str, Any], name: str) -> None:
    """Every value is written once, before it is read: what the graph walk below relies on."""
    defined = set(initializers) | {i.name for i in model.graph.input}
    for node in model.graph.node:
        # Protobuf hands out text that is not UTF-8 as bytes.
        if not all(isinstance(t, str) for t in (node.op_type, node.name, node.domain, *node.input, *node.output)):
            raise refused(name, "a node's name is not text")
        for value in node.input:
            if value and value not in defined:
                raise refused(name, f"node {node.name or node.op_type!r} reads {value!r}, which nothing wrote")
        for value in node.output:
            if value and value in defined:
                raise refused(name, f"value {value!r} is written twice")
            defined.add(value)
    for output in model.graph.output:
        if output.name not in defined:
            raise refused(name, f"nothing writes the output {output.name!r}")


def _check_attributes(model: onnx.ModelProto, onnx: Any, name: str) -> None:
    """Check that attributes have the types of the operator's definition: the mapping rules rely on it."""
    opset = {o.domain or "ai.onnx": o.version for o in model.opset_import}
    version = opset.get("ai.onnx", 0)
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type):
            continue
        try:
            schema = onnx.defs.get_schema(node.op_type, version)
        except onnx.defs.SchemaError:  # not in this operator set; it will be unsupported
            continue
        given = {attribute.name: attribute.type for attribute in node.attribute}
        counts = [attribute.i for attribute in node.attribute if attribute.name == "num_outputs"]
        if counts and counts[0] != len(node.output):  # shape inference would allocate that many
            raise refused(name, f"{node.op_type} with {counts[0]} outputs")
        for key, declared in schema.attributes.items():
            if key not in given and declared.required:
                what = "lacks"
            elif key in given and given[key] != declared.type.value:
                what = "has the wrong type of"
            else:
                continue
            raise refused(name, f"node {node.name or node.op_type!r} {what} attribute {key!r}")


def _nodes(model: onnx.ModelProto, onnx: Any) -> list[OnnxNode]:
    taken: set[str] = set()
    nodes = []
    opset = {o.domain or "ai.onnx": o.version for o in model.opset_import}
    for index, proto in enumerate(model.graph.node):
        node_id = proto.name if proto.name and proto.name not in taken else f"{proto.op_type}_{index}"
        while node_id in taken:
            node_id += "_"
        taken.add(node_id)
        attrs: dict[str, Any] = {}
        captured: list[str] = []
        for attribute in proto.attribute:
            if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
                attrs[attribute.name] = None
                for body in [attribute.g, *attribute.graphs]:
                    captured += _captured(body, depth=0)
            elif attribute.type in (onnx.AttributeProto.TENSOR, onnx.AttributeProto.SPARSE_TENSOR):
                attrs[attribute.name] = attribute.t  # decoded on demand, under a size limit
            else:
                value = onnx.helper.get_attribute_value(attribute)
                is_text = isinstance(value, bytes)
                attrs[attribute.name] = value.decode("utf-8", "replace") if is_text else value
        domain = "" if proto.domain in ("", "ai.onnx") else proto.domain
        nodes.append(
            OnnxNode(
                index,
                node_id,
                proto.op_type,
                domain,
                tuple(proto.input),
                tuple(proto.output),
                attrs,
                tuple(captured),
                opset.get(domain or "ai.onnx", 1),
            )
        )
    return nodes


def _captured(body: onnx.GraphProto, depth: int) -> list[str]:
    """Values that an If or Loop body may read from outside."""
    names = [value for node in body.node for value in node.input] + [o.name for o in body.output]
    if depth < 32:
        for node in body.node:
            for attribute in node.attribute:
                for inner in [attribute.g, *attribute.graphs]:
                    names += _captured(inner, depth + 1)
    return names


def _declared(model: onnx.ModelProto, dims: Mapping[str, int]) -> dict[str, Any]:
    """Shapes that the exporter wrote down for inner values, where ``dims`` make them static."""
    declared = {}
    for info in [*model.graph.value_info, *model.graph.output]:
        if not info.type.HasField("tensor_type") or not info.type.tensor_type.HasField("shape"):
            continue
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]
        if all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in info.type.tensor_type.shape.dim):
            declared[info.name] = info
    return declared


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
