"""Five programs whose vectors were computed by hand: every column of every leaf.

An access is (touched bytes, distinct bytes, touches per distinct element, byte step of the innermost loop,
bytes of the innermost dimension that are swept, bytes of an element).
"""

import numpy as np
import pytest

from cdmpp.features.class_features import PROGRAM_COLUMNS
from cdmpp.features.encode import EncodedPrograms, encode_operator, encode_tvm_json
from cdmpp.features.walk import contraction_sizes
from cdmpp.programs.operators import parse_operator
from tests.features.matmul import tiled_matmul
from tests.features.raw import assert_leaf, raw_leaves

tvm = pytest.importorskip("tvm")
pytestmark = pytest.mark.tvm


def access(slot: str, *numbers: float, argument: bool = True, scope: str = "global") -> dict[str, float]:
    names = ("touched_bytes", "unique_bytes", "reuse", "stride", "run_bytes", "element_bytes")
    return {
        **{f"{slot}_{name}": value for name, value in zip(names, numbers, strict=True)},
        f"{slot}_is_parameter": float(argument),
        f"{slot}_scope_{scope}": 1,
    }


def totals(encoded: EncodedPrograms) -> dict[str, float]:
    return dict(zip(PROGRAM_COLUMNS, encoded.totals[0].tolist(), strict=True))


def operator(text: str) -> list[EncodedPrograms]:
    """Both ways: the operator's own lowering walked, and the shipped template evaluated."""
    from cdmpp.programs.lowering import lower, to_json

    spec = parse_operator(text)
    return [encode_tvm_json(to_json(lower(spec))), encode_operator(spec)]


def bits(extent: int) -> float:
    """Trailing zero bits over 8."""
    return ((extent & -extent).bit_length() - 1) / 8


def contraction(m: int, n: int, k: int) -> dict[str, float]:
    """Columns of a product of m x k by k x n that adds to its output."""
    trips = m * n * k
    sizes = {"contraction_batch": 1, "contraction_m": m, "contraction_n": n, "contraction_k": k}
    align = {"align_m": bits(m), "align_n": bits(n), "align_k": bits(k)}
    work = {"trips": trips, "float_add": trips, "float_mul": trips, "float_fma": trips, "flops": 2 * trips}
    return {**work, **sizes, **align, "is_contraction": 1, "store_also_read": 1}


def test_copy() -> None:
    # for i in 4: for j in 8: y[i, j] = x[i, j]
    for encoded in operator("copy:rows=4,cols=8"):
        (leaf,) = raw_leaves(encoded)
        assert_leaf(
            leaf,
            {
                "trips": 4 * 8,
                "spatial_trips": 4 * 8,
                "loop_count": 2 / 4,  # two loops, in units of four
                "inner_extent": 8,
                "spatial_0": 8,
                "spatial_1": 4,  # innermost first
                # 32 elements of 4 bytes, each once; j moves by one element; a row of 8 is swept.
                **access("store", 128, 128, 1, 4, 32, 4),
                "store_buffer_bytes": 128,
                **access("read_0", 128, 128, 1, 4, 32, 4),
                "leaf_bytes": 128 + 128,
                "computes_float32": 1,
            },
        )
        # Root 0, i: rank 1 depth 1, j: rank 2 depth 2, the store: rank 3 depth 3; 2 * 3 - 3.
        assert encoded.positions.tolist() == [3]
        sums = totals(encoded)
        assert (sums["flops"], sums["bytes"], sums["output_elements"]) == (0, 256, 32)
        assert (sums["matrix"], sums["work_fraction"], sums["parallel_blocks"]) == (0, 1, 0)


def test_matmul() -> None:
    # for i in 4: for j in 8: for r in 16: {at r == 0: y[i, j] = 0}; y[i, j] += x[i, r] * w[j, r]
    for encoded in operator("linear:m=4,n=8,k=16"):
        init, update = raw_leaves(encoded)
        # The initial value runs once per output: without r.
        assert_leaf(
            init,
            {
                "trips": 32,
                "spatial_trips": 32,
                "loop_count": 2 / 4,
                "inner_extent": 8,
                "spatial_0": 8,
                "spatial_1": 4,
                **access("store", 128, 128, 1, 4, 32, 4),
                "store_buffer_bytes": 128,
                "leaf_bytes": 128,
                "is_init": 1,
                "computes_float32": 1,
            },
        )
        trips = 4 * 8 * 16
        distinct = 4 * 32 + 4 * 64 + 4 * 128  # y, x, w
        assert_leaf(
            update,
            {
                **contraction(4, 8, 16),
                "spatial_trips": 32,
                "reduce_trips": 16,
                "loop_count": 3 / 4,
                "inner_extent": 16,
                "spatial_0": 8,
                "spatial_1": 4,
                "reduce_0": 16,
                # The innermost loop is r: y stays where it is, x and w move by one element.
                **access("store", 4 * trips, 128, 16, 0, 32, 4),
                "store_buffer_bytes": 128,
                **access("read_0", 4 * trips, 256, 8, 4, 64, 4),
                **access("read_1", 4 * trips, 512, 4, 4, 64, 4),
                "leaf_bytes": distinct,
                "intensity": np.log2(1 + 2 * trips / distinct),
                "computes_float32": 1,
            },
        )
        # i 1, j 2, r 3; init: rank 4 depth 4; update: rank 5 depth 4.
        assert encoded.positions.tolist() == [2 * 4 - 4, 2 * 5 - 4]
        sums = totals(encoded)
        assert sums["flops"] == pytest.approx(2 * trips, rel=1e-6)
        assert (sums["bytes"], sums["matrix"], sums["output_elements"]) == (distinct, 1, 32)


def test_convolution() -> None:
    # x[1, 2, 5, 5] padded to [1, 2, 7, 7]; y[1, 3, 3, 3]; w[3, 2, 3, 3]; stride 2.
    text = "conv2d:n=1,c_in=2,h=5,w=5,c_out=3,kh=3,kw=3,pad_h=1,pad_w=1,stride_h=2,stride_w=2"
    for encoded in operator(text):
        pad, init, update = raw_leaves(encoded)
        padded, image = 4 * 2 * 7 * 7, 4 * 2 * 5 * 5
        assert_leaf(
            pad,
            {
                "trips": 98,
                "spatial_trips": 98,
                "loop_count": 4 / 4,
                "inner_extent": 7,
                "spatial_0": 7,
                "spatial_1": 7,
                "spatial_2": 2,  # the batch of 1 comes last
                **access("store", padded, padded, 1, 4, 28, 4, argument=False),
                "store_buffer_bytes": padded,
                # x[b, c, i - 1, j - 1] under a condition: at most the 5 x 5 that are there.
                **access("read_0", padded, image, 98 / 50, 4, 20, 4),
                "leaf_bytes": padded + image,
                "predicated": 1,
                "computes_float32": 1,
            },
        )
        assert_leaf(
            init,
            {
                "trips": 27,
                "spatial_trips": 27,
                "loop_count": 4 / 4,
                "inner_extent": 3,
                "spatial_0": 3,
                "spatial_1": 3,
                "spatial_2": 3,
                **access("store", 108, 108, 1, 4, 12, 4),
                "store_buffer_bytes": 108,
                "leaf_bytes": 108,
                "is_init": 1,
                "computes_float32": 1,
            },
        )
        trips = 27 * 18
        distinct = 108 + padded + 4 * 54
        assert_leaf(
            update,
            {
                **contraction(9, 3, 18),
                "spatial_trips": 27,
                "reduce_trips": 2 * 3 * 3,
                "loop_count": 7 / 4,
                "inner_extent": 3,
                "spatial_0": 3,
                "spatial_1": 3,
                "spatial_2": 3,
                "reduce_0": 3,
                "reduce_1": 3,
                "reduce_2": 2,
                # A GEMM of pixels by output channels by taps: 9 x 3 x 18.
                **access("store", 4 * trips, 108, 18, 0, 12, 4),
                "store_buffer_bytes": 108,
                # pad[b, rc, 2 i + ry, 2 j + rx]: 2 * 2 + 2 = 6 is the last of 7 rows and columns.
                **access("read_0", 4 * trips, padded, trips / 98, 4, 28, 4, argument=False),
                **access("read_1", 4 * trips, 4 * 54, 9, 4, 12, 4),
                "leaf_bytes": distinct,
                "intensity": np.log2(1 + 2 * trips / distinct),
                "computes_float32": 1,
            },
        )
        # pad: loops 1-4, store rank 5 depth 5. conv: loops 6-12, then init 13 and update 14 at depth 8.
        assert encoded.positions.tolist() == [2 * 5 - 5, 2 * 13 - 8, 2 * 14 - 8]
        sums = totals(encoded)
        # The padded copy is no argument: image, weights and output are.
        assert (sums["bytes"], sums["matrix"], sums["output_elements"]) == (image + 4 * 54 + 108, 1, 27)


def test_softmax() -> None:
    # max over a row, exp(x - max), sum, exp / sum: 4 rows of 8.
    for encoded in operator("softmax:rows=4,cols=8"):
        init_max, largest, exponent, init_sum, total, norm = raw_leaves(encoded)
        row_init = {
            "trips": 4,
            "spatial_trips": 4,
            "loop_count": 1 / 4,
            "inner_extent": 4,
            "spatial_0": 4,
            **access("store", 16, 16, 1, 4, 16, 4, argument=False),
            "store_buffer_bytes": 16,
            "leaf_bytes": 16,
            "is_init": 1,
            "computes_float32": 1,
        }
        assert_leaf(init_max, row_init)
        assert_leaf(init_sum, row_init)

        def reduction(argument: bool) -> dict[str, float]:
            return {
                "trips": 32,
                "spatial_trips": 4,
                "reduce_trips": 8,
                "loop_count": 2 / 4,
                "inner_extent": 8,
                "spatial_0": 4,
                "reduce_0": 8,
                **access("store", 128, 16, 8, 0, 16, 4, argument=False),
                "store_also_read": 1,
                "store_buffer_bytes": 16,
                **access("read_0", 128, 128, 1, 4, 32, 4, argument=argument),
                "flops": 32,
                "leaf_bytes": 144,
                "intensity": np.log2(1 + 32 / 144),
                "computes_float32": 1,
            }

        assert_leaf(largest, {**reduction(argument=True), "float_compare": 32})
        assert_leaf(total, {**reduction(argument=False), "float_add": 32})

        def pointwise(flops: float, *, reads_argument: bool, writes_argument: bool) -> dict[str, float]:
            return {
                "trips": 32,
                "spatial_trips": 32,
                "loop_count": 2 / 4,
                "inner_extent": 8,
                "spatial_0": 8,
                "spatial_1": 4,
                **access("store", 128, 128, 1, 4, 32, 4, argument=writes_argument),
                "store_buffer_bytes": 128,
                **access("read_0", 128, 128, 1, 4, 32, 4, argument=reads_argument),
                **access("read_1", 128, 16, 8, 0, 16, 4, argument=False),  # the row's maximum or sum
                "flops": flops,
                "leaf_bytes": 272,
                "intensity": np.log2(1 + flops / 272),
                "computes_float32": 1,
            }

        shifted = pointwise(64, reads_argument=True, writes_argument=False)
        assert_leaf(exponent, {**shifted, "float_add": 32, "float_math": 32})
        divided = pointwise(32, reads_argument=False, writes_argument=True)
        assert_leaf(norm, {**divided, "float_div": 32})
        # i 1, k 2, stores 3 and 4 | i 5, k 6, store 7 ... every nest is two loops at depths 1 and 2.
        assert encoded.positions.tolist() == [2 * r - 3 for r in (3, 4, 7, 10, 11, 14)]
        assert totals(encoded)["bytes"] == 256
        assert totals(encoded)["flops"] == pytest.approx(32 + 64 + 32 + 32, rel=1e-6)


def test_scheduled_and_tiled_matmul() -> None:
    # Rows of tiles in parallel, 16 columns vectorized.
    schedule, block, loops = tiled_matmul()
    schedule.parallel(loops["i0"])
    schedule.vectorize(loops["j1"])
    schedule.annotate(loops["i0"], "pragma_auto_unroll_max_step", 16)
    schedule.decompose_reduction(block, loops["k0"])
    encoded = encode_tvm_json(str(tvm.ir.save_json(schedule.mod)))
    init, update = raw_leaves(encoded)
    tile_loops = {
        "inner_extent": 16,
        "vectorized": 16,
        "parallel": 8,
        "unroll_step": 16,
        # innermost first: j1, i1, j0, i0
        "spatial_trips": 4096,
        "spatial_0": 16,
        "spatial_1": 8,
        "spatial_2": 4,
        "spatial_3": 8,
        "computes_float32": 1,
    }
    whole = 4 * 64 * 64
    # i0 8 (parallel), j0 4, i1 8, j1 16 (vectorized): c[8 i0 + i1, 16 j0 + j1] = 0
    assert_leaf(
        init,
        {
            **tile_loops,
            "trips": 4096,
            "loop_count": 4 / 4,
            # 16 j0 + j1 sweeps the whole row of 64.
            **access("store", whole, whole, 1, 4, 256, 4),
            "store_buffer_bytes": whole,
            "leaf_bytes": whole,
        },
    )
    # i0, j0, k0 16, i1, k1 4, j1: c[..] += a[8 i0 + i1, 4 k0 + k1] * b[4 k0 + k1, 16 j0 + j1]
    trips = 64**3
    assert_leaf(
        update,
        {
            **tile_loops,
            **contraction(64, 64, 64),
            "loop_count": 6 / 4,
            "reduce_trips": 64,
            "reduce_0": 4,
            "reduce_1": 16,
            # j1 is the innermost: c and b move by one element, a stays.
            **access("store", 4 * trips, whole, 64, 4, 256, 4),
            "store_buffer_bytes": whole,
            **access("read_0", 4 * trips, whole, 64, 0, 256, 4),
            **access("read_1", 4 * trips, whole, 64, 4, 256, 4),
            "leaf_bytes": 3 * whole,
            "intensity": np.log2(1 + 2 * trips / (3 * whole)),
        },
    )
    # i0 1, j0 2, i1 3, j1 4, init 5 (depth 5); k0 6 (depth 3), i1 7, k1 8, j1 9, update 10 (depth 7).
    assert encoded.positions.tolist() == [2 * 5 - 5, 2 * 10 - 7]
    assert totals(encoded)["bytes"] == 3 * whole
    assert totals(encoded)["matrix"] == 1


GPU = """
@T.prim_func(s_tir=True)
def scale(x: T.Buffer((64, 128), "float16"), y: T.Buffer((64, 128), "float16")):
    shared = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
    for bx in T.thread_binding(32, thread="blockIdx.x"):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            for u in T.unroll(4):
                with T.sblock("load"):
                    i = T.axis.spatial(64, bx * 2 + tx // 32)
                    j = T.axis.spatial(128, tx % 32 * 4 + u)
                    shared[i, j] = x[i, j]
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            for u in T.vectorized(4):
                with T.sblock("scale"):
                    i = T.axis.spatial(64, bx * 2 + tx // 32)
                    j = T.axis.spatial(128, tx % 32 * 4 + u)
                    T.where(tx < 60)
                    y[i, j] = shared[i, j] * T.float16(2) + shared[i, j]
"""


def test_threads_scopes_and_predicates_of_a_gpu_program() -> None:
    from cdmpp.programs.frontends.tir import program_from_tvmscript

    encoded = encode_tvm_json(program_from_tvmscript(GPU).tvm_json or "")
    load, scale = raw_leaves(encoded)
    assert (load["is_gpu"], load["blocks"], load["threads"]) == pytest.approx((1, 32, 64))
    assert load["unrolled"] == pytest.approx(4)
    assert load["store_scope_shared"] == 1
    assert load["store_is_parameter"] == 0
    assert load["read_0_scope_global"] == 1
    assert load["trips"] == pytest.approx(32 * 64 * 4)
    assert load["predicated"] == 0
    assert load["store_element_bytes"] == pytest.approx(2)
    assert load["computes_float16"] == 1
    assert scale["predicated"] == 1
    assert scale["vectorized"] == pytest.approx(4)
    # Both operands are one element of one buffer: one read, two operations on it.
    assert scale["read_0_scope_shared"] == 1
    assert scale["read_1_element_bytes"] == 0
    assert scale["float_fma"] == pytest.approx(32 * 64 * 4)
    assert totals(encoded)["parallel_blocks"] == 32


TENSORISED = """
@T.prim_func(s_tir=True)
def matmul(
    a: T.Buffer((32, 64), "float16"),
    b: T.Buffer((64, 48), "float16"),
    c: T.Buffer((32, 48), "float32"),
):
    for i, j, k in T.grid(2, 3, 4):
        with T.sblock("mma"):
            x = T.axis.spatial(2, i)
            y = T.axis.spatial(3, j)
            z = T.axis.reduce(4, k)
            T.reads(
                c[x * 16:x * 16 + 16, y * 16:y * 16 + 16],
                a[x * 16:x * 16 + 16, z * 16:z * 16 + 16],
                b[z * 16:z * 16 + 16, y * 16:y * 16 + 16],
            )
            T.writes(c[x * 16:x * 16 + 16, y * 16:y * 16 + 16])
            T.evaluate(T.call_extern("int32", "my_mma_16x16x16", c.data, a.data, b.data))
"""


def test_a_tensor_intrinsic_counts_as_the_loops_that_it_replaced() -> None:
    from tvm.script import tirx

    function = tvm.script.from_source(TENSORISED, extra_vars={"T": tirx})
    encoded = encode_tvm_json(str(tvm.ir.save_json(function)))
    (leaf,) = raw_leaves(encoded)
    trips = 32 * 48 * 64
    distinct = 4 * 32 * 48 + 2 * 32 * 64 + 2 * 64 * 48
    assert_leaf(
        leaf,
        {
            "intrinsic": 1,
            **contraction(32, 48, 64),
            # i 2, j 3, k 4 around 16 x 16 x 16
            "spatial_trips": 32 * 48,
            "reduce_trips": 64,
            "loop_count": 6 / 4,
            "inner_extent": 16,
            "spatial_0": 16,
            "spatial_1": 16,
            "spatial_2": 3,
            "spatial_3": 2,
            "reduce_0": 16,
            "reduce_1": 4,
            **access("store", 4 * trips, 4 * 32 * 48, 64, 0, 4 * 48, 4),
            "store_buffer_bytes": 4 * 32 * 48,
            # The innermost loop is k: one element of a, one row of 48 of b.
            **access("read_0", 2 * trips, 2 * 32 * 64, 48, 2, 2 * 64, 2),
            **access("read_1", 2 * trips, 2 * 64 * 48, 32, 2 * 48, 2 * 48, 2),
            "leaf_bytes": distinct,
            "intensity": np.log2(1 + 2 * trips / distinct),
            "computes_float16": 1,
        },
    )
    assert totals(encoded)["matrix"] == 1
    assert totals(encoded)["bytes"] == distinct


@pytest.mark.parametrize(
    ("out", "left", "right", "sizes"),
    [
        (256, 256, 256, (16, 16, 16)),
        (16 * 8, 16 * 16, 16 * 8, (16, 8, 16)),  # mma.m16n8k16, whatever its thread layout
        (4, 32, 8, (4, 1, 8)),  # no contraction has these: out elements, each of sqrt(32 * 8 / 4) terms
    ],
)
def test_sizes_of_a_contraction_from_its_counts(out: int, left: int, right: int, sizes: tuple[int, int, int]) -> None:
    assert contraction_sizes(out, left, right) == sizes


def test_an_intrinsic_of_flat_tir_becomes_a_leaf_over_its_arguments() -> None:
    from cdmpp.programs.frontends.tir import program_from_tvmscript

    text = """
@T.prim_func(s_tir=True)
def outer(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for i in range(4):
        T.evaluate(T.call_extern("int32", "mma_16", T.address_of(x[i * 16]), T.address_of(y[i * 16])))
        T.evaluate(T.call_extern("int32", "wait_all"))
"""
    (leaf,) = raw_leaves(encode_tvm_json(program_from_tvmscript(text).tvm_json or ""))
    assert leaf["intrinsic"] == 1
    assert leaf["trips"] == pytest.approx(4)
    assert leaf["store_run_bytes"] == pytest.approx(4 * 4)
