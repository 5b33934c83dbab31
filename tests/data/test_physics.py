"""Operations and traffic against counts by hand, and the roofline."""

from __future__ import annotations

import numpy as np
import pytest

from cdmpp.data.doubtful import DOUBTFUL
from cdmpp.data.load import load_table
from cdmpp.data.physics import EXCLUDED, roofline_s, table_roofline_s, work
from cdmpp.data.table import make_block
from cdmpp.devices import lookup
from cdmpp.programs.operators import lowered_operators, make_operator


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
    assert counted("add", flags={"inputs": 3}, rows=2, cols=5) == (20, 4 * 40)
    assert counted("silu_and_mul", "int8", rows=2, cols=5)[1] == 30
    assert counted("max_pool2d", n=1, c=2, h=4, w=4, kh=2, kw=2, stride_h=2, stride_w=2) == (32, 4 * (8 + 32))


def test_every_operator_moves_bytes():
    for name, kind in lowered_operators().items():
        required = {n: 4 for n, f in kind.model_fields.items() if f.is_required() and n != "operator"}
        if name == "rotary_embedding":
            required["cols"] = 128  # one head
        make_operator({"operator": name, **required})
        flops, moved = counted(name, **required)
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
