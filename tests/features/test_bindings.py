"""TIR without thread bindings is refused on a GPU, and predicted on a CPU."""

import pytest

from cdmpp.features.encode import encode_operator, product_text, unbound_error
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.program import TensorProgram

pytestmark = pytest.mark.tvm

HEAD = (
    "@T.prim_func(s_tir=True)\n"
    'def matmul(A: T.Buffer((128, 128), "float32"), B: T.Buffer((128, 128), "float32"), '
    'C: T.Buffer((128, 128), "float32")):\n'
)
BLOCK = """
            with T.sblock("C"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
"""
SERIAL = HEAD + "    for i, j in T.grid(128, 128):\n        for k in range(128):" + BLOCK
BOUND = (
    HEAD
    + '    for i in T.thread_binding(128, thread="blockIdx.x"):\n'
    + '      for j in T.thread_binding(128, thread="threadIdx.x"):\n'
    + "        for k in range(128):"
    + BLOCK
)
#: The last store runs on the host.
PARTLY = BOUND + "    for z in range(128):\n        C[z, 0] = C[z, 0] + T.float32(1)\n"


def test_a_serial_program_is_refused_on_a_gpu(predictor: LatencyPredictor) -> None:
    for script in (SERIAL, PARTLY):
        [refused] = predictor.predict([{"tvmscript": script}], "t4")
        assert refused.error is not None and refused.latency_s is None
        assert refused.error.code == "invalid_program"
        assert "matmul: it has stores outside of thread bindings, and t4 is a GPU" in refused.error.message
        assert "blockIdx" in refused.error.hint
        # As a library kernel the same serial TIR has an absurd prediction: the hint must not lead to it.
        assert "backend library" not in refused.error.hint
        assert "linear:m=128,n=128,k=128,dtype=float32" in refused.error.hint
        [on_cpu] = predictor.predict([{"tvmscript": script}], "intel-xeon-amx-2t-avx2")
        assert on_cpu.error is None and on_cpu.latency_s


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("linear:m=512,n=512,k=1024", "linear:m=512,n=512,k=1024,dtype=float32"),
        ("linear:m=74,n=328,k=136,dtype=float16", "linear:m=74,n=328,k=136,dtype=float16 (or bfloat16)"),
        ("linear:m=65536,n=1,k=32768", "linear:m=65536,n=1,k=32768,dtype=float32"),
        ("bmm:batch=3,m=5,n=7,k=11", "bmm:batch=3,m=5,n=7,k=11,dtype=float32"),
        ("conv2d:n=1,c_in=8,h=9,w=9,c_out=4,kh=3,kw=3", None),
        ("attention_encoder:batch=1,q_len=4,heads=2,kv_heads=2,head_dim=8", None),
        ("add:rows=512,cols=512", None),
    ],
)
def test_hint_names_the_product_with_its_sizes(text: str, named: str | None) -> None:
    encoded = encode_operator(parse_operator(text))
    assert product_text(encoded.leaves[0]) == named
    hint = unbound_error("main", "t4", encoded.leaves[0]).hint
    assert hint.endswith(named or "cdmpp support lists the operators)")


def test_a_bound_program_and_operators_are_predicted_on_a_gpu(predictor: LatencyPredictor) -> None:
    lowered = TensorProgram.from_operator("linear:m=128,n=128,k=128", "tvm")
    bound, operator = predictor.predict([{"tvmscript": BOUND}, lowered], "t4")
    assert bound.error is None and bound.latency_s
    assert operator.error is None and operator.latency_s
