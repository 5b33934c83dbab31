"""ONNX Runtime's fused operators: the programs of their standard equivalents, and shapes behind them."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from cdmpp.programs.frontends.onnx_library import onnx_library_graph
from cdmpp.programs.operators import parse_operator
from tests.programs.frontends.onnx_models import weight

ATTENTION = {"num_heads": 8, "kv_num_heads": 2}
LENGTHS = {"lengths": np.zeros(2, np.int32), "total": np.asarray(64, np.int32)}
CACHE = {"past_k": [2, 2, 48, 64], "past_v": [2, 2, 48, 64]}
#: Operator, inputs, constants, attributes, and the programs; a Relu reads the first result.
NODES: list[tuple[str, dict[str, list[int]], dict[str, Any], dict[str, Any], list[str]]] = [
    (
        "FusedConv",
        {"x": [1, 3, 8, 8]},
        {"w": weight(4, 3, 3, 3), "b": weight(4)},
        {"activation": "Relu", "strides": [2, 2], "auto_pad": "SAME_UPPER"},
        ["conv2d:n=1,c_in=3,h=8,w=8,c_out=4,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1,bias=true", "16,4"],
    ),
    ("FusedConv", {"x": [1, 3, 9]}, {"w": weight(4, 3, 3)}, {}, ["conv2d:n=1,c_in=3,h=1,w=9,c_out=4,kh=1,kw=3", "4,7"]),
    (
        "FusedMatMul",
        {"a": [2, 8, 16, 4], "b": [2, 8, 16, 4]},
        {},
        {"transB": 1, "alpha": 0.5},
        ["bmm:batch=16,m=16,n=16,k=4", "256,16"],
    ),
    ("FusedMatMul", {"a": [2, 8, 16]}, {"w": weight(5, 16)}, {"transB": 1}, ["linear:m=16,n=5,k=16", "16,5"]),
    ("FusedGemm", {"a": [4, 8]}, {"w": weight(16, 8)}, {"transB": 1}, ["linear:m=4,n=16,k=8", "4,16"]),
    ("FastGelu", {"x": [2, 3, 8]}, {}, {}, ["gelu:rows=6,cols=8", "6,8"]),
    ("BiasGelu", {"x": [2, 3, 8]}, {"b": weight(8)}, {}, ["gelu:rows=6,cols=8", "6,8"]),
    ("QuickGelu", {"x": [2, 3, 8]}, {}, {}, ["gelu:rows=6,cols=8", "6,8"]),
    ("SimplifiedLayerNormalization", {"x": [2, 3, 8]}, {"g": weight(8)}, {}, ["rmsnorm:rows=6,cols=8", "6,8"]),
    (
        "SkipSimplifiedLayerNormalization",
        {"x": [2, 3, 8], "skip": [2, 3, 8]},
        {"g": weight(8)},
        {},
        ["fused_add_rms_norm:rows=6,cols=8", "6,8"],
    ),
    (
        "SkipLayerNormalization",
        {"x": [2, 3, 8], "skip": [2, 3, 8]},
        {"g": weight(8), "b": weight(8)},
        {},
        ["layernorm:rows=12,cols=8", "6,8"],
    ),
    (
        "RotaryEmbedding",
        {"x": [2, 4, 3, 64]},
        {"ids": np.zeros((2, 3), np.int64), "cos": weight(99, 32), "sin": weight(99, 32)},
        {},
        ["rotary_embedding:rows=6,cols=256,head_dim=64", "24,64"],
    ),
    (
        "GroupQueryAttention",
        {"q": [2, 16, 512], "k": [2, 16, 128], "v": [2, 16, 128], **CACHE},
        LENGTHS,
        ATTENTION,
        ["attention_prefill:batch=2,q_len=16,past_len=48,heads=8,kv_heads=2,head_dim=64", "32,512"],
    ),
    (
        "GroupQueryAttention",
        {"q": [2, 1, 512], "k": [2, 1, 128], "v": [2, 1, 128], **CACHE},
        {},
        {**ATTENTION, "do_rotary": 1},
        [
            "rotary_embedding:rows=2,cols=640,head_dim=64",
            "attention_decode:batch=2,q_len=1,past_len=48,heads=8,kv_heads=2,head_dim=64",
            "2,512",
        ],
    ),
    (
        "MultiHeadAttention",
        {"q": [2, 16, 512], "k": [2, 16, 512], "v": [2, 16, 512]},
        {},
        {"num_heads": 8},
        ["attention_encoder:batch=2,q_len=16,heads=8,kv_heads=8,head_dim=64", "32,512"],
    ),
    (
        "Attention",
        {"x": [2, 16, 512]},
        {"w": weight(512, 1536), "b": weight(1536)},
        {"num_heads": 8, "unidirectional": 1},
        [
            "linear:m=32,n=1536,k=512,bias=true",
            "attention_prefill:batch=2,q_len=16,heads=8,kv_heads=8,head_dim=64",
            "32,512",
        ],
    ),
]


@pytest.mark.parametrize(("op", "inputs", "constants", "attributes", "programs"), NODES)
def test_fused_operators_are_their_standard_equivalents(
    op: str, inputs: dict[str, list[int]], constants: dict[str, Any], attributes: dict[str, Any], programs: list[str]
) -> None:
    node = helper.make_node(op, [*inputs, *constants], ["y"], domain="com.microsoft", **attributes)
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    result = helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([node, helper.make_node("Relu", ["y"], ["z"])], "g", infos, [result], tensors)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    listed = onnx_library_graph(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    rows, cols = programs[-1].split(",")
    expected = [*programs[:-1], f"relu:rows={rows},cols={cols}"]
    assert listed.unsupported == ()
    assert [program.hash for program in listed.programs] == [parse_operator(text).hash() for text in expected]
