"""ONNX model -> the library kernels that a framework launches for it (``backend="library"``).

No TVM is involved: each node, or group of nodes that is launched as one kernel, becomes an
:class:`~cdmpp.programs.operators.OperatorSpec`, the same one that ``linear:m=...`` gives.

What is launched as one kernel, and what is free:

* a MatMul with a matrix, followed only by adding a constant vector, is one ``linear`` with bias;
* attention written out (MatMul, scale, mask, Softmax, MatMul, with the transpositions around it) is
  one ``attention_encoder``, or ``attention_prefill`` when its constant mask is causal;
* Gelu, SiLU, layer and RMS normalisation written out are one kernel each;
* products of quantised tensors include the quantisation of their input (:mod:`.onnx_quantised`); other
  QuantizeLinear and DequantizeLinear nodes are kernels of their own;
* Reshape, Squeeze, Identity and their like only rename memory; whatever depends on weights and sizes
  alone is computed before the model runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cdmpp.errors import CdmppError
from cdmpp.programs.frontends.graph import GraphBuilder, NoRuleError, ProgramGraph
from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_model import load_onnx
from cdmpp.programs.frontends.onnx_nodes import map_node
from cdmpp.programs.frontends.onnx_patterns import find_groups
from cdmpp.programs.frontends.onnx_rules import MALFORMED, Free, NodeGroup, malformed
from cdmpp.programs.operators import make_operator
from cdmpp.programs.program import TensorProgram


def onnx_library_graph(source: str | Path | bytes, dims: Mapping[str, int] | None = None) -> ProgramGraph:
    """The programs of an ONNX model, one for each kernel that a framework launches.

    ``source``: the model. Its weights are not read, so external data files may be missing.
    ``dims``: sizes of dynamic dimensions by symbolic name (``{"batch": 1}``), or by input and axis (``{"x.0": 1}``) for
    those without one.
    Returns programs with counts, every ONNX node with what became of it, dataflow edges, and by name and number what is
    not supported.
    Raises InvalidProgramError: unreadable bytes, a contradictory graph, or a dynamic dimension that ``dims`` does not
    set.
    """
    graph = load_onnx(source, dims)
    builder = GraphBuilder(graph.name)
    fused_groups = find_groups(graph)
    groups = {node.index: group for group in fused_groups for node in group.members}
    absorbing: dict[int, list[str]] = {}
    for group in fused_groups:
        for node in group.absorbed:
            absorbing.setdefault(node.index, []).append(group.members[-1].id)
    for node in graph.nodes:
        member_of = groups.get(node.index)
        reads, writes = _names(node)
        if member_of is not None:
            _add_group(builder, node, member_of)
        elif node.index in absorbing:
            into = ", ".join(absorbing[node.index])
            builder.skip(node.id, node.label, f"fused into {into}", reads=reads, writes=writes)
        elif all(graph.is_constant(o) for o in node.outputs if o):
            why = "constant: computed before the model runs"
            builder.skip(node.id, node.label, why, reads=(), writes=writes)
        else:
            _add_node(builder, graph, node)
    return builder.build()


def _names(node: OnnxNode) -> tuple[list[str], list[str]]:
    return [i for i in (*node.inputs, *node.captured) if i], [o for o in node.outputs if o]


def _add_group(builder: GraphBuilder, node: OnnxNode, group: NodeGroup) -> None:
    """The last member launches the program, reading what the whole group reads from outside."""
    last = group.members[-1]
    if node is not last:
        builder.fused(node.id, node.label, last.id)
        return
    inner = {value for member in group.members for value in member.outputs}
    reads = [v for member in group.members for v in _names(member)[0] if v not in inner]
    writes = _names(last)[1]
    try:
        program = TensorProgram.from_operator(make_operator(group.fields))
    except CdmppError as error:
        builder.unsupported(last.id, group.label, error.message, reads=reads, writes=writes)
        return
    builder.launch(last.id, group.label, program, reads=reads, writes=writes, remark=group.remark)


def _add_node(builder: GraphBuilder, graph: OnnxGraph, node: OnnxNode) -> None:
    reads, writes = _names(node)
    try:
        outcome = map_node(graph, node)
    except NoRuleError as error:
        builder.unsupported(node.id, node.label, str(error), reads=reads, writes=writes)
        return
    except CdmppError:
        raise
    except MALFORMED as error:
        raise malformed(graph, node, error) from None
    if isinstance(outcome, Free):
        builder.skip(node.id, node.label, outcome.reason, reads=reads, writes=writes)
        return
    try:
        program = TensorProgram.from_operator(make_operator(outcome.fields))
        rest = [(suffix, TensorProgram.from_operator(make_operator(f))) for suffix, f in outcome.then]
    except CdmppError as error:
        builder.unsupported(node.id, node.label, error.message, reads=reads, writes=writes)
        return
    builder.launch(node.id, node.label, program, reads=reads, writes=writes, remark=outcome.remark)
    for suffix, then in rest:
        builder.launch(f"{node.id}/{suffix}", node.label, then, reads=writes, writes=writes)
