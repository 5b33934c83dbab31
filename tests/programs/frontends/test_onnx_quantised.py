"""Products of quantised tensors in ONNX models."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.graph import ProgramGraph
from cdmpp.programs.frontends.onnx_library import onnx_library_graph
from cdmpp.programs.operators import parse_operator
from tests.programs.frontends.onnx_models import texts

make = helper.make_node
Types = Mapping[str, tuple[int, Sequence[int]]]


def read(
    nodes: Sequence[onnx.NodeProto],
    inputs: Types,
    constants: Types,
    output: int = TensorProto.FLOAT,
    outputs: Sequence[str] = ("y",),
) -> ProgramGraph:
    """The graph of a model with constants of given element types and shapes, all zeros."""
    tensors = [_zeros(name, kind, shape) for name, (kind, shape) in constants.items()]
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, kind, list(shape)) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, output, None) for name in outputs],
        tensors,
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return onnx_library_graph(helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString())


def _zeros(name: str, kind: int, shape: Sequence[int]) -> onnx.TensorProto:
    if kind in (TensorProto.INT4, TensorProto.FLOAT4E2M1):
        size = (int(np.prod(shape)) + 1) // 2
        return helper.make_tensor(name, kind, list(shape), bytes(size), raw=True)
    return numpy_helper.from_array(np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind)), name)


def canonical(*operators: str) -> dict[str, int]:
    return {parse_operator(text).text(): 1 for text in operators}


def launched(graph: ProgramGraph) -> list[str]:
    return [node.id for node in graph.nodes if node.program is not None]


F, H, I8, U8, I32 = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32)
X = {"x": (F, [4, 8])}
QDQ = [
    make("QuantizeLinear", ["x", "xs", "xz"], ["xq"], "q"),
    make("DequantizeLinear", ["xq", "xs", "xz"], ["xd"], "dq"),
]
XS = {"xs": (F, []), "xz": (I8, [])}


@pytest.mark.parametrize(
    ("kind", "scale", "options", "text"),
    [
        (I8, [], {}, "linear:m=4,n=16,k=8,dtype=int8,scaling=tensor"),
        (I8, [16], {"axis": 1}, "linear:m=4,n=16,k=8,dtype=int8,scaling=channel"),
        (TensorProto.FLOAT8E4M3FN, [], {}, "linear:m=4,n=16,k=8,dtype=float8_e4m3,scaling=tensor"),
        (TensorProto.FLOAT8E4M3FN, [16], {"axis": 1}, "linear:m=4,n=16,k=8,dtype=float8_e4m3,scaling=channel"),
    ],
)
def test_product_between_dequantised_tensors_is_one_quantised_linear(
    kind: int, scale: list[int], options: dict[str, Any], text: str
) -> None:
    nodes = [
        *QDQ,
        make("DequantizeLinear", ["w", "ws"], ["wd"], "dw", **options),
        make("MatMul", ["xd", "wd"], ["y"], "mm"),
    ]
    constants = {"xs": (F, []), "xz": (kind, []), "w": (kind, [8, 16]), "ws": (F, scale)}
    graph = read(nodes, X, constants)
    assert texts(graph) == canonical(text)
    assert launched(graph) == ["mm"]
    assert {n.id: n.reason for n in graph.nodes if n.program is None} == dict.fromkeys(
        ("q", "dq", "dw"), "fused into mm"
    )


def test_gemm_takes_its_dequantised_bias_and_transposed_weight() -> None:
    nodes = [
        *QDQ,
        make("DequantizeLinear", ["w", "ws"], ["wd"], "dw", axis=0),
        make("DequantizeLinear", ["b", "bs"], ["bd"], "db", axis=0),
        make("Gemm", ["xd", "wd", "bd"], ["y"], "gemm", transB=1),
    ]
    constants = {**XS, "w": (I8, [16, 8]), "ws": (F, [16]), "b": (I32, [16]), "bs": (F, [16])}
    graph = read(nodes, X, constants)
    assert texts(graph) == canonical("linear:m=4,n=16,k=8,bias=true,dtype=int8,scaling=channel")
    assert "one static scale" in graph.nodes[-1].reason


def test_transposition_and_bias_around_a_quantised_matmul_are_part_of_it() -> None:
    nodes = [
        *QDQ,
        make("DequantizeLinear", ["w", "ws"], ["wd"], "dw"),
        make("Transpose", ["wd"], ["wt"], "t", perm=[1, 0]),
        make("MatMul", ["xd", "wt"], ["p"], "mm"),
        make("DequantizeLinear", ["b", "bs"], ["bd"], "db"),
        make("Add", ["p", "bd"], ["y"], "add"),
    ]
    constants = {**XS, "w": (I8, [16, 8]), "ws": (F, []), "b": (I32, [16]), "bs": (F, [])}
    graph = read(nodes, X, constants)
    assert texts(graph) == canonical("linear:m=4,n=16,k=8,bias=true,dtype=int8,scaling=tensor")
    assert launched(graph) == ["add"]


WEIGHT_ONLY = [
    (H, I8, [16], {"axis": 1}, "dtype=float16,weight_dtype=int8,scaling=channel"),
    (H, I8, [], {}, "dtype=float16,weight_dtype=int8,scaling=tensor"),
    (
        TensorProto.BFLOAT16,
        TensorProto.INT4,
        [2, 16],
        {"block_size": 128, "axis": 0},
        "dtype=bfloat16,weight_dtype=int4",
    ),
    (H, TensorProto.INT4, [8, 16], {"block_size": 32, "axis": 0}, "dtype=float16,weight_dtype=int4,scaling=block128"),
    (H, TensorProto.FLOAT8E4M3FN, [16], {"axis": 1}, "dtype=float16,weight_dtype=float8_e4m3,scaling=channel"),
    (
        TensorProto.BFLOAT16,
        TensorProto.FLOAT4E2M1,
        [16, 16],
        {"block_size": 16, "axis": 0},
        "dtype=bfloat16,weight_dtype=float4_e2m1,scaling=nvfp4",
    ),
]


@pytest.mark.parametrize(("wide", "kind", "scale", "options", "types"), WEIGHT_ONLY)
def test_dequantised_weight_alone_gives_a_weight_only_product(
    wide: int, kind: int, scale: list[int], options: dict[str, Any], types: str
) -> None:
    nodes = [make("DequantizeLinear", ["w", "ws"], ["wd"], "dw", **options), make("MatMul", ["x", "wd"], ["y"], "mm")]
    graph = read(nodes, {"x": (wide, [4, 256])}, {"w": (kind, [256, 16]), "ws": (wide, scale)}, wide)
    assert texts(graph) == canonical(f"linear:m=4,n=16,k=256,{types}")
    assert launched(graph) == ["mm"]
    blocks = options.get("block_size") == 32
    assert ("blocks of 32" in graph.nodes[-1].reason) == blocks


def test_float32_activations_of_a_weight_only_product_are_timed_as_float16_with_a_remark() -> None:
    nodes = [make("DequantizeLinear", ["w", "ws"], ["wd"]), make("MatMul", ["x", "wd"], ["y"], "mm")]
    graph = read(nodes, X, {"w": (I8, [8, 16]), "ws": (F, [])})
    assert texts(graph) == canonical("linear:m=4,n=16,k=8,dtype=float16,weight_dtype=int8,scaling=tensor")
    assert "float32 activations timed as float16" in graph.nodes[-1].reason


def test_quantisation_that_others_read_stays_a_kernel_of_its_own() -> None:
    nodes = [
        *QDQ,
        make("DequantizeLinear", ["w", "ws"], ["wd"], "dw"),
        make("MatMul", ["xd", "wd"], ["p"], "mm"),
        make("Relu", ["xd"], ["r"], "relu"),
        make("Add", ["p", "r"], ["y"], "add"),
    ]
    graph = read(nodes, X, {**XS, "w": (I8, [8, 8]), "ws": (F, [])})
    assert launched(graph) == ["q", "dq", "mm", "relu", "add"]
    assert texts(graph)["mul_scalar:dtype=float32,rows=4,cols=8"] == 2
    assert ("q", "dq") in graph.edges and ("dq", "mm") in graph.edges and ("mm", "add") in graph.edges


def test_quantised_tensors_between_products_are_part_of_the_second() -> None:
    nodes = [
        *QDQ,
        make("DequantizeLinear", ["w", "ws"], ["wd"], "dw"),
        make("MatMul", ["xd", "wd"], ["p"], "first"),
        make("QuantizeLinear", ["p", "xs", "xz"], ["pq"], "q2"),
        make("DequantizeLinear", ["pq", "xs", "xz"], ["pd"], "dq2"),
        make("MatMul", ["pd", "wd"], ["y"], "second"),
    ]
    graph = read(nodes, X, {**XS, "w": (I8, [8, 8]), "ws": (F, [])})
    assert launched(graph) == ["first", "second"] and graph.edges == (("first", "second"),)
    assert {n.id: n.reason for n in graph.nodes}["dw"] == "fused into first, second"
    assert graph.counts == (2,)


def test_product_of_two_quantised_activations_is_a_quantised_bmm() -> None:
    nodes = []
    for name in "ab":
        nodes.append(make("QuantizeLinear", [name, "xs", "xz"], [f"{name}q"], f"q{name}"))
        nodes.append(make("DequantizeLinear", [f"{name}q", "xs", "xz"], [f"{name}d"], f"d{name}"))
    nodes.append(make("MatMul", ["ad", "bd"], ["y"], "mm"))
    graph = read(nodes, {"a": (F, [3, 4, 8]), "b": (F, [3, 8, 16])}, XS)
    assert texts(graph) == canonical("bmm:batch=3,m=4,n=16,k=8,dtype=int8,scaling=tensor")


@pytest.mark.parametrize(("scale", "scaling"), [([], "tensor"), ([16], "channel")])
def test_qlinear_matmul_takes_its_quantisation_and_dequantisation(scale: list[int], scaling: str) -> None:
    nodes = [
        QDQ[0],
        make("QLinearMatMul", ["xq", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["yq"], "product"),
        make("DequantizeLinear", ["yq", "ys", "yz"], ["y"], "dequantise"),
    ]
    constants = {**XS, "w": (I8, [8, 16]), "ws": (F, scale), "wz": (I8, scale), "ys": (F, []), "yz": (I8, [])}
    graph = read(nodes, X, constants)
    assert texts(graph) == canonical(f"linear:m=4,n=16,k=8,dtype=int8,scaling={scaling}")
    assert launched(graph) == ["dequantise"]


def test_qlinear_matmul_alone_says_that_its_input_is_quantised_already() -> None:
    node = make("QLinearMatMul", ["x", "xs", "xz", "w", "xs", "xz", "xs", "xz"], ["y"], "product")
    graph = read([node], {"x": (U8, [4, 8])}, {"xs": (F, []), "xz": (U8, []), "w": (U8, [8, 16])}, U8)
    assert texts(graph) == canonical("linear:m=4,n=16,k=8,dtype=int8,scaling=tensor")
    assert "arrives quantised" in graph.nodes[0].reason


DYNAMIC = [
    make("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"], "quantise"),
    make("MatMulInteger", ["xq", "w", "xz", "wz"], ["i"], "product"),
    make("Cast", ["i"], ["f"], "cast", to=F),
]


def test_dynamic_quantisation_is_a_linear_with_channel_scaling() -> None:
    nodes = [
        *DYNAMIC,
        make("Mul", ["xs", "ws"], ["s"], "scales"),
        make("Mul", ["f", "s"], ["p"], "rescale"),
        make("Add", ["p", "b"], ["y"], "bias"),
    ]
    graph = read(nodes, X, {"w": (I8, [8, 16]), "wz": (I8, []), "ws": (F, []), "b": (F, [16])})
    assert texts(graph) == canonical("linear:m=4,n=16,k=8,bias=true,dtype=int8,scaling=channel")
    assert launched(graph) == ["bias"]


def test_quantisation_that_products_share_is_counted_in_each_with_a_remark() -> None:
    nodes = [DYNAMIC[0]]
    for name in "qk":
        nodes.append(make("MatMulInteger", ["xq", "w", "xz"], [f"{name}i"]))
        nodes.append(make("Cast", [f"{name}i"], [f"{name}f"], to=F))
        nodes.append(make("Mul", [f"{name}f", "xs"], [f"{name}p"]))
        nodes.append(make("Mul", [f"{name}p", "ws"], [name], f"{name}_rescale"))
    graph = read(nodes, X, {"w": (I8, [8, 16]), "ws": (F, [16])}, outputs=("q", "k"))
    assert graph.counts == (2,) and launched(graph) == ["q_rescale", "k_rescale"]
    assert "2 products share" in graph.nodes[-1].reason


def test_matmul_integer_without_scales_is_a_bare_product() -> None:
    graph = read([make("MatMulInteger", ["x", "w"], ["y"])], {"x": (I8, [4, 8])}, {"w": (I8, [8, 16])}, I32)
    assert texts(graph) == canonical("linear:m=4,n=16,k=8,dtype=int8")


CONV = "conv2d:n=1,c_in=4,h=9,w=9,c_out=8,kh=3,kw=3,dtype=int8"


def test_dequantised_convolution_is_int8_and_its_quantisation_a_kernel() -> None:
    nodes = [*QDQ, make("DequantizeLinear", ["w", "ws"], ["wd"], "dw"), make("Conv", ["xd", "wd"], ["y"], "conv")]
    graph = read(nodes, {"x": (F, [1, 4, 9, 9])}, {**XS, "w": (I8, [8, 4, 3, 3]), "ws": (F, [])})
    assert set(texts(graph)) == set(canonical(CONV, "mul_scalar:rows=36,cols=9"))
    assert launched(graph) == ["q", "conv"]


def test_qlinear_conv_is_an_int8_convolution() -> None:
    node = make("QLinearConv", ["x", "xs", "xz", "w", "xs", "xz", "xs", "xz", "b"], ["y"])
    constants = {**XS, "w": (I8, [8, 4, 3, 3]), "b": (I32, [8])}
    assert texts(read([node], {"x": (I8, [1, 4, 9, 9])}, constants, I8)) == canonical(f"{CONV},bias=true")


def nbits(wide: int, bits: int = 4, block: int = 32, shape: Sequence[int] = (2, 4, 256), **attrs: int) -> ProgramGraph:
    k = 256
    options = {"K": k, "N": 16, "bits": bits, "block_size": block, **attrs}
    node = make("MatMulNBits", ["x", "w", "s"], ["p"], "product", domain="com.microsoft", **options)
    blocks = -(-k // block)
    constants = {"w": (U8, [16, blocks, block * bits // 8]), "s": (wide, [16 * blocks])}
    return read([node, make("Relu", ["p"], ["y"], "relu")], {"x": (wide, shape)}, constants, wide)


@pytest.mark.parametrize(
    ("options", "types"),
    [
        ({"block": 128}, "weight_dtype=int4,scaling=block128"),
        ({"block": 256}, "weight_dtype=int4,scaling=channel"),
        ({"bits": 8, "block": 128}, "weight_dtype=int8,scaling=block128"),
    ],
)
def test_matmul_nbits_is_a_weight_only_product(options: dict[str, int], types: str) -> None:
    graph = nbits(H, **options)
    expected = canonical(f"linear:m=8,n=16,k=256,dtype=float16,{types}", "relu:rows=8,cols=16,dtype=float16")
    assert texts(graph) == expected


def test_matmul_nbits_names_what_it_leaves_out() -> None:
    assert "scales of blocks of 32, timed as block128" in nbits(H).nodes[0].reason
    assert "float32 activations timed as float16" in nbits(F, block=128).nodes[0].reason
    (problem,) = nbits(H, bits=2).unsupported
    assert problem.operator == "com.microsoft::MatMulNBits" and problem.reason == "weights of 2 bits, not 4 or 8"


def test_matmul_nbits_whose_k_contradicts_its_input_is_refused() -> None:
    with pytest.raises(InvalidProgramError, match="K=256, but its input has 8 columns"):
        nbits(H, shape=(4, 8))
    with pytest.raises(InvalidProgramError, match="block_size=0 is not positive"):
        nbits(H, block_size=0)


@pytest.mark.parametrize("op", ["DynamicQuantizeMatMul", "MatMulIntegerToFloat"])
def test_fused_int8_products_of_onnx_runtime(op: str) -> None:
    dynamic = op == "DynamicQuantizeMatMul"
    inputs = ["x", "w", "ws", "", "b"] if dynamic else ["x", "w", "xs", "ws", "", "", "b"]
    node = make(op, inputs, ["p"], domain="com.microsoft")
    constants = {"w": (I8, [8, 16]), "xs": (F, []), "ws": (F, [16]), "b": (F, [16])}
    graph = read([node, make("Relu", ["p"], ["y"])], {"x": (F if dynamic else I8, [4, 8])}, constants)
    expected = canonical("linear:m=4,n=16,k=8,bias=true,dtype=int8,scaling=channel", "relu:rows=4,cols=16")
    assert texts(graph) == expected


def test_operators_of_onnx_runtime_on_int8_tensors() -> None:
    scale = ["xs", "xz"]
    nodes = [
        make("QLinearAdd", ["x", *scale, "x", *scale, *scale], ["a"], domain="com.microsoft"),
        make("QLinearMul", ["a", *scale, "x", *scale, *scale], ["m"], domain="com.microsoft"),
        make("QLinearSoftmax", ["m", *scale, *scale], ["s"], domain="com.microsoft", axis=-1, opset=13),
        make("QGemm", ["s", *scale, "w", *scale, "b", *scale], ["g"], domain="com.microsoft", transB=1),
        make("DequantizeLinear", ["g", *scale], ["y"]),
    ]
    graph = read(nodes, {"x": (I8, [4, 8])}, {**XS, "w": (I8, [16, 8]), "b": (I32, [16])})
    assert graph.unsupported == ()
    assert texts(graph) == canonical(
        "add:rows=4,cols=8,dtype=int8",
        "mul:rows=4,cols=8,dtype=int8",
        "softmax:rows=4,cols=8,dtype=int8",
        "linear:m=4,n=16,k=8,bias=true,dtype=int8,scaling=tensor",
        "mul_scalar:rows=4,cols=16",
    )


def test_quantisation_of_a_constant_is_computed_before_the_model_runs() -> None:
    nodes = [make("QuantizeLinear", ["w", *["xs", "xz"]], ["q"], "q"), make("Add", ["x", "q"], ["y"], "add")]
    graph = read(nodes, {"x": (I8, [4, 8])}, {**XS, "w": (F, [4, 8])}, I8)
    assert launched(graph) == ["add"] and graph.nodes[0].reason.startswith("constant")


@pytest.mark.parametrize("op", ["MatMul", "MatMulInteger", "QLinearMatMul"])
def test_product_without_a_result_is_refused_or_unsupported(op: str) -> None:
    nodes = [make(op, ["x", "w"], []), make("Identity", ["x"], ["y"])]
    try:
        graph = read(nodes, {"x": (I8, [4, 8])}, {"w": (I8, [8, 16])}, I8)
    except InvalidProgramError:
        return
    assert [u.operator for u in graph.unsupported] == [op]
