"""Summary columns of an operator's own fields: types, scales, sizes, loads of experts."""

import numpy as np
import pytest

from cdmpp.model.nn.figures import operator_columns
from cdmpp.model.nn.inputs import OPERATOR_COLUMNS
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.templates import size_names

MOE = "moe:tokens=128,hidden=7168,intermediate=2048,experts=256,topk=8,tp=2,ep=4,dtype=float8_e4m3"


def columns(text: str) -> dict[str, float]:
    """Columns of one operator that are not 0."""
    spec = parse_operator(text)
    sizes = np.array([[spec.sizes()[name] for name in size_names(spec.operator)]])
    [row] = operator_columns(spec.structural_class(), sizes)[0].tolist()
    return {name: value for name, value in zip(OPERATOR_COLUMNS, row, strict=True) if value}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("linear:m=3,n=4,k=5,dtype=bfloat16", {}),
        (
            "linear:m=3,n=4,k=5,dtype=bfloat16,weight_dtype=int4,scaling=block128",
            {"weight_bits": 2, "scaling_block128": 1},
        ),
        ("linear:m=3,n=4,k=5,dtype=float4_e2m1,scaling=nvfp4", {"scaling_nvfp4": 1}),
        ("linear:m=3,n=4,k=5,dtype=float16,layout=tn,accumulate=float16", {"layout_tn": 1, "half_accumulate": 1}),
    ],
)
def test_types_and_scales_of_a_product_are_columns(text: str, expected: dict[str, float]) -> None:
    assert columns(text) == expected


def test_cache_type_and_lengths_of_attention_are_columns() -> None:
    text = "attention_decode:batch=3,past_len=127,heads=31,kv_heads=1,head_dim=127,dtype=bfloat16"
    plain = {"size_batch": 2, "size_q_len": 1, "size_past_len": 7, "size_heads": 5, "size_kv_heads": 1}
    assert columns(text) == {**plain, "size_head_dim": 7}
    assert columns(text + ",kv_dtype=float8_e4m3")["cache_bits"] == 3


def test_hidden_columns_of_latent_attention_belong_to_the_module() -> None:
    text = "mla_decode:batch=1,past_len=100,heads=16"
    assert "size_hidden" not in columns(text)
    module = columns(text + ",module=true,weight_dtype=float8_e4m3")
    assert module["module"] == 1 and module["weight_bits"] == 3 and module["size_hidden"] > 12


def test_loads_of_experts_are_columns_of_the_rank_with_most_rows() -> None:
    even, skewed = columns(MOE), columns(MOE + ",balance=power_law_1.2")
    assert even["size_intermediate"] == pytest.approx(np.log2(1 + 1024))
    assert even["load_active_experts"] == pytest.approx(np.log2(1 + 64))
    assert even["load_rows_per_expert"] == pytest.approx(np.log2(1 + 4))
    assert "load_imbalance" not in even and "power_law" not in even
    assert skewed["load_imbalance"] > 1 and skewed["power_law"] == pytest.approx(1.2)


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    specs = [parse_operator(MOE.replace("128", str(tokens)) + ",balance=power_law_1.01") for tokens in (1, 7, 300)]
    sizes = np.array([[spec.sizes()[name] for name in size_names("moe")] for spec in specs])
    together, grouped = operator_columns(specs[0].structural_class(), sizes)
    alone = [operator_columns(specs[0].structural_class(), sizes[i : i + 1]) for i in range(3)]
    assert grouped is not None
    np.testing.assert_array_equal(together, np.concatenate([own for own, _ in alone]))
    np.testing.assert_array_equal(grouped, np.concatenate([pair for _, pair in alone if pair is not None]))


def test_a_name_that_is_no_structural_class_gives_zeros() -> None:
    own, grouped = operator_columns("unknown:float32", np.ones((2, 3), dtype=np.int64))
    assert not own.any() and own.shape == (2, len(OPERATOR_COLUMNS)) and grouped is None
