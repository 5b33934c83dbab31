"""One ONNX node at a time: which specification it becomes."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.programs.frontends.onnx_library import onnx_library_graph
from cdmpp.programs.operators import parse_operator
from tests.programs.frontends.onnx_models import model, scalar, single, texts, weight

extents = st.integers(1, 65)


@given(lead=st.lists(extents, min_size=1, max_size=3), n=extents, k=extents)
@settings(max_examples=20)
def test_matmul_with_a_matrix_hashes_as_linear(lead: list[int], n: int, k: int) -> None:
    graph = single("MatMul", {"x": [*lead, k]}, {"w": weight(k, n)})
    assert graph.programs[0].hash == parse_operator(f"linear:m={np.prod(lead)},n={n},k={k}").hash()


@given(batch=st.lists(extents, min_size=1, max_size=2), m=extents, n=extents, k=extents)
@settings(max_examples=20)
def test_batched_matmul_hashes_as_bmm(batch: list[int], m: int, n: int, k: int) -> None:
    graph = single("MatMul", {"a": [*batch, m, k], "b": [*batch, k, n]})
    text = f"bmm:batch={np.prod(batch)},m={m},n={n},k={k}"
    assert graph.programs[0].hash == parse_operator(text).hash()


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ([4, 8], [8, 16], "linear:m=4,n=16,k=8"),
        ([2, 4, 8], [8, 16], "linear:m=8,n=16,k=8"),
        ([3, 1, 4, 8], [5, 8, 16], "bmm:batch=15,m=4,n=16,k=8"),
        ([4, 8], [5, 8, 16], "bmm:batch=5,m=4,n=16,k=8"),
        ([8], [8, 16], "linear:m=1,n=16,k=8"),
        ([4, 8], [8], "linear:m=4,n=1,k=8"),
        ([8], [5, 8, 16], "bmm:batch=5,m=1,n=16,k=8"),
    ],
)
def test_matmul_ranks(a: list[int], b: list[int], text: str) -> None:
    assert single("MatMul", {"a": a, "b": b}).programs[0].hash == parse_operator(text).hash()


NODES = [
    ("Gemm", {"x": [4, 8]}, {"w": weight(8, 16)}, {}, "linear:m=4,n=16,k=8"),
    ("Gemm", {"x": [4, 8]}, {"w": weight(16, 8), "c": weight(16)}, {"transB": 1}, "linear:m=4,n=16,k=8,bias=true"),
    ("Gemm", {"x": [8, 4]}, {"w": weight(8, 16)}, {"transA": 1}, "linear:m=4,n=16,k=8"),
    (
        "Einsum",
        {"a": [2, 3, 5, 7], "b": [2, 3, 11, 7]},
        {},
        {"equation": "bhqd,bhkd->bhqk"},
        "bmm:batch=6,m=5,n=11,k=7",
    ),
    ("Einsum", {"a": [3, 5, 7], "b": [7, 11]}, {}, {"equation": "abk,kn->abn"}, "linear:m=15,n=11,k=7"),
    ("Relu", {"x": [2, 3, 5]}, {}, {}, "relu:rows=6,cols=5"),
    ("Gelu", {"x": [2, 3]}, {}, {"opset": 20}, "gelu:rows=2,cols=3"),
    ("Exp", {"x": [7]}, {}, {}, "exp:rows=1,cols=7"),
    ("Tanh", {"x": []}, {}, {}, "tanh:rows=1,cols=1"),
    ("Add", {"a": [2, 3, 5], "b": [3, 5]}, {}, {}, "add:rows=6,cols=5"),
    ("Add", {"a": [2, 1], "b": [1, 5]}, {}, {}, "add:rows=2,cols=5"),
    ("Sub", {"a": [2, 5]}, {"s": scalar(1)}, {}, "add_scalar:rows=2,cols=5"),
    ("Mul", {"a": [2, 5]}, {"s": weight(1)}, {}, "mul_scalar:rows=2,cols=5"),
    ("Div", {"a": [2, 5]}, {"s": weight(1, 1, 1)}, {}, "div_scalar:rows=2,cols=5"),
    ("Pow", {"a": [2, 5]}, {"s": scalar(2)}, {}, "pow_scalar:rows=2,cols=5"),
    ("Mul", {"a": [2, 5]}, {"s": weight(5)}, {}, "mul:rows=2,cols=5"),
    ("Sum", {"a": [2, 5], "b": [2, 5], "c": [2, 5]}, {}, {}, "add:rows=2,cols=5,inputs=3"),
    ("Max", {"a": [2, 5], "b": [2, 5]}, {}, {}, "maximum:rows=2,cols=5"),
    ("Softmax", {"x": [2, 3, 5]}, {}, {"axis": -1}, "softmax:rows=6,cols=5"),
    ("Softmax", {"x": [2, 3, 5]}, {}, {"axis": 1}, "softmax:rows=10,cols=3"),
    ("Softmax", {"x": [2, 3, 5]}, {}, {"axis": 1, "opset": 11}, "softmax:rows=2,cols=15"),
    ("LayerNormalization", {"x": [2, 3, 5]}, {"w": weight(5), "b": weight(5)}, {}, "layernorm:rows=6,cols=5"),
    ("RMSNormalization", {"x": [2, 3, 5]}, {"w": weight(5)}, {"opset": 23}, "rmsnorm:rows=6,cols=5"),
    ("ReduceMean", {"x": [2, 3, 5]}, {"axes": np.asarray([-1])}, {}, "reduce_mean:rows=6,cols=5"),
    ("ReduceMean", {"x": [2, 3, 5]}, {}, {"axes": [1, 2], "opset": 13}, "reduce_mean:rows=2,cols=15"),
    ("ReduceMean", {"x": [2, 3, 5]}, {}, {}, "reduce_mean:rows=1,cols=30"),
    ("GlobalAveragePool", {"x": [2, 3, 5, 7]}, {}, {}, "reduce_mean:rows=6,cols=35"),
    ("Transpose", {"x": [2, 3, 5]}, {}, {"perm": [0, 2, 1]}, "copy:rows=6,cols=5,transposed=true"),
    ("Transpose", {"x": [2, 3, 5]}, {}, {"perm": [1, 0, 2]}, "copy:rows=6,cols=5"),
    ("Concat", {"a": [2, 3], "b": [2, 4]}, {}, {"axis": 1}, "copy:rows=2,cols=7"),
    (
        "Conv",
        {"x": [2, 4, 9, 9]},
        {"w": weight(8, 4, 3, 3), "b": weight(8)},
        {"pads": [1, 1, 1, 1], "strides": [2, 2]},
        "conv2d:n=2,c_in=4,h=9,w=9,c_out=8,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1,bias=true",
    ),
    (
        "Conv",
        {"x": [2, 4, 9, 9]},
        {"w": weight(4, 1, 3, 3)},
        {"group": 4, "dilations": [2, 2]},
        "conv2d:n=2,c_in=4,h=9,w=9,c_out=4,kh=3,kw=3,dil_h=2,dil_w=2,groups=4",
    ),
    (
        "Conv",
        {"x": [2, 4, 9]},
        {"w": weight(8, 4, 3)},
        {"pads": [1, 1]},
        "conv2d:n=2,c_in=4,h=1,w=9,c_out=8,kh=1,kw=3,pad_w=1",
    ),
    (
        "Conv",
        {"x": [2, 4, 9, 9]},
        {"w": weight(8, 4, 3, 3)},
        {"auto_pad": "SAME_UPPER"},
        "conv2d:n=2,c_in=4,h=9,w=9,c_out=8,kh=3,kw=3,pad_h=1,pad_w=1",
    ),
    (  # one pixel more behind the image; the result has 4 x 4 pixels as with it on both sides
        "Conv",
        {"x": [2, 4, 8, 8]},
        {"w": weight(8, 4, 3, 3)},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        "conv2d:n=2,c_in=4,h=8,w=8,c_out=8,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1",
    ),
    (  # padding on both sides would give 9 x 9 pixels
        "Conv",
        {"x": [2, 4, 8, 8]},
        {"w": weight(8, 4, 2, 2)},
        {"auto_pad": "SAME_LOWER"},
        "conv2d:n=2,c_in=4,h=9,w=9,c_out=8,kh=2,kw=2",
    ),
    (
        "Conv",
        {"x": [1, 4, 9, 9]},
        {"w": weight(8, 4, 3, 3)},
        {"pads": [0, 0, 1, 1]},
        "conv2d:n=1,c_in=4,h=10,w=10,c_out=8,kh=3,kw=3",
    ),
    (
        "Conv",
        {"x": [2, 4, 8, 8]},
        {"w": weight(8, 4, 3, 3)},
        {"auto_pad": "VALID", "strides": [2, 2]},
        "conv2d:n=2,c_in=4,h=8,w=8,c_out=8,kh=3,kw=3,stride_h=2,stride_w=2",
    ),
    (
        "MaxPool",
        {"x": [2, 4, 8, 8]},
        {},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2], "kernel_shape": [3, 3]},
        "max_pool2d:n=2,c=4,h=8,w=8,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1",
    ),
    (
        "ConvTranspose",
        {"x": [1, 8, 5, 5]},
        {"w": weight(8, 4, 3, 3)},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        "conv2d:direction=bwd_data,n=1,c_in=4,h=10,w=10,c_out=8,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1",
    ),
    (
        "ConvTranspose",
        {"x": [1, 8, 5, 5]},
        {"w": weight(8, 4, 3, 3)},
        {"strides": [2, 2]},
        "conv2d:direction=bwd_data,n=1,c_in=4,h=11,w=11,c_out=8,kh=3,kw=3,stride_h=2,stride_w=2",
    ),
    (
        "MaxPool",
        {"x": [2, 4, 9, 9]},
        {},
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        "max_pool2d:n=2,c=4,h=9,w=9,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1",
    ),
    (
        "AveragePool",
        {"x": [2, 4, 8, 8]},
        {},
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        "avg_pool2d:n=2,c=4,h=8,w=8,kh=2,kw=2,stride_h=2,stride_w=2",
    ),
    ("BatchNormalization", {"x": [2, 4, 8, 8]}, {k: weight(4) for k in "abcd"}, {}, "batch_norm:n=2,c=4,h=8,w=8"),
    (
        "Attention",
        {"q": [2, 8, 16, 32], "k": [2, 4, 24, 32], "v": [2, 4, 24, 32]},
        {},
        {"opset": 23},
        "attention_encoder:batch=2,q_len=16,past_len=8,heads=8,kv_heads=4,head_dim=32",
    ),
    (
        "Attention",
        {"q": [2, 16, 256], "k": [2, 16, 128], "v": [2, 16, 128]},
        {},
        {"opset": 23, "q_num_heads": 8, "kv_num_heads": 4, "is_causal": 1},
        "attention_prefill:batch=2,q_len=16,heads=8,kv_heads=4,head_dim=32",
    ),
    (
        "Attention",
        {"q": [2, 8, 1, 32], "k": [2, 4, 24, 32], "v": [2, 4, 24, 32]},
        {},
        {"opset": 23},
        "attention_decode:batch=2,q_len=1,past_len=23,heads=8,kv_heads=4,head_dim=32",
    ),
]


@pytest.mark.parametrize(("op", "inputs", "constants", "options", "text"), NODES, ids=lambda v: None)
def test_node(op: str, inputs: Any, constants: Any, options: Any, text: str) -> None:
    graph = single(op, inputs, constants, **options)
    assert not graph.unsupported
    assert texts(graph) == {parse_operator(text).text(): 1}


def test_lookup_in_a_constant_table_is_an_embedding() -> None:
    node = onnx.helper.make_node("Gather", ["table", "ids"], ["y"])
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [2, 7])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(weight(100, 16), "table")],
    )
    built = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=10)
    result = texts(onnx_library_graph(built.SerializeToString()))
    assert result == {parse_operator("embedding:rows=14,cols=16,table_rows=100").text(): 1}


@pytest.mark.parametrize(
    ("op", "inputs", "constants", "options"),
    [
        ("Reshape", {"x": [2, 6]}, {"s": np.asarray([3, 4])}, {}),
        ("Flatten", {"x": [2, 3, 4]}, {}, {}),
        ("Unsqueeze", {"x": [2, 6]}, {"a": np.asarray([0])}, {}),
        ("Identity", {"x": [2, 6]}, {}, {}),
        ("Dropout", {"x": [2, 6]}, {}, {}),
        ("Transpose", {"x": [1, 6, 1, 5]}, {}, {"perm": [1, 0, 3, 2]}),
        ("Slice", {"x": [2, 6]}, {"s": np.asarray([0]), "e": np.asarray([99])}, {}),
        ("Expand", {"x": [2, 6]}, {"s": np.asarray([2, 6])}, {}),
    ],
)
def test_free_nodes(op: str, inputs: Any, constants: Any, options: Any) -> None:
    graph = single(op, inputs, constants, **options)
    assert graph.programs == () and graph.unsupported == ()
    assert graph.nodes[0].reason.startswith("free:")


@pytest.mark.parametrize(
    ("op", "inputs", "constants", "options", "reason"),
    [
        ("Conv", {"x": [1, 4, 9, 9, 9]}, {"w": weight(8, 4, 3, 3, 3)}, {}, "3-D"),
        ("MaxPool", {"x": [1, 4, 8, 8]}, {}, {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, "ceil"),
        ("Cos", {"x": [4, 4]}, {}, {}, "no operator"),
        ("Add", {"a": [4], "b": [4]}, {}, {"dtype": onnx.TensorProto.DOUBLE}, "float64"),
        ("Einsum", {"a": [3, 4], "b": [4]}, {}, {"equation": "ij,j->j"}, "equation"),
    ],
)
def test_unsupported_nodes_are_listed(op: str, inputs: Any, constants: Any, options: Any, reason: str) -> None:
    graph = single(op, inputs, constants, **options)
    assert graph.programs == ()
    (entry,) = graph.unsupported
    assert entry.operator == op and entry.count == 1 and reason in entry.reason
    assert graph.nodes[0].program is None and graph.nodes[0].reason.startswith("unsupported")


def test_operators_of_another_domain_are_named_with_it() -> None:
    node = onnx.helper.make_node("Sampling", ["x"], ["h"], domain="com.microsoft")
    after = onnx.helper.make_node("Relu", ["h"], ["y"])
    graph = onnx.helper.make_graph(
        [node, after],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    result = onnx_library_graph(onnx.helper.make_model(graph, opset_imports=opsets).SerializeToString())
    assert [u.operator for u in result.unsupported] == ["com.microsoft::Sampling", "Relu"]
    assert "not static" in result.unsupported[1].reason


@pytest.mark.parametrize(
    ("dtype", "name"), [(onnx.TensorProto.FLOAT16, "float16"), (onnx.TensorProto.BFLOAT16, "bfloat16")]
)
def test_half_types(dtype: int, name: str) -> None:
    graph = single("Add", {"a": [2, 5], "b": [2, 5]}, dtype=dtype)
    assert graph.programs[0].operator is not None and graph.programs[0].operator.dtype == name


def test_constant_parts_are_folded() -> None:
    make = onnx.helper.make_node
    nodes = [
        make("Shape", ["x"], ["shape"]),
        make("Gather", ["shape", "zero"], ["rows"]),
        make("Unsqueeze", ["rows", "axis"], ["rows1"]),
        make("Concat", ["rows1", "minus"], ["target"], axis=0),
        make("Reshape", ["x", "target"], ["flat"]),
        make("Transpose", ["w"], ["wt"]),
        make("MatMul", ["flat", "wt"], ["y"]),
    ]
    constants = {"zero": np.asarray(0), "axis": np.asarray([0]), "minus": np.asarray([-1]), "w": weight(7, 12)}
    graph = onnx_library_graph(model(nodes, {"x": [5, 3, 4]}, ["y"], constants))
    assert texts(graph) == {parse_operator("linear:m=5,n=7,k=12").text(): 1}
    folded = [n.operator for n in graph.nodes if n.reason.startswith("constant")]
    assert folded == ["Shape", "Gather", "Unsqueeze", "Concat", "Transpose"]


def test_transposed_convolution_with_bias_launches_two_kernels() -> None:
    graph = single("ConvTranspose", {"x": [1, 8, 5, 5]}, {"w": weight(8, 4, 3, 3), "b": weight(4)})
    assert list(texts(graph)) == [
        parse_operator("conv2d:direction=bwd_data,n=1,c_in=4,h=7,w=7,c_out=8,kh=3,kw=3").text(),
        parse_operator("add:rows=28,cols=7").text(),
    ]
    assert graph.edges == (("node", "node/bias"),)
