"""Columns of small GPU programs, counted by hand."""

import json
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from tvm import te  # noqa: E402

from cdmpp.data.importers import ansor_program  # noqa: E402
from cdmpp.features.launch_columns import launch_columns  # noqa: E402
from cdmpp.features.launch_schema import GPU_COLUMNS, GPU_FLAGS, LAUNCH  # noqa: E402
from cdmpp.features.statements import Recorder  # noqa: E402
from cdmpp.programs.frontends.tir import program_from_tvmscript  # noqa: E402
from cdmpp.programs.program import TensorProgram  # noqa: E402
from cdmpp.programs.tvm_json import load  # noqa: E402


def columns(program: TensorProgram) -> dict[str, list[float]]:
    """Plain values of each column, one per leaf."""
    nodes, root = load(program.tvm_json or "")
    recorder = Recorder(nodes, {})
    recorder.build(root)
    found = launch_columns(recorder, points=10**5)
    plain = np.exp2(found.astype(np.float64)) - 1
    plain[:, -len(GPU_FLAGS) :] = found[:, -len(GPU_FLAGS) :]
    return dict(zip(GPU_COLUMNS, np.round(plain, 2).T.tolist(), strict=True))


def product(unroll: int, m: list[int], n: list[int], k: list[int]) -> TensorProgram:
    """C (32, 32) = A (32, 16) B (16, 32); lengths of the tiles are virtual threads, threads, two inner loops."""
    steps: list[Any] = [["CHW", 2, "local"]]
    steps += [["SP", 2, axis, size, lengths, 1] for axis, size, lengths in ((0, 32, m), (5, 32, n), (10, 16, k))]
    steps += [["RE", 2, [0, 5, 1, 6, 2, 7, 10, 11, 3, 8, 12, 4, 9]], ["CHR", 1, "shared", [2]]]
    for stage, vector in ((3, 4), (1, 1)):
        steps += [["SP", stage, 0, 1, [vector], 1], ["FFSP", stage, 0, [2, 1], 1, 1]]
    return ansor_program('["matmul_layer", 32, 16, 32]', [*steps, ["PR", 4, 0, f"auto_unroll_max_step${unroll}"]])


def test_tiled_product_has_the_counts_of_its_fetches_and_its_update() -> None:
    # 4 x 2 blocks of 8 x 16 results, 4 x 8 threads of 2 x 2; two rounds of 8 of the 16 products.
    found = columns(product(0, [1, 4, 2, 1], [1, 8, 1, 2], [2, 4]))
    launch = (0, 8, 32, 1, 4, 4 * (8 * 8 + 8 * 16), 0, 0)
    assert {name: found[name] for name in LAUNCH} == {n: [value] * 5 for n, value in zip(LAUNCH, launch, strict=True)}
    # Leaves: fetch of A, fetch of B with vectors of four, zero, update, copy of the result.
    expected = {
        "trips": [4, 8, 4, 64, 4],
        # A multiplication and an addition are one instruction.
        "float_ops": [0, 0, 0, 64, 0],
        # Rolled loops: 2 and 2 * 2; 2; 2 and 2 * 2; 2, 4, 8, 32 and 64; 2 and 2 * 2.
        "loop_steps": [6, 2, 6, 110, 6],
        "global_loads": [4, 2, 0, 0, 0],
        # 32 lanes read 4 rows of a sector of A; 8 rows of two sectors of B.
        "global_load_sectors": [4 * 4, 2 * 16, 0, 0, 0],
        "global_load_bytes": [4 * 4, 2 * 16, 0, 0, 0],
        "global_stores": [0, 0, 0, 0, 4],
        # 4 rows of 16 results, of which a request stores every other one.
        "global_store_sectors": [0, 0, 0, 0, 4 * 8],
        # The innermost of two columns keeps A's value in a register: 32 loads of A, 64 of B.
        "shared_loads": [0, 0, 0, 96, 0],
        # A's rows 0, 2, 4, 6 of 8 words share two banks; B's words are in different banks.
        "shared_load_cycles": [0, 0, 0, 2 * 32 + 64, 0],
        "shared_stores": [4, 2, 0, 0, 0],
        "shared_store_cycles": [4, 2 * 4, 0, 0, 0],
        "barriers": [2, 2, 0, 0, 0],
        "spilled_words": [0, 0, 4, 4, 4],
        "accumulators": [0, 0, 0, 4, 0],
        "straight_body": [1, 4, 1, 1, 1],
        "global_vector_bytes": [4, 16, 0, 0, 4],
        "shared_vector_bytes": [4, 16, 0, 4, 0],
        "active_lanes": [1, 1, 1, 1, 1],
        "reduces": [0, 0, 0, 1, 0],
        "overhang": [1, 1, 1, 1, 1],
    }
    assert {name: found[name] for name in expected} == expected
    assert found["footprint_bytes"] == pytest.approx([32 * 16 * 4, 16 * 32 * 4, 0, 0, 0], abs=0.02)


def test_unrolling_makes_straight_code_of_the_innermost_loops_up_to_its_limit() -> None:
    found = columns(product(16, [1, 4, 2, 1], [1, 8, 1, 2], [2, 4]))
    # Of the update's loops 2, 2, 2, 4, 2 the last three are 16 steps.
    assert found["unroll_limit"] == [16] * 5 and found["straight_body"] == [4, 8, 4, 16, 4]
    assert found["loop_steps"] == [0, 0, 0, 2 + 4, 0] and found["spilled_words"] == [0] * 5


def test_partly_filled_warps_and_predicates() -> None:
    # 100 elements in blocks of 48 threads: three blocks, 44 of 144 threads without an element.
    steps = [["FU", 1, [0, 1]], ["SP", 1, 0, 100, [48], 1], ["AN", 1, 0, 5], ["AN", 1, 1, 6]]
    found = columns(ansor_program('["relu_layer", 10, 10]', steps))
    assert (found["blocks"], found["threads"], found["trips"]) == ([3], [48], [1])
    assert found["lane_use"] == [0.75] and found["active_lanes"] == pytest.approx([100 / 144], abs=0.01)


def element_wise(stage: int, threads: int) -> list[Any]:
    """64 elements of four axes, fused and split into blocks."""
    fused = [["FU", stage, [0, 1, 2, 3]], ["SP", stage, 0, 64, [threads], 1]]
    return [*fused, ["AN", stage, 0, 5], ["AN", stage, 1, 6]]


def test_average_pooling_has_two_kernels_with_numbers_zero_and_one() -> None:
    steps = [*element_wise(2, 16), *element_wise(1, 32)]
    found = columns(ansor_program(json.dumps(["pool_layer", "avg", 1, 4, 8, 8, 2, 2, 2, "VALID"]), steps))
    # Zero and sum, then the division.
    assert found["kernel"] == [0, 0, 1] and found["blocks"] == [2, 2, 4] and found["threads"] == [32, 32, 16]
    assert found["reduces"] == [0, 1, 0] and found["trips"] == [1, 4, 1] and found["lane_use"] == [1, 1, 0.5]


def test_reduction_that_is_written_directly_covers_the_output_once() -> None:
    pool = json.dumps(["pool_layer", "max", 1, 4, 8, 8, 2, 2, 2, "VALID"])
    found = columns(ansor_program(pool, element_wise(1, 32)))
    assert found["trips"] == [1, 4] and found["overhang"] == [1, 1]


def test_program_without_threads_has_zeros() -> None:
    a = te.placeholder((8, 8), name="A")
    module = tvm.IRModule({"main": te.create_prim_func([a, te.compute((8, 8), lambda i, j: a[i, j] * 2.0, name="B")])})
    found = columns(TensorProgram.from_tvm_json(tvm.ir.save_json(module)))
    assert all(values == [0] for values in found.values())


def transform(kind: str, factor: str) -> TensorProgram:
    """b (64, 3) = a (64, 3) times a matrix of constants, as a transform of Winograd's convolution."""
    return program_from_tvmscript(
        f"""from tvm.script import tirx as T
@T.prim_func(s_tir=True)
def main(a: T.Buffer((64, 3), "float32"), b: T.Buffer((64, 3), "float32")):
    for t in T.thread_binding(64, thread="threadIdx.x"):
        for i in T.{kind}(3):
            for r in T.{kind}(3):
                b[t, i] = b[t, i] + a[t, r] * {factor}
"""
    )


def test_a_factor_that_unrolled_loops_choose_is_folded_and_its_zeros_compute_nothing() -> None:
    """Four of nine factors are not 0; in loops that are left, conditions and products with 0 are computed."""
    factor = "T.Select(i == r, T.float32(1), T.Select(i == 0 and r == 2, T.float32(-1), T.float32(0)))"
    folded, left = (columns(transform(kind, factor)) for kind in ("unroll", "serial"))
    assert (folded["float_ops"], folded["int_ops"], folded["active_lanes"]) == ([4], [0], [0.44])
    assert left["float_ops"] == [9] and left["int_ops"][0] > 9 and left["active_lanes"] == [1]
    other = columns(transform("unroll", "T.Select(a[t, 0] > T.float32(0), T.float32(1), T.float32(0))"))
    assert other["float_ops"][0] > 9 and other["active_lanes"] == [1]
