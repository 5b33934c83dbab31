"""Forms of programs, element types and device names that people type."""

from pathlib import Path

import pytest

from cdmpp.devices.registry import commonest, lookup, other_boards
from cdmpp.errors import CdmppError, InvalidProgramError, UnknownDeviceError, UnsupportedOperatorError
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import parse_operator

COPY = """
from tvm.script import tir as T
@T.prim_func(s_tir=True)
def main(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
    for i in T.serial(8):
        with T.block("B"):
            vi = T.axis.spatial(8, i)
            B[vi] = A[vi]
"""


@pytest.mark.parametrize(
    ("alias", "dtype"),
    [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("torch.float16", "float16")],
)
def test_alias_of_an_element_type_is_the_same_program(alias: str, dtype: str) -> None:
    by_alias = parse_operator(f"linear:m=2,n=3,k=4,dtype={alias}")
    assert by_alias == parse_operator(f"linear:m=2,n=3,k=4,dtype={dtype}")
    assert by_alias.text().startswith(f"linear:dtype={dtype},")


def test_matmul_is_linear_or_bmm() -> None:
    assert parse_operator("matmul:m=2,n=3,k=4") == parse_operator("linear:m=2,n=3,k=4")
    assert parse_operator("matmul:batch=5,m=2,n=3,k=4") == parse_operator("bmm:batch=5,m=2,n=3,k=4")


def test_mistyped_operator_names_the_nearest() -> None:
    with pytest.raises(UnsupportedOperatorError, match="did you mean softmax"):
        parse_operator("sotfmax:rows=2,cols=3")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("mla", "mla_decode or mla_prefill"),
        ("fused_moe", "moe or moe_gating or moe_shuffle or moe_w13"),
        ("Linear", "linear"),
        ("allreduce", "all_reduce"),
    ],
)
def test_unknown_operator_names_those_with_a_common_word(name: str, meant: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=rf"did you mean {meant}\?$"):
        parse_operator(f"{name}:rows=2")


def test_mistyped_field_names_the_nearest() -> None:
    with pytest.raises(InvalidProgramError, match=r"experts: missing; top_k: unknown field \(did you mean topk\?\)"):
        parse_operator("moe:tokens=8,hidden=64,intermediate=64,topk=2,top_k=2")


def test_name_of_a_quantisation_is_no_type() -> None:
    with pytest.raises(InvalidProgramError) as caught:
        parse_operator("linear:m=2,n=3,k=4,dtype=w8a8")
    assert "dtype=fp8,scaling=block128" in caught.value.hint


def test_mistyped_protocol_names_the_nearest(predictor: LatencyPredictor) -> None:
    with pytest.raises(CdmppError, match="did you mean kernel"):
        predictor.predict(["linear:m=2,n=3,k=4"], "t4", protocol="kernal")


@pytest.mark.parametrize(
    ("short", "name"),
    [("h100", "h100-sxm"), ("a100", "a100-sxm4-80gb"), ("4090", "rtx-4090"), ("1080 Ti", "gtx-1080-ti")],
)
def test_short_device_name_is_its_commonest_board(predictor: LatencyPredictor, short: str, name: str) -> None:
    (by_short,), (by_name,) = (predictor.predict(["linear:m=64,n=64,k=64"], device) for device in (short, name))
    assert by_short == by_name
    assert by_short.device == name


def test_measured_tables_must_name_the_board_exactly() -> None:
    with pytest.raises(UnknownDeviceError, match="may mean several devices"):
        lookup("h100")


def test_every_short_name_is_a_board_of_the_table() -> None:
    from cdmpp.devices.registry import _COMMONEST

    for short, name in _COMMONEST.items():
        board = commonest(short)
        assert board is not None and board.name == name
        with pytest.raises(UnknownDeviceError):  # an exact name needs no entry
            lookup(short)


def test_names_without_a_product_have_no_commonest_board() -> None:
    assert [commonest(name) for name in ("rtx", "titan", "", "nvidia", "z9000")] == [None] * 5
    assert other_boards("h100") == ["h100-pcie", "h100-nvl"]


@pytest.mark.parametrize("source", ["model.onnx", Path("folder/model.pt2")])
def test_path_of_a_model_names_the_right_call(predictor: LatencyPredictor, source: str | Path) -> None:
    (prediction,) = predictor.predict([source], "t4")
    assert prediction.error is not None
    assert "whole model" in prediction.error.message
    assert "cdmpp.load_programs(path)" in prediction.error.hint


@pytest.mark.tvm
def test_tir_objects_are_programs(predictor: LatencyPredictor) -> None:
    tvm = pytest.importorskip("tvm")
    from cdmpp.programs.frontends.tir import program_from_tvmscript

    program = program_from_tvmscript(COPY.replace("T.block", "T.sblock"))
    function = tvm.ir.load_json(program.tvm_json)
    module = tvm.IRModule({"main": function})
    (expected,) = predictor.predict([program], "core-i9-10940x")
    for prediction in predictor.predict([function, module], "core-i9-10940x"):
        assert prediction.error is None
        assert prediction.latency_s == expected.latency_s
    both = tvm.IRModule({"first": function, "second": function})
    (refused,) = predictor.predict([both], "core-i9-10940x")
    assert refused.error is not None and "2 PrimFuncs: first, second" in refused.error.message
