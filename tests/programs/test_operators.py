"""Operator specifications: reading, checking, naming, identity."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.errors import InvalidProgramError, UnsupportedOperatorError
from cdmpp.programs.elements import MAX_EXTENT
from cdmpp.programs.operators import make_operator, operator_family, operator_types, parse_operator, structural_flags
from tests.features.shapes import random_specs

LINEAR = {"operator": "linear", "m": 512, "n": 4096, "k": 1024, "dtype": "float16"}


def test_text_and_object_are_one_program() -> None:
    spec = parse_operator("linear:m=512,n=4096,k=1024,dtype=float16")
    assert spec == make_operator(LINEAR)
    assert spec.hash() == make_operator(dict(reversed(LINEAR.items()))).hash()
    assert len(spec.hash()) == 32
    assert spec.text() == "linear:dtype=float16,m=512,n=4096,k=1024"


@given(st.integers(0, 10_000))
def test_text_reads_back(seed: int) -> None:
    (spec,) = random_specs(1, seed)
    assert parse_operator(spec.text()) == spec
    assert make_operator(spec.canonical()) == spec
    assert parse_operator(spec.text()).hash() == spec.hash()


def test_other_sizes_dtypes_and_operators_have_other_hashes() -> None:
    texts = [
        "linear:m=1,n=2,k=3",
        "linear:m=2,n=1,k=3",
        "linear:m=1,n=2,k=3,bias=true",
        "linear:m=1,n=2,k=3,dtype=int8",
        "bmm:batch=1,m=1,n=2,k=3",
    ]
    assert len({parse_operator(t).hash() for t in texts}) == len(texts)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True, [], float("nan"), float("inf"), MAX_EXTENT + 1, 10**30])
def test_impossible_sizes(value: Any) -> None:
    with pytest.raises(InvalidProgramError) as caught:
        make_operator(LINEAR | {"m": value})
    assert "linear: m" in caught.value.message
    assert "linear takes" in caught.value.hint


def test_number_of_thousands_of_digits_is_an_impossible_size() -> None:
    with pytest.raises(InvalidProgramError, match="linear: m"):
        make_operator(LINEAR | {"m": 10**5000})


MOE = "moe:tokens=8,hidden=64,intermediate=64,"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("linear:m=1,n=1,k=1,dtype=fp8,weight_dtype=bf16", "not wider than the activations", "int4"),
        (MOE + "experts=8,topk=2,weight_dtype=fp32", "float32: a weight is not wider", "int8"),
        ("linear:m=1,n=1,k=1,weight_dtype=int8", "float32 activations", "dtype for weight_dtype=int8: float16"),
        ("linear:m=1,n=1,k=1,dtype=int4", "int4 activations", "a type of weights only"),
        ("linear:m=1,n=1,k=1,dtype=fp8,scaling=nvfp4", "no scaling 'nvfp4'", "or leave scaling out"),
        ("linear:m=1,n=1,k=1,dtype=fp16,scaling=channel", "no scaling 'channel'", "leave scaling out"),
        (MOE + "experts=8,topk=9", "topk=9 exceeds experts=8", "topk of the experts"),
        (MOE + "experts=8,topk=2,ep=16", "ep=16 exceeds experts=8", "at least one expert"),
        (MOE + "experts=8,topk=2,tp=65", "tp=65 exceeds intermediate=64", "at least one column"),
        (MOE + "experts=2147483647,topk=1", "experts=2147483647 exceeds 8192", "at most 8192"),
        (MOE + "experts=8,topk=2,balance=zipf", "not 'zipf'", "balance=balanced"),
        ("grouped_gemm:groups=2147483647,rows=1,n=1,k=1", "groups=2147483647 exceeds 8192", "at most 8192"),
        ("mla_decode:batch=1,heads=16,weight_dtype=fp8", "belong to the projections", "module=true"),
        ("rotary_embedding:rows=4,cols=100", "head_dim=128 does not divide cols=100", "heads"),
    ],
)
def test_message_has_the_value_and_the_hint_what_is_allowed(text: str, message: str, hint: str) -> None:
    with pytest.raises(InvalidProgramError) as caught:
        parse_operator(text)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_types_of_sums_and_results_have_aliases() -> None:
    made = parse_operator("linear:m=1,n=1,k=1,dtype=fp16,accumulate=fp16,out_dtype=fp32")
    assert made == parse_operator("linear:m=1,n=1,k=1,dtype=float16,accumulate=float16,out_dtype=float32")


def test_whole_numbers_of_json_are_integers() -> None:
    assert make_operator(LINEAR | {"m": 512.0}) == make_operator(LINEAR)


@pytest.mark.parametrize(
    "change", [{"dtype": "float128"}, {"dtype": 16}, {"bias": "yes"}, {"bias": 1}, {"alpha": 2}, {"M": 512}]
)
def test_unknown_fields_and_values(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidProgramError):
        make_operator(LINEAR | change)


@pytest.mark.parametrize("name", [None, 3, "", "gemv", "LINEAR", ["linear"]])
def test_unknown_operators_list_the_known(name: Any) -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        make_operator({"operator": name})
    assert "linear" in caught.value.hint


@pytest.mark.parametrize(
    "text", ["linear", "linear:", "linear:m", "linear:m=1,m=2,n=1,k=1", "linear:m=1;n=1", "linear:m=1,n=1,k=x"]
)
def test_text_that_is_no_operator(text: str) -> None:
    with pytest.raises(InvalidProgramError):
        parse_operator(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("conv2d:n=1,c_in=3,h=8,w=8,c_out=4,kh=3,kw=3,groups=2", "groups"),
        ("conv2d:n=1,c_in=3,h=2,w=2,c_out=4,kh=3,kw=3", "kernel"),
        ("conv2d:n=1,c_in=3,h=8,w=8,c_out=4,kh=3,kw=3,bias=true,direction=bwd_data", "bias"),
        ("max_pool2d:n=1,c=1,h=2,w=2,kh=3,kw=3", "window"),
        ("attention_prefill:batch=1,q_len=8,heads=2,kv_heads=4,head_dim=8", "kv_heads"),
        ("attention_backward:batch=1,q_len=8,heads=6,kv_heads=4,head_dim=8", "kv_heads=4 does not divide heads=6"),
        ("linear:m=2147483647,n=2147483647,k=2147483647", "elements"),
        ("add:rows=8,cols=8,inputs=5", "inputs"),
    ],
)
def test_sizes_that_contradict_each_other(text: str, word: str) -> None:
    with pytest.raises(InvalidProgramError) as caught:
        parse_operator(text)
    assert word in caught.value.message


def test_a_program_that_is_too_large_names_the_sizes_to_reduce() -> None:
    with pytest.raises(InvalidProgramError, match="linear: its sizes are too large") as caught:
        parse_operator("linear:m=1048576,n=65536,k=2147483647")
    assert "reduce one of k=2147483647, m=1048576, n=65536" in caught.value.hint


def test_cached_keys_of_unequal_sequences_are_their_mean() -> None:
    decode = "attention_decode:heads=8,kv_heads=8,head_dim=64"
    assert parse_operator(f"{decode},batch=3,past_total=100") == parse_operator(f"{decode},batch=3,past_len=33")
    none = {"operator": "attention_decode", "batch": 3, "heads": 8, "kv_heads": 8, "head_dim": 64, "past_total": None}
    assert make_operator(none) == parse_operator(f"{decode},batch=3")
    with pytest.raises(InvalidProgramError, match="past_len is not the mean of past_total=100 over batch=3"):
        parse_operator(f"{decode},batch=3,past_total=100,past_len=34")
    with pytest.raises(InvalidProgramError, match="cached keys of the whole batch, not -1"):
        parse_operator(f"{decode},batch=3,past_total=-1")
    with pytest.raises(InvalidProgramError, match="batch: missing"):
        parse_operator(f"{decode},past_total=100")


def test_an_embedding_is_as_large_as_its_table_or_its_result() -> None:
    # 2^20 rows of 2^13 from a table of 2^18: neither tensor is near the limit, their product would be.
    parse_operator("embedding:rows=1048576,cols=8192,table_rows=262144")


def test_families() -> None:
    names = {name: operator_family(name) for name in operator_types()}
    assert {names["linear"], names["bmm"]} == {"gemm"}
    assert names["conv2d"] == "conv"
    assert names["attention_decode"] == "attention"
    assert names["softmax"] == names["embedding"] == "vector"


def test_flags_that_select_a_structure() -> None:
    def flags(text: str) -> dict[str, Any]:
        spec = parse_operator(text)
        return structural_flags(spec.operator, spec.model_dump())

    conv = "conv2d:n=1,c_in=4,h=8,w=8,c_out=4,kh=3,kw=3"
    assert flags(conv) == {"direction": "fwd", "bias": False, "padded": False, "grouped": False}
    assert flags(conv + ",pad_w=1,groups=2")["padded"]
    assert flags(conv + ",pad_w=1,groups=2")["grouped"]
    heads = "head_dim=8,batch=1,q_len=4,heads=8"
    assert flags(f"attention_prefill:{heads},kv_heads=8") == {"kv": "same", "causal": True}
    assert flags(f"attention_encoder:{heads},kv_heads=1") == {"kv": "one", "causal": False}
    assert flags(f"attention_prefill:{heads.replace('q_len=4', 'q_len=1')},kv_heads=2") == {
        "kv": "grouped",
        "causal": False,
    }
