"""Columns of GPU schedules, counted by hand on small programs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from cdmpp.features.affine import AffineRange
from cdmpp.features.ast import OPERATIONS, Access, Buffer, CompactAST, Leaf, Loop
from cdmpp.features.gpu_schedule import GPU_COLUMNS, GPU_FLAGS, GPU_WIDTH, gpu_columns


def loops(*pairs: tuple[str, int]) -> list[Loop]:
    return [Loop(f"l{i}", extent, kind) for i, (kind, extent) in enumerate(pairs)]


def access(buffer: Buffer, *indices: dict[int, float]) -> Access:
    return Access(buffer, [AffineRange(0, 1 << 30, steps) for steps in indices])


def leaf(path, store: Access, reads=(), reduces=(), **operations: int) -> Leaf:
    counts = [operations.get(name, 0) for name in OPERATIONS]
    return Leaf("x", tuple(path), store, list(reads), counts, "float32", 1, 1, reduce_loops=frozenset(reduces))


def columns(ast: CompactAST, row: int = 0) -> dict[str, float]:
    values = gpu_columns(ast)[row].astype(np.float64)
    return {
        name: value if name in GPU_FLAGS else np.exp2(value) - 1
        for name, value in zip(GPU_COLUMNS, values, strict=True)
    }


def copy(read_steps: dict[int, float], nest: list[Loop], scope: str = "global", width: str = "float32"):
    """A leaf that reads a buffer at ``read_steps`` and stores it into a register."""
    source = Buffer("a", width, scope, [1 << 20], scope == "global")
    register = Buffer("r", "float32", "local", [1], False)
    store = Access(register, [AffineRange(0, 0)], is_write=True)
    one = leaf(range(len(nest)), store, [access(source, read_steps)])
    return CompactAST([one], nest, [source, register])


@pytest.mark.parametrize(
    ("step", "sectors", "efficiency"), [(1, 4, 1.0), (2, 8, 0.5), (8, 32, 1 / 8), (32, 32, 1 / 8), (0, 1, 1 / 8)]
)
def test_global_reads_touch_sectors_by_their_stride(step, sectors, efficiency):
    found = columns(copy({0: step} if step else {}, loops(("threadIdx.x", 32))))
    assert found["global_loads"] == pytest.approx(1)
    assert found["global_load_sectors"] == pytest.approx(sectors, rel=1e-5)
    assert found["load_efficiency"] == pytest.approx(efficiency)


@pytest.mark.parametrize(("step", "cycles"), [(1, 1), (2, 2), (32, 32), (33, 1), (0, 1)])
def test_shared_reads_take_a_cycle_per_word_of_a_bank(step, cycles):
    found = columns(copy({0: step} if step else {}, loops(("threadIdx.x", 32)), "shared"))
    assert found["shared_loads"] == pytest.approx(1)
    assert found["shared_load_cycles"] == pytest.approx(cycles, rel=1e-5)
    assert found["bank_efficiency"] == pytest.approx(1 / cycles)


def test_a_vector_load_is_one_instruction():
    nest = loops(("threadIdx.x", 32), ("vectorized", 4))
    found = columns(copy({0: 4, 1: 1}, nest))
    assert found["global_loads"] == pytest.approx(1)
    assert found["global_vector_bytes"] == pytest.approx(16, rel=1e-5)
    assert found["global_load_sectors"] == pytest.approx(16, rel=1e-5)
    assert found["load_efficiency"] == 1.0


def test_warps_are_consecutive_threads_along_x_first():
    nest = loops(("threadIdx.y", 16), ("threadIdx.x", 8))
    # Rows of 8 floats fill a sector; four rows make a warp.
    found = columns(copy({1: 1, 0: 1024}, nest))
    assert (found["threads"], found["warps"]) == (pytest.approx(128, rel=1e-5), pytest.approx(4, rel=1e-5))
    assert found["global_load_sectors"] == pytest.approx(4, rel=1e-5) and found["load_efficiency"] == 1.0


def test_an_address_that_an_unrolled_loop_leaves_alone_is_loaded_once():
    nest = loops(("threadIdx.x", 32), ("serial", 10), ("unrolled", 4))
    assert columns(copy({1: 1}, nest))["global_loads"] == pytest.approx(10, rel=1e-5)
    assert columns(copy({1: 1, 2: 16}, nest))["global_loads"] == pytest.approx(40, rel=1e-5)
    serial = loops(("threadIdx.x", 32), ("serial", 10), ("serial", 4))
    assert columns(copy({2: 1}, serial))["global_loads"] == pytest.approx(40, rel=1e-5)


def test_equal_addresses_of_an_unrolled_body_are_loaded_once():
    # Rows i + 2 t of a stencil: 0 ... 8 + 2 * 3, not 9 * 4.
    nest = loops(("threadIdx.x", 32), ("unrolled", 9), ("unrolled", 4))
    assert columns(copy({1: 64, 2: 128, 0: 1}, nest, "shared"))["shared_loads"] == pytest.approx(15, rel=1e-5)
    # Rows that are 9 apart do not overlap.
    assert columns(copy({1: 64, 2: 576, 0: 1}, nest, "shared"))["shared_loads"] == pytest.approx(36, rel=1e-5)


def tiled_product() -> CompactAST:
    """A tile staged in shared memory over 8 rounds, then 4 sums of a thread."""
    nest = loops(("blockIdx.x", 10), ("threadIdx.x", 64), ("serial", 8), ("serial", 16), ("unrolled", 4))
    a, tile = Buffer("a", "float32", "global", [640, 8], True), Buffer("t", "float32", "shared", [64], False)
    sums, out = Buffer("s", "float32", "local", [4], False), Buffer("o", "float32", "global", [640, 4], True)
    stage = leaf([0, 1, 2], access(tile, {1: 1}), [access(a, {0: 64, 1: 1}, {2: 1})])
    update = leaf(
        [0, 1, 2, 3, 4],
        access(sums, {4: 1}),
        [access(tile, {3: 4, 4: 1})],
        [2, 3],
        float_add=1,
        float_mul=1,
        float_fma=1,
    )
    store = leaf([0, 1, 4], access(out, {0: 64, 1: 1}, {4: 1}), [access(sums, {4: 1})])
    return CompactAST([stage, update, store], nest, [a, tile, sums, out])


def test_staging_registers_and_arithmetic_of_a_tile():
    ast = tiled_product()
    stage, update, store = (columns(ast, row) for row in range(3))
    assert stage["shared_bytes"] == pytest.approx(256, rel=1e-5) and stage["local_words"] == pytest.approx(4)
    assert stage["staging_rounds"] == pytest.approx(8, rel=1e-5)
    assert stage["staged_bytes"] == pytest.approx(64 * 8 * 4, rel=1e-5)
    assert stage["load_efficiency"] == pytest.approx(1 / 8)  # rows of 8 floats, one of each
    # A multiplication and an addition are one instruction.
    assert update["float_ops"] == pytest.approx(8 * 16 * 4, rel=1e-5)
    assert update["accumulators"] == pytest.approx(4) and update["unrolled_body"] == pytest.approx(4)
    assert update["loop_steps"] == pytest.approx(8 + 8 * 16, rel=1e-5)
    assert store["global_stores"] == pytest.approx(4) and store["accumulators"] == 0
    assert store["overhang"] == pytest.approx(1, rel=1e-5)
    assert store["blocks"] == pytest.approx(10)


def test_a_program_without_threads_has_zeros():
    ast = copy({0: 1}, loops(("parallel", 32)))
    assert gpu_columns(ast).shape == (1, GPU_WIDTH) and not gpu_columns(ast).any()


@pytest.mark.parametrize("kind", ["vectorized", "unrolled"])
def test_absurd_extents_take_bounded_memory(kind):
    nest = loops(("threadIdx.x", 32), (kind, 1 << 22), ("unrolled", 8))
    tracemalloc.start()
    try:
        found = gpu_columns(copy({0: 4, 1: 1, 2: 3}, nest, "shared"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.isfinite(found).all() and peak < 32 << 20
