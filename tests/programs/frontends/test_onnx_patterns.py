"""Groups of ONNX nodes that are launched as one kernel."""

import math
from typing import Any

import numpy as np
import pytest
from onnx import helper

from cdmpp.programs.frontends.onnx_library import onnx_library_graph
from cdmpp.programs.operators import parse_operator
from tests.programs.frontends.onnx_models import attention, model, scalar, texts, weight

make = helper.make_node


def only(text: str) -> dict[str, int]:
    return {parse_operator(text).text(): 1}


def low(shape: tuple[int, int], offset: int = 0) -> np.ndarray[Any, Any]:
    """Additive causal mask."""
    return np.where(np.tril(np.ones(shape, bool), offset), 0.0, -1e9).astype(np.float32)


def test_attention_is_one_program() -> None:
    graph = onnx_library_graph(attention())
    assert texts(graph) == only("attention_encoder:batch=2,heads=4,kv_heads=4,q_len=8,head_dim=16")
    (node,) = [n for n in graph.nodes if n.program is not None]
    assert node.id == "out_t" and "Softmax" in node.operator
    assert all(n.reason == "fused into out_t" for n in graph.nodes if n.program is None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mask": low((8, 8))}, "attention_prefill:kv_heads=4,q_len=8"),
        ({"mask": low((8, 8))[None, None]}, "attention_prefill:kv_heads=4,q_len=8"),
        ({"condition": np.tril(np.ones((8, 8), bool))}, "attention_prefill:kv_heads=4,q_len=8"),
        ({"mask": low((8, 12), 4), "k_len": 12}, "attention_prefill:kv_heads=4,q_len=8,past_len=4"),
        ({"mask": np.zeros((8, 8), np.float32)}, "attention_encoder:kv_heads=4,q_len=8"),
        ({"mask": low((8, 8)).T}, "attention_encoder:kv_heads=4,q_len=8"),
        ({"q_len": 1, "k_len": 9}, "attention_decode:kv_heads=4,q_len=1,past_len=8"),
        ({"kv_heads": 2}, "attention_encoder:kv_heads=2,q_len=8"),
    ],
)
def test_masks_caches_and_grouped_heads(options: dict[str, Any], text: str) -> None:
    assert texts(onnx_library_graph(attention(**options))) == only(f"{text},batch=2,heads=4,head_dim=16")


def test_attention_whose_scores_are_read_elsewhere_stays_apart() -> None:
    nodes = [make("MatMul", ["q", "k"], ["s"]), make("Softmax", ["s"], ["p"]), make("MatMul", ["p", "v"], ["y"])]
    inputs = {"q": [2, 4, 8, 16], "k": [2, 4, 16, 8], "v": [2, 4, 8, 16]}
    assert list(texts(onnx_library_graph(model(nodes, inputs, ["y"])))) == list(
        only("attention_encoder:batch=2,heads=4,kv_heads=4,q_len=8,head_dim=16")
    )
    apart = texts(onnx_library_graph(model(nodes, inputs, ["y", "p"])))
    assert [t.split(":")[0] for t in apart] == ["bmm", "softmax", "bmm"]


#: Nodes as text: an operator and its operands, each a constant, the input x, or the number of an earlier node.
GELU = {
    "erf, half last": "Div x root2; Erf 0; Add 1 one; Mul x 2; Mul 3 half",
    "erf, half on x": "Mul x root_half; Erf 0; Add one 1; Mul x half; Mul 3 2",
    "tanh": "Pow x three; Mul 0 c; Add x 1; Mul 2 pi; Tanh 3; Add 4 one; Mul x half; Mul 6 5",
    "tanh, products": "Mul x x; Mul 0 x; Mul c 1; Add 2 x; Mul pi 3; Tanh 4; Add one 5; Mul half 6; Mul 7 x",
}
SCALARS = {
    "root2": math.sqrt(2),
    "root_half": math.sqrt(0.5),
    "one": 1.0,
    "half": 0.5,
    "three": 3.0,
    "c": 0.044715,
    "pi": math.sqrt(2 / math.pi),
    "two": 2.0,
    "eps": 1e-5,
}


def chain(text: str, shape: list[int], **constants: Any) -> bytes:
    """A model of one input ``x``, whose nodes are given as text."""
    steps = [step.split() for step in text.split("; ")]
    nodes = []
    for index, (op, *operands) in enumerate(steps):
        names = [f"t{o}" if o.isdigit() else o for o in operands]
        out = "y" if index == len(steps) - 1 else f"t{index}"
        nodes.append(make(op, names, [out], f"n{index}", **({"axes": [-1]} if op == "ReduceMean" else {})))
    used = {name for _, *operands in steps for name in operands}
    known = {**{k: scalar(v) for k, v in SCALARS.items()}, **constants}
    return model(nodes, {"x": shape}, ["y"], {k: v for k, v in known.items() if k in used}, opset=17)


@pytest.mark.parametrize("steps", GELU.values(), ids=GELU.keys())
def test_gelu_written_out(steps: str) -> None:
    assert texts(onnx_library_graph(chain(steps, [3, 5, 7]))) == only("gelu:rows=15,cols=7")


def test_other_constants_are_no_gelu() -> None:
    result = texts(onnx_library_graph(chain("Div x two; Erf 0; Add 1 one; Mul x 2; Mul 3 half", [3, 5])))
    assert [t.split(":")[0] for t in result] == ["div_scalar", "erf", "add_scalar", "mul", "mul_scalar"]


def test_silu_written_out() -> None:
    graph = onnx_library_graph(chain("Sigmoid x; Mul x 0", [3, 5]))
    assert texts(graph) == only("silu:rows=3,cols=5")


LAYER = "ReduceMean x; Sub x 0; Pow 1 two; ReduceMean 2; Add 3 eps; Sqrt 4; Div 1 5"
RMS = "Mul x x; ReduceMean 0; Add 1 eps; Sqrt 2; Div one 3; Mul x 4"


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (LAYER, "layernorm:rows=15,cols=7"),
        (LAYER + "; Mul 6 w; Add 7 b", "layernorm:rows=15,cols=7"),
        (RMS, "rmsnorm:rows=15,cols=7"),
        (RMS + "; Mul w 5", "rmsnorm:rows=15,cols=7"),
    ],
)
def test_norms_written_out(steps: str, text: str) -> None:
    assert texts(onnx_library_graph(chain(steps, [3, 5, 7], w=weight(7), b=weight(7)))) == only(text)


def test_matmul_and_constant_vector_are_one_linear() -> None:
    graph = onnx_library_graph(chain("MatMul x w; Add b 0; Relu 1", [3, 5, 7], w=weight(7, 9), b=weight(9)))
    assert list(texts(graph)) == [
        parse_operator("linear:m=15,n=9,k=7,bias=true").text(),
        parse_operator("relu:rows=15,cols=9").text(),
    ]
    assert graph.edges == (("n1", "n2"),)


def test_matmul_and_constant_matrix_are_two() -> None:
    graph = onnx_library_graph(chain("MatMul x w; Add 0 b", [3, 5, 7], w=weight(7, 9), b=weight(5, 9)))
    assert [t.split(":")[0] for t in texts(graph)] == ["linear", "add"]


def test_edges_pass_through_free_nodes_and_counts_add_up() -> None:
    nodes = [
        make("Relu", ["x"], ["a"], "first"),
        make("Reshape", ["a", "shape"], ["b"], "view"),
        make("Relu", ["a"], ["c"], "second"),
        make("Reshape", ["c", "shape"], ["d"], "view2"),
        make("Add", ["b", "d"], ["y"], "sum"),
    ]
    graph = onnx_library_graph(model(nodes, {"x": [4, 6]}, ["y"], {"shape": np.asarray([6, 4])}))
    assert graph.counts == (2, 1) and graph.launches == 3
    assert set(graph.edges) == {("first", "second"), ("first", "sum"), ("second", "sum")}
    assert [n.program for n in graph.nodes] == [0, None, 0, None, 1]


def test_attention_operator_takes_in_transpositions_and_repeated_heads() -> None:
    nodes = [
        make("Transpose", ["q"], ["qt"], perm=[0, 2, 1, 3]),
        make("Expand", ["k", "many"], ["ke"]),
        make("Reshape", ["ke", "merged"], ["kr"]),
        make("Expand", ["v", "many"], ["ve"]),
        make("Reshape", ["ve", "merged"], ["vr"]),
        make("Attention", ["qt", "kr", "vr"], ["o"], "attend", is_causal=1),
        make("Transpose", ["o"], ["y"], "out", perm=[0, 2, 1, 3]),
    ]
    inputs = {"q": [2, 8, 4, 16], "k": [2, 2, 1, 8, 16], "v": [2, 2, 1, 8, 16]}
    constants = {"many": np.asarray([2, 2, 2, 8, 16]), "merged": np.asarray([2, 4, 8, 16])}
    graph = onnx_library_graph(model(nodes, inputs, ["y"], constants, opset=23))
    assert texts(graph) == only("attention_prefill:batch=2,heads=4,kv_heads=2,q_len=8,head_dim=16")
