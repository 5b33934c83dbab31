"""TIR without thread bindings is refused on a GPU, and predicted on a CPU."""

from __future__ import annotations

import pytest

from cdmpp.predict.predictor import LatencyPredictor
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
    pytest.importorskip("tvm", reason="needs apache-tvm")
    for script in (SERIAL, PARTLY):
        [refused] = predictor.predict([{"tvmscript": script}], "t4")
        assert refused.error is not None and refused.latency_s is None
        assert refused.error.code == "invalid_program"
        assert "matmul: it has stores outside of thread bindings, and t4 is a GPU" in refused.error.message
        assert "blockIdx" in refused.error.hint
        # As a library kernel the same serial TIR has an absurd prediction: the hint must not lead to it.
        assert "backend library" not in refused.error.hint and "linear:m=" in refused.error.hint
        [on_cpu] = predictor.predict([{"tvmscript": script}], "intel-xeon-amx-2t-avx2")
        assert on_cpu.error is None and on_cpu.latency_s


def test_a_bound_program_and_operators_are_predicted_on_a_gpu(predictor: LatencyPredictor) -> None:
    pytest.importorskip("tvm", reason="needs apache-tvm")
    lowered = TensorProgram.from_operator("linear:m=128,n=128,k=128", "tvm")
    bound, operator = predictor.predict([{"tvmscript": BOUND}, lowered], "t4")
    assert bound.error is None and bound.latency_s
    assert operator.error is None and operator.latency_s


def test_blocks_in_an_unmarked_function_are_refused_with_the_declaration_to_use(predictor: LatencyPredictor) -> None:
    pytest.importorskip("tvm", reason="needs apache-tvm")
    [refused] = predictor.predict([{"tvmscript": SERIAL.replace("(s_tir=True)", "")}], "t4")
    assert refused.error is not None and "@T.prim_func(s_tir=True)" in refused.error.hint
