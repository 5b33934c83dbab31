"""Operations and traffic against counts by hand, and the roofline."""

import numpy as np
import pytest

from cdmpp.data.assemble import DOUBTFUL
from cdmpp.data.load import load_table
from cdmpp.data.physics import EXCLUDED, roofline_s, table_roofline_s, uses_matrix_units, work
from cdmpp.data.table import make_block
from cdmpp.devices import lookup
from cdmpp.errors import InvalidProgramError
from cdmpp.features.encode import encode_operator
from cdmpp.programs.operators import lowered_operators, make_operator
from tests.features.shapes import drawn_fields


def counted(operator, dtype="float32", flags=None, **sizes):
    columns = {name: np.array([value], dtype=np.int64) for name, value in sizes.items()}
    result = make_block(operator, dtype, flags or {}, columns, np.arange(1))
    flops, moved = work(operator, dtype, result.flags, result.sizes)
    return float(flops[0]), float(moved[0])


def test_counts_by_hand():
    assert counted("linear", m=2, n=3, k=5) == (60, 4 * (10 + 15 + 6))
    assert counted("linear", flags={"bias": True}, m=2, n=3, k=5) == (66, 4 * (10 + 15 + 6 + 3))
    assert counted("bmm", "float16", batch=7, m=2, n=3, k=5) == (420, 2 * 7 * (10 + 15 + 6))
    # 1 x 4 x 6 x 6, two groups, 3 x 3: output 1 x 8 x 4 x 4
    conv = {"n": 1, "c_in": 4, "h": 6, "w": 6, "c_out": 8, "kh": 3, "kw": 3, "groups": 2}
    assert counted("conv2d", **conv) == (2 * 8 * 16 * 2 * 9, 4 * (4 * 36 + 8 * 2 * 9 + 8 * 16))
    # stride 3 with a 1 x 1 kernel reads 2 x 2 of 6 x 6 points
    strided = {"n": 1, "c_in": 4, "h": 6, "w": 6, "c_out": 8, "kh": 1, "kw": 1, "stride_h": 3, "stride_w": 3}
    assert counted("conv2d", **strided) == (2 * 8 * 4 * 4, 4 * (4 * 4 + 32 + 8 * 4))
    heads = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    assert counted("attention_decode", "float16", q_len=1, past_len=9, **heads) == (
        4 * 2 * 4 * 10 * 8,
        2 * 2 * 2 * 8 * (4 + 10 * 2),
    )
    assert counted("attention_prefill", q_len=3, past_len=0, **heads)[0] == 4 * 2 * 4 * 6 * 8
    assert counted("attention_encoder", q_len=3, past_len=0, **heads)[0] == 4 * 2 * 4 * 9 * 8
    # five products over 6 of 9 pairs, and a sum over each result; 2 x 3 tokens of 4 + 2 heads
    gradients = {"batch": 2, "q_len": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "v_dim": 4}
    assert counted("attention_backward", "float8_e4m3", {"causal": True}, **gradients) == (
        2 * 2 * 4 * (6 * (3 * 8 + 2 * 4) + 3 * 4),
        2 * 3 * (6 * (8 + 4) + 4 * 4 + 2 * (4 * 8 + 2 * (8 + 4))),
    )
    assert counted("fused_add_rms_norm", "float16", rows=2, cols=5)[1] == 2 * 40
    assert counted("rmsnorm_backward", "float16", rows=2, cols=5)[1] == 2 * 30
    for direction, elements in (("fwd", 10 + 2), ("bwd", 20), ("fwd_bwd", 22)):
        assert counted("softmax_cross_entropy", flags={"direction": direction}, rows=2, cols=5)[1] == 4 * elements
    assert counted("add", flags={"inputs": 3}, rows=2, cols=5) == (20, 4 * 40)
    assert counted("silu_and_mul", "int8", rows=2, cols=5)[1] == 30
    assert counted("max_pool2d", n=1, c=2, h=4, w=4, kh=2, kw=2, stride_h=2, stride_w=2) == (32, 4 * (8 + 32))


def test_every_operator_moves_bytes():
    for name, kind in lowered_operators().items():
        required = {n: 128 for n, f in kind.model_fields.items() if f.is_required() and n != "operator"}
        spec = make_operator({"operator": name, **required})
        flags = {field: getattr(spec, field) for field in kind.structural_fields}
        flops, moved = counted(name, spec.dtype, flags, **spec.sizes())
        assert flops >= 0
        assert moved > 0


def test_roofline_is_the_slower_of_both():
    device = lookup("t4")
    sizes = {n: np.array([8192], dtype=np.int64) for n in "mnk"}
    big = make_block("linear", "float32", {}, sizes, np.arange(1))
    assert roofline_s(big, device)[0] == pytest.approx(2 * 8192**3 / device.peak("float32", matrix=True))
    sizes = {n: np.array([8192], dtype=np.int64) for n in ("rows", "cols")}
    copied = make_block("relu", "float32", {}, sizes, np.arange(1))
    assert roofline_s(copied, device)[0] == pytest.approx(8 * 8192**2 / device.mem_bandwidth_bytes_per_s)


def test_table_roofline_row_by_row(layout, save):
    _, needed, _ = layout
    table = load_table(save(needed))
    result = table_roofline_s(table)
    for block in table.specs:
        for position, row in enumerate(block.row_index):
            single = block.take(np.array([position]))
            assert result[row] == roofline_s(single, table.device_spec(table.device[int(row)]))[0]
    assert set(table.excluded.names) <= {"", *EXCLUDED, *DOUBTFUL}


#: Operators whose definition and lowered program do the same arithmetic.
COMPARED = (
    *(name for name in lowered_operators() if uses_matrix_units(name) and name != "conv2d"),
    *("rotary_embedding", "kv_cache_save", "moe_gating", "moe_shuffle", "argmax", "add", "softmax", "copy"),
)


@pytest.mark.parametrize("name", COMPARED)
def test_counts_are_those_of_the_lowered_program(name):
    rng, seen = np.random.default_rng(7), 0
    while seen < 6:
        try:
            spec = make_operator(drawn_fields(name, rng) | large_sizes(name, rng))
        except InvalidProgramError:
            continue
        seen += 1
        flags = {field: getattr(spec, field) for field in type(spec).structural_fields}
        sizes = {field: np.array([value]) for field, value in spec.sizes().items()}
        flops, moved = work(name, spec.dtype, flags, sizes)
        features = encode_operator(spec).totals[0]
        # The program counts the softmax of attention too.
        assert flops[0] == pytest.approx(features[0], rel=0.1), spec.text()
        # It also counts scales, index tensors and the wider input that it quantises; a prefill reads expanded keys.
        least = 0.02 if name == "mla_prefill" else 0.45
        assert least * features[1] <= moved[0] <= 1.02 * features[1], spec.text()


def large_sizes(name, rng):
    """Sizes at which products outweigh everything around them."""
    sizes = {}
    for field, info in lowered_operators()[name].model_fields.items():
        if info.annotation is int and field not in ("inputs", "batch", "q_len", "past_len", "ep", "tp", "topk"):
            sizes[field] = int(rng.integers(64, 512))
    if name == "rotary_embedding":
        sizes["cols"] = sizes["head_dim"] * int(rng.integers(16, 64))
    if "kv_heads" in sizes:
        sizes["heads"] = sizes["kv_heads"] * int(rng.integers(1, 4))
    if "topk" in lowered_operators()[name].model_fields:
        sizes["topk"] = int(rng.integers(1, 9))
    if name in ("moe", "moe_w13"):
        sizes |= {"ep": 1, "tp": int(rng.integers(1, 4))}  # the program reads tokens that other ranks serve
    if name in ("attention_decode", "mla_decode"):
        sizes["q_len"] = 1
    return sizes


def test_work_of_experts_by_hand():
    # 4 tokens on 2 of 8 experts: one row each; every expert's weights are read
    sizes = {"tokens": 4, "hidden": 16, "intermediate": 8, "experts": 8, "topk": 2}
    flops, moved = counted("moe", "bfloat16", **sizes)
    assert flops == 2 * 8 * 16 * 8 * 3
    assert moved == 2 * (8 * 3 * 16 * 8 + 2 * 4 * 16)
    assert counted("moe_w13", "bfloat16", **sizes)[0] == 2 * 8 * 16 * 8 * 2
    # half of the experts, half of each expert's columns
    assert counted("moe", "bfloat16", **sizes, tp=2, ep=2)[0] == 2 * 4 * 16 * 4 * 3


def test_work_of_scaled_products_counts_each_type():
    sizes, flops = {"m": 8, "n": 16, "k": 32}, 2 * 8 * 16 * 32
    for dtype, flags, moved in (
        ("float8_e4m3", {}, 8 * 32 + 16 * 32 + 8 * 16),
        ("float8_e4m3", {"scaling": "block128"}, 8 * 32 + 16 * 32 + 2 * 8 * 16),
        ("bfloat16", {"weight_dtype": "int4"}, 2 * 8 * 32 + 16 * 32 / 2 + 2 * 8 * 16),
        ("float16", {"out_dtype": "float32"}, 2 * 8 * 32 + 2 * 16 * 32 + 4 * 8 * 16),
    ):
        assert counted("linear", dtype, flags, **sizes) == (flops, moved)


def test_work_of_experts_counts_the_weights_of_active_experts():
    sizes = {"tokens": 1, "hidden": 64, "intermediate": 32, "experts": 8, "topk": 2}
    assert counted("moe_w13", "bfloat16", **sizes) == (2 * 2 * 64 * 64, 2 * (64 + 2 * 64 * 64 + 2 * 64))
    assert counted("moe", "bfloat16", **sizes) == (2 * 2 * 64 * 96, 2 * (64 + 2 * 64 * 96 + 64))
    # Half of the columns, and fp4 weights of half a byte.
    narrow = counted("moe", "bfloat16", {"weight_dtype": "float4_e2m1"}, **sizes, tp=2)
    assert narrow == (2 * 2 * 64 * 48, 2 * 64 + 2 * 64 * 48 / 2 + 2 * 64)


def test_latent_attention_reads_the_cache_once_in_its_type():
    sizes = {"batch": 2, "past_len": 99, "heads": 4}
    flops, moved = counted("mla_decode", "bfloat16", **sizes)
    assert flops == 2 * 2 * 4 * 100 * (576 + 512)
    assert moved == 2 * (2 * 100 * 576 + 2 * 4 * (576 + 512))
    assert moved - counted("mla_decode", "bfloat16", {"kv_dtype": "float8_e4m3"}, **sizes)[1] == 2 * 100 * 576
    whole = counted("mla_decode", "bfloat16", {"module": True, "weight_dtype": "float8_e4m3"}, **sizes)
    weights = 7168 * (1536 + 576) + 1536 * 4 * 192 + 512 * 4 * 256 + 4 * 128 * 7168
    assert whole == (flops + 2 * 2 * weights, 2 * 2 * 100 * 576 + weights + 2 * 2 * 2 * 7168)


@pytest.mark.parametrize(
    ("device", "latency_us", "host"),
    [
        ("NVIDIA B200", lambda bound_us: 160.0, True),
        ("NVIDIA B200", lambda bound_us: 12.0, False),  # a kernel before the product
        ("NVIDIA B200", lambda bound_us: 30 + 200 * bound_us, False),  # rises with the sizes: a slow kernel
        ("Intel Arc Pro B60", lambda bound_us: 160.0, False),  # no other framework on the device
    ],
)
def test_flat_latencies_far_above_those_of_other_frameworks_are_host_time(columns_of, save, device, latency_us, host):
    k = np.tile(16 * np.arange(1, 81), 3)
    columns = {name: [column[0]] * len(k) for name, column in columns_of("aiconfigurator_gemm_quantised").items()}
    columns["framework"] = ["vllm"] * 80 + ["sglang"] * 80 + ["trtllm"] * 80
    columns |= {"dtype": ["fp8_block"] * len(k), "m": [8] * len(k), "k": k.tolist()}
    columns["device"] = [device] * 80 + ["NVIDIA B200"] * 160
    bound_us = table_roofline_s(load_table(save(columns))) * 1e6
    slow = np.array([latency_us(bound) for bound in bound_us])
    columns["latency_us"] = np.where(np.arange(len(k)) < 80, slow, 4 + 1.3 * bound_us).tolist()
    table = load_table(save(columns, "slow.parquet"))
    assert table.excluded.counts() == ({"host_bound": 80, "": 160} if host else {"": 240})
