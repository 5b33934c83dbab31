"""Against TVM's own PerStoreFeature, where both define the same quantity.

It has one row per written buffer (the last store wins) and its own idea of unique bytes for fused loops
and of reuse; counts of arithmetic, trips, touched bytes, loop annotations and thread extents are common.
"""

import sys
import types
from typing import Any

import numpy as np
import pytest

from cdmpp.features.encode import encode_tvm_json
from cdmpp.programs.operators import parse_operator
from tests.features.matmul import matmul, tiled_matmul
from tests.features.raw import raw_leaves

tvm = pytest.importorskip("tvm")
pytestmark = pytest.mark.tvm

_BUFFER = (
    *("read", "write", "readwrite", "bytes", "unique_bytes", "lines", "unique_lines", "multiple", "serial", "none"),
    *("distance_iter", "distance_bytes", "reuse", "bytes_r", "unique_bytes_r", "lines_r", "unique_lines_r", "stride"),
)
_KINDS = ("mad", "addsub", "mul", "divmod", "cmp", "math", "other")
_POSITIONS = tuple(f"position_{i}" for i in range(8))
NAMES = (
    *(f"float_{k}" for k in _KINDS),
    *(f"int_{k}" for k in _KINDS),
    "bool",
    "select",
    *(
        f"{kind}_{what}"
        for kind in ("vectorize", "unroll", "parallel")
        for what in ("count", "product", "innermost", *_POSITIONS)
    ),
    "is_gpu",
    "block_x",
    "block_y",
    "block_z",
    "thread_x",
    "thread_y",
    "thread_z",
    "vthread",
    *(f"buffer_{i}_{what}" for i in range(5) for what in _BUFFER),
    *(f"intensity_{i}" for i in range(10)),
    "alloc_size",
    "alloc_product",
    "alloc_outer",
    "alloc_inner",
    "trips",
    "loops",
    "unroll_step",
)


def per_store(schedule: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """PerStoreFeature's rows in their own units."""
    from tvm.s_tir import meta_schedule as ms

    # TuneContext imports the tensor intrinsics, half a minute of work that no feature needs.
    name = "tvm.s_tir.tensor_intrin"
    if name not in sys.modules:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    context = ms.TuneContext(schedule.mod, target=target, num_threads=1)
    extractor = ms.feature_extractor.PerStoreFeature()
    (rows,) = extractor.extract_from(context, [ms.MeasureCandidate(schedule, [])])
    assert rows.numpy().shape[1] == len(NAMES) == 164
    plain = np.exp2(rows.numpy().astype(np.float64)) - 1
    return [dict(zip(NAMES, row, strict=True)) for row in plain.tolist()]


def unrolled_matmul() -> Any:
    schedule, block, loops = tiled_matmul()
    schedule.parallel(loops["i0"])
    schedule.vectorize(loops["j1"])
    schedule.unroll(loops["k1"])
    schedule.decompose_reduction(block, loops["k0"])
    return schedule


def operator(text: str) -> Any:
    from cdmpp.programs.lowering import lower

    return tvm.s_tir.Schedule(lower(parse_operator(text)))


SCHEDULES = {
    "copy": lambda: operator("copy:rows=128,cols=32"),
    "transpose": lambda: operator("copy:rows=128,cols=32,transposed=true"),
    "add": lambda: operator("add:rows=64,cols=32"),
    "tanh": lambda: operator("tanh:rows=64,cols=32"),
    "div": lambda: operator("div:rows=64,cols=64,inputs=3"),
    "matmul": matmul,
    "tiled matmul": unrolled_matmul,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_single_stores_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = SCHEDULES[name]()
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    (theirs,) = per_store(schedule, target, monkeypatch)
    ours = raw_leaves(encode_tvm_json(str(tvm.ir.save_json(schedule.mod))))[-1]
    same = {
        "float_addsub": "float_add",
        "float_mul": "float_mul",
        "float_divmod": "float_div",
        "float_cmp": "float_compare",
        "float_math": "float_math",
        "trips": "trips",
        "is_gpu": "is_gpu",
        "unroll_step": "unroll_step",
    }
    for theirs_name, ours_name in same.items():
        assert ours[ours_name] == pytest.approx(theirs[theirs_name], rel=1e-4, abs=1e-4), ours_name
    for kind, column in (("vectorize", "vectorized"), ("unroll", "unrolled"), ("parallel", "parallel")):
        # No such loop: 0 there, a product of nothing here.
        assert ours[column] == pytest.approx(max(theirs[f"{kind}_product"], 1), rel=1e-4), column
    assert ours["loop_count"] * 4 == pytest.approx(theirs["loops"], rel=1e-4)
    # Buffers: theirs largest first, ours in the order of the expression. Each slot is one distinct access.
    mine = sorted(
        (ours[f"{slot}_touched_bytes"], ours[f"{slot}_unique_bytes"])
        for slot in ("store", "read_0", "read_1", "read_2")
        if ours[f"{slot}_element_bytes"]
    )
    others = sorted(
        (theirs[f"buffer_{i}_bytes"], theirs[f"buffer_{i}_unique_bytes"])
        for i in range(5)
        if theirs[f"buffer_{i}_bytes"]
    )
    np.testing.assert_allclose(mine, others, rtol=1e-4)
    # Strides are elements there and bytes here; the written buffer is the one that both know by role.
    (written,) = (i for i in range(5) if theirs[f"buffer_{i}_write"] + theirs[f"buffer_{i}_readwrite"] > 0.5)
    if theirs[f"buffer_{written}_none"] > 0.5:  # where theirs is of the innermost loop, too
        assert ours["store_stride"] == pytest.approx(4 * theirs[f"buffer_{written}_stride"], rel=1e-4)


def test_thread_extents_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = operator("relu:rows=64,cols=32")
    i, j = schedule.get_loops(schedule.get_sblock("relu"))
    x, y = schedule.split(schedule.fuse(i, j), [None, 128])
    schedule.bind(x, "blockIdx.x")
    schedule.bind(y, "threadIdx.x")
    (theirs,) = per_store(schedule, tvm.target.Target("nvidia/nvidia-a100", host="llvm"), monkeypatch)
    (ours,) = raw_leaves(encode_tvm_json(str(tvm.ir.save_json(schedule.mod))))
    assert ours["is_gpu"] == pytest.approx(theirs["is_gpu"]) == 1
    blocks = theirs["block_x"] * theirs["block_y"] * theirs["block_z"]
    threads = theirs["thread_x"] * theirs["thread_y"] * theirs["thread_z"]
    assert ours["blocks"] == pytest.approx(blocks, rel=1e-4)
    assert ours["threads"] == pytest.approx(threads, rel=1e-4)
    assert ours["store_touched_bytes"] == pytest.approx(theirs["buffer_0_bytes"], rel=1e-4)
