"""Vectors of a quantised product and of a layer of experts, computed by hand."""

import pytest

from cdmpp.features.class_features import PROGRAM_COLUMNS
from cdmpp.features.encode import encode_operator
from cdmpp.programs.operators import parse_operator
from tests.features.raw import raw_leaves


def features(text: str) -> tuple[list[dict[str, float]], dict[str, float]]:
    encoded = encode_operator(parse_operator(text))
    return raw_leaves(encoded), dict(zip(PROGRAM_COLUMNS, encoded.totals[0].tolist(), strict=True))


def expect(leaf: dict[str, float], **columns: float) -> None:
    assert {name: leaf[name] for name in columns} == pytest.approx(columns, rel=1e-5)


def test_a_quantised_product() -> None:
    # x[4, 16] bfloat16 times a static scale, as float8; w[8, 16] float8; the product rescaled, as bfloat16
    leaves, totals = features("linear:m=4,n=8,k=16,dtype=float8_e4m3,scaling=tensor")
    quantise, first, dot, rescale = leaves
    expect(quantise, trips=64, flops=64, float_cast=128, read_0_unique_bytes=128, read_1_unique_bytes=4)
    expect(quantise, store_unique_bytes=64, store_element_bytes=1, store_is_parameter=0)
    assert first["is_init"] == 1
    expect(dot, trips=512, flops=1024, is_contraction=1, contraction_m=4, contraction_n=8, contraction_k=16)
    expect(dot, read_0_unique_bytes=64, read_0_is_parameter=0, read_1_unique_bytes=128, read_1_is_parameter=1)
    expect(rescale, trips=32, flops=64, read_0_unique_bytes=128, read_1_unique_bytes=4, read_2_unique_bytes=4)
    expect(rescale, store_unique_bytes=64, store_element_bytes=2, store_is_parameter=1)
    # x, its scale, w, its scale, y
    assert totals["bytes"] == 128 + 4 + 128 + 4 + 64
    assert totals["flops"] == 2 * 4 * 8 * 16
    assert totals["work_fraction"] == pytest.approx(1024 / (64 + 1024 + 64))


def test_a_weight_of_four_bits_is_widened_inside_the_product() -> None:
    # no copy of the weight; a scale for each block of 128 by 128
    (_, dot, rescale), totals = features("linear:m=1,n=128,k=256,dtype=float16,weight_dtype=int4")
    expect(dot, read_1_unique_bytes=128 * 256 / 2, read_1_element_bytes=0.5, read_2_unique_bytes=2 * 4)
    expect(rescale, store_unique_bytes=2 * 128)
    assert totals["bytes"] == 2 * 256 + 128 * 128 + 8 + 2 * 128


def test_a_layer_of_experts() -> None:
    # two tokens, one expert each: two tiles of 16 rows, of which one row is a token's
    leaves, totals = features("moe:tokens=2,hidden=4,intermediate=3,experts=2,topk=1")
    assert len(leaves) == 8
    _, first, activation, _, second, _, combine, last = leaves
    expect(first, trips=2 * 16 * 6 * 4, is_contraction=1, indirect=1)
    expect(first, contraction_batch=2, contraction_m=16, contraction_n=6, contraction_k=4)
    # rows of two tokens, and the gate and up columns of two experts
    expect(first, read_0_unique_bytes=2 * 2 * 4, read_1_unique_bytes=2 * 2 * 6 * 4, store_unique_bytes=4 * 2 * 16 * 6)
    expect(activation, trips=2 * 16 * 3, float_math=2 * 16 * 3, store_unique_bytes=2 * 2 * 16 * 3)
    expect(second, trips=2 * 16 * 4 * 3, contraction_n=4, contraction_k=3, read_1_unique_bytes=2 * 2 * 4 * 3)
    expect(combine, trips=2 * 4, indirect=1, read_0_unique_bytes=2 * 4)
    expect(last, store_unique_bytes=2 * 2 * 4, store_is_parameter=1)
    assert totals["flops"] == 2 * 2 * 4 * 3 * 3
    assert totals["bytes"] == 16 + 96 + 48 + 8 + 16


@pytest.mark.parametrize("balance", ["power_law_1.01", "power_law_1.2"])
def test_routing_changes_sizes_and_not_the_structure(balance: str) -> None:
    text = "moe:tokens=64,hidden=128,intermediate=64,experts=16,topk=2"
    even, uneven = (encode_operator(parse_operator(t)) for t in (text, f"{text},balance={balance}"))
    assert even.positions.tolist() == uneven.positions.tolist()
    assert (even.leaves != uneven.leaves).any()
    assert uneven.totals[0, 0] <= even.totals[0, 0]


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        # a chunk of 3 tokens behind 5 sees 6 + 7 + 8 keys; two sequences see 5 keys each
        (
            "attention_mixed:q_len=3,past_len=5,decodes=2,decode_past_len=4,heads=2,kv_heads=1,head_dim=8",
            2 * 31 * (4 * 8 + 5),
        ),
        ("mla_prefill:batch=1,q_len=4,heads=2,nope=3,rope=1,v_dim=2", 2 * 10 * (2 * (3 + 1 + 2) + 5)),
        ("mla_decode:batch=1,past_len=9,heads=2,latent=4,rope=2", 2 * 10 * (4 * 4 + 2 * 2 + 6)),
    ],
)
def test_needed_operations_of_attention(text: str, flops: float) -> None:
    assert features(text)[1]["flops"] == pytest.approx(flops, rel=1e-4)
