"""ONNX through Relax: fused PrimFuncs, with counts, edges and what is left over."""

import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from cdmpp.errors import InvalidProgramError, UnsupportedOperatorError
from cdmpp.programs.frontends.load import load_programs
from cdmpp.programs.frontends.relax_programs import onnx_tvm_graph
from tests.programs.frontends.onnx_models import model, weight

pytestmark = pytest.mark.tvm

EXAMPLES = Path(__file__).parents[3] / "examples"
make = helper.make_node


def test_transformer_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tvm.s_tir.tensor_intrin", raising=False)  # of another test
    graph = load_programs(EXAMPLES / "transformer_block.onnx", backend="tvm")
    assert graph.unsupported == () and graph.launches == 15 and len(graph.edges) == 15
    counts = {p.name: n for p, n in zip(graph.programs, graph.counts, strict=True)}
    assert counts["fused_matmul_add"] == 3 and counts["layer_norm"] == 2
    assert all(p.backend == "tvm" and p.tvm_json for p in graph.programs)
    assert "tvm.s_tir.tensor_intrin" not in sys.modules  # half a minute to import


def test_small_resnet_leaves_no_work_on_weights() -> None:
    graph = load_programs(EXAMPLES / "small_resnet.onnx", backend="tvm")
    assert graph.unsupported == ()
    assert sum(n for p, n in zip(graph.programs, graph.counts, strict=True) if "conv2d" in p.name) == 20
    folded = [n for n in graph.nodes if n.reason.startswith("constant")]
    assert len(folded) == 20  # the biases' reshapes
    order = {n.id: i for i, n in enumerate(graph.nodes)}
    assert all(order[a] < order[b] for a, b in graph.edges)


def test_equal_models_give_equal_hashes() -> None:
    hashes = set()
    for names in (("x", "w", "y"), ("input", "weight", "result")):
        x, w, y = names
        data = model([make("MatMul", [x, w], [y])], {x: ["n", 8]}, [y], {w: weight(8, 4)})
        from cdmpp.programs.frontends.relax_programs import onnx_tvm_graph

        (program,) = onnx_tvm_graph(data, {"n": 16}).programs
        hashes.add(program.hash)
    assert len(hashes) == 1


def test_dynamic_leftovers_are_unsupported_by_name() -> None:
    nodes = [make("NonZero", ["x"], ["i"]), make("Cast", ["i"], ["y"], to=1)]
    graph = onnx_tvm_graph(model(nodes, {"x": [4, 4]}, ["y"]))
    assert graph.programs == ()
    assert {(u.operator.split("(")[0], u.reason) for u in graph.unsupported} == {
        ("relax.call_pure_packed", "not lowered to a PrimFunc"),
        ("cast", "its shapes are dynamic"),
    }


def test_operators_that_tvm_does_not_import() -> None:
    with pytest.raises(UnsupportedOperatorError, match="Det"):
        onnx_tvm_graph(model([make("Det", ["x"], ["y"])], {"x": [4, 4]}, ["y"]))
    with pytest.raises(InvalidProgramError, match="not an ONNX model"):
        onnx_tvm_graph(b"nonsense")


def test_weights_are_transposed_beforehand() -> None:
    constants = {"w": weight(16, 8), "c": weight(16)}
    data = model([make("Gemm", ["x", "w", "c"], ["y"], transB=1)], {"x": [4, 8]}, ["y"], constants)
    assert [p.name for p in onnx_tvm_graph(data).programs] == ["fused_matmul_add"]
    pair = [make("Split", ["x"], ["a", "b"], axis=1, num_outputs=2), make("Add", ["a", "b"], ["y"])]
    assert onnx_tvm_graph(model(pair, {"x": [4, 8]}, ["y"])).counts == (1,)


def test_small_constants_keep_their_values() -> None:
    nodes = [make("Reshape", ["x", "shape"], ["h"]), make("Relu", ["h"], ["y"])]
    graph = onnx_tvm_graph(model(nodes, {"x": [4, 6]}, ["y"], {"shape": np.asarray([2, -1])}))
    assert graph.launches == 1 and "[2" not in graph.programs[0].name
