"""Rows of Liger-Kernel and of cuDNN's front end become the operators, and the implementations, that were timed."""

import pytest

from cdmpp.data.load import load_table


def programs(table):
    """Texts of every row's fields but for the operator's name, after it."""
    every = [table.program_fields(int(key)) for key in table.program_key]
    return [" ".join([f.pop("operator"), *(f"{name}={value}" for name, value in f.items())]) for f in every]


def ran(table):
    return list(zip(table.framework.array(), table.implementation.array(), strict=True))


def test_liger_mapping(columns_of, save):
    table = load_table(save(columns_of("liger")))
    assert programs(table) == [
        "rmsnorm_backward dtype=bfloat16 rows=64 cols=4096",
        "rotary_embedding dtype=bfloat16 rows=1024 cols=5120 head_dim=128",
        "softmax_cross_entropy dtype=float32 direction=fwd_bwd rows=1024 cols=4096",
        "softmax_cross_entropy dtype=float32 direction=bwd rows=1024 cols=4096",
        "embedding dtype=float32 rows=32 cols=768 table_rows=512",
        "silu_and_mul dtype=bfloat16 rows=8192 cols=1024",
        "fused_add_rms_norm dtype=float16 rows=64 cols=128",
    ]
    own, compiled, composed = ("triton", "fused"), ("pytorch", "compiled"), ("pytorch", "composed")
    assert ran(table) == [composed, own, own, composed, compiled, compiled, ("triton", "composed")]
    assert set(table.protocol.used()) == {"kernel"}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("mode", "full"),
        ("op", "swiglu"),
        ("x_value", "llama_3_8b"),
        ("x_value", "0"),
        ("config", "{"),
        ("config", "[1]"),
        ("config", '{"M": "64", "dtype": "torch.bfloat16"}'),
        ("config", '{"M": 1e9, "dtype": "torch.bfloat16"}'),
    ],
)
def test_liger_row_without_operator_or_sizes_is_unsupported(columns_of, save, column, value):
    columns = columns_of("liger")
    columns[column][0] = value
    table = load_table(save(columns))
    assert table.unsupported.array().tolist() == ["unknown_operator"] + [""] * 6


def test_liger_backward_of_megatron_contains_the_forward_pass(columns_of, save):
    columns = columns_of("liger")
    columns["mode"][5] = "backward"
    assert load_table(save(columns)).unsupported.array()[5] == "unknown_operator"


def test_cudnn_attention_mapping(columns_of, save):
    table = load_table(save(columns_of("cudnn_attention")))
    prefill, encoder, latent, backward = programs(table)
    assert prefill.startswith("attention_prefill dtype=bfloat16 batch=2 q_len=4096 past_len=0 heads=64 kv_heads=8")
    assert encoder.startswith("attention_encoder dtype=float8_e4m3") and latent.startswith("mla_prefill dtype=bfloat16")
    assert "rope=64 nope=128 v_dim=128" in latent
    sizes = "causal=True batch=2 q_len=4096 heads=64 kv_heads=64 head_dim=192 v_dim=128"
    assert backward == f"attention_backward dtype=float8_e4m3 {sizes}"
    assert set(ran(table)) == {("vendor", "fused")}


@pytest.mark.parametrize(
    ("column", "value"), [("window", 128), ("dtype", "mxfp8"), ("deterministic", True), ("kv_len", 8192)]
)
def test_cudnn_attention_that_no_operator_states_is_unsupported(columns_of, save, column, value):
    columns = columns_of("cudnn_attention")
    columns[column] = [value, *columns[column][1:]]
    assert load_table(save(columns)).unsupported.array().tolist() == ["unknown_operator", "", "", ""]


def test_cudnn_norms_mapping(columns_of, save):
    table = load_table(save(columns_of("cudnn_norms")))
    assert [text.split()[0] for text in programs(table)] == ["rmsnorm", "rmsnorm_backward", "layernorm"]
    assert ran(table) == [("vendor", "fused"), ("pytorch", "fused"), ("pytorch", "compiled")]
