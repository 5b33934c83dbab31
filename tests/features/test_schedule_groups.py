"""Groups of the schedule's columns, on programs that can be counted by hand."""

from dataclasses import asdict

import pytest

from cdmpp.features.ast import CompactAST, Loop
from cdmpp.features.schedule import (
    FIRST_WIDTH,
    GPU_NAMES,
    LAUNCH_FROM,
    NETWORK_SCHEDULE_WIDTH,
    SCHEDULE_COLUMNS,
    SCHEDULE_GROUPS,
    SCHEDULE_VERSION,
)
from cdmpp.features.schema import COLUMNS, WIDTH
from cdmpp.model.nn.config import NetworkConfig, UnsupportedOptionError
from cdmpp.model.nn.launch_inputs import LAUNCH_WIDTH
from cdmpp.model.nn.weights import network_columns
from tests.features.test_compiled import PLAIN, at, columns, leaf, matmul, repeated, tensor


def test_columns_of_a_cpu_come_first() -> None:
    added = [name for names in SCHEDULE_GROUPS.values() for name in names]
    assert list(SCHEDULE_COLUMNS[FIRST_WIDTH:LAUNCH_FROM]) == added
    assert SCHEDULE_COLUMNS[LAUNCH_FROM:] == (*GPU_NAMES, "sure_calls")
    assert len(set(SCHEDULE_COLUMNS)) == len(SCHEDULE_COLUMNS) == NETWORK_SCHEDULE_WIDTH + 1
    assert len(SCHEDULE_GROUPS) == 5


def test_loops_are_unrolled_by_the_stores_of_all_their_leaves() -> None:
    def two(step: int) -> dict[str, float]:
        x, y, out = tensor("x", 64), tensor("y", 64), tensor("out", 64)
        loops = [Loop("i", 8, PLAIN, step), Loop("j", 8, PLAIN)]
        both = [leaf((0, 1), at(out, {0: 8, 1: 1}), at(b, {0: 8, 1: 1}), float_add=1) for b in (x, y)]
        return columns(CompactAST(both, loops, [x, y, out]))

    # Two stores in 8 iterations are 16: within 16 steps j is unrolled, within 15 it is left.
    unrolled, left = two(16), two(15)
    assert (unrolled["straight_copies"], unrolled["straight_stores"], unrolled["left_iterations"]) == (8, 16, 8)
    assert (left["straight_copies"], left["straight_stores"], left["left_iterations"]) == (1, 2, 64)
    assert unrolled["straight_accesses"] == 32
    # A store and an addition for each copy, and a read.
    assert unrolled["straight_code"] == 2 * 8 * 3


def test_what_is_computed_again_is_moved_out_of_short_straight_code() -> None:
    inner = repeated(16)
    inner.loops[0].unroll_step = 16
    short = columns(inner)
    assert (short["again_inner"], short["again_outer"], short["straight_copies"]) == (100, 1, 16)
    assert short["ops_if_again"] == 1600
    assert short["ops_if_moved"] == 16
    # The loop over the sum is left: its body is what is repeated, and nothing can be moved.
    long = columns(repeated(10_000))
    assert (long["again_inner"], long["again_outer"]) == (1, 100)
    assert long["ops_if_moved"] == long["ops_if_again"] == 1_000_000


def test_distance_between_two_uses() -> None:
    counts = columns(matmul("ijk"))
    # a[i, k], read_0, comes back with the next j: after a row of a, a column of b and one element of c.
    lines = 64 * 4 / 64 + 64 + 1
    assert counts["read_0_reuse_bytes"] == pytest.approx(64 * lines)
    assert counts["read_0_reuse_times"] == 64
    # c[i, j] stays while k runs: one line of each.
    assert counts["store_reuse_bytes"] == pytest.approx(64 * 3)
    assert counts["store_reuse_far_bytes"] == 0
    # b[k, j] comes back with the next i, after all of it.
    assert counts["read_1_reuse_bytes"] > 64 * 64 * 4
    assert counts["program_bytes"] == 3 * 64 * 64 * 4


def test_data_that_fit_are_still_in_a_warm_cache() -> None:
    counts = columns(matmul("ijk"))
    # 48 KB: in no cache of 32 KB, in every cache of 512 KB.
    assert counts["warm_lines_32768"] > 0
    assert counts["warm_lines_524288"] == 0
    assert counts["lines_524288"] > 0


def test_register_tile_and_odd_vectors() -> None:
    loops = [Loop("k", 64, PLAIN, 0, True), Loop("i", 4, "unrolled"), Loop("j", 24, "vectorized")]
    a, b, c = tensor("a", 4, 64), tensor("b", 64, 24), tensor("c", 4, 24)
    tile = leaf(
        (0, 1, 2), at(c, {1: 1}, {2: 1}), at(a, {1: 1}, {0: 1}), at(b, {0: 1}, {2: 1}), reduces=(0,), float_add=1
    )
    counts = columns(CompactAST([tile], loops, [a, b, c]))
    # 24 floats are widened to 32: four vectors for each of four rows, and one of b for each.
    assert (counts["tile_rows"], counts["tile_columns"], counts["live_vectors"]) == (4, 4, 16 + 4 + 1)
    assert counts["spilled"] == 5 * 64
    assert (counts["tail_8"], counts["tail_4"]) == (0, 0)
    assert columns(matmul("ikj", {"j": "vectorized"}, n=14))["tail_8"] == pytest.approx(6 / 8)


def test_a_vector_of_a_transposed_tensor_is_gathered() -> None:
    x, y = tensor("x", 64, 64), tensor("y", 64, 64)
    loops = [Loop("i", 64, PLAIN), Loop("j", 64, "vectorized")]
    counts = columns(CompactAST([leaf((0, 1), at(y, {0: 1}, {1: 1}), at(x, {1: 1}, {0: 1}))], loops, [x, y]))
    assert counts["gathered_loads"] == counts["gathered_lines"] == 64 * 64
    assert counts["vector_stride"] == 256
    assert counts["vector_store_gathers"] == 64 * 64 / 8
    assert counts["scattered_stores"] == 0


def test_tasks_that_do_not_divide_by_the_threads() -> None:
    x, y = tensor("x", 6, 8), tensor("y", 6, 8)
    loops = [Loop("i", 6, "parallel"), Loop("j", 8, PLAIN)]
    sums = leaf((0, 1), at(y, {0: 8, 1: 1}), at(x, {0: 8, 1: 1}), float_add=1)
    counts = columns(CompactAST([sums], loops, [x, y]))
    # Six tasks on four threads: two rounds, where one and a half would do.
    assert counts["imbalance_4"] == pytest.approx(2 / 1.5)
    assert counts["imbalance_8"] == pytest.approx(8 / 6)
    assert (counts["tasks"], counts["serial_ops"], counts["work_share"]) == (6, 0, 1)
    assert (counts["task_store_step"], counts["shared_lines"]) == (32, 1)
    loops[0].kind = PLAIN
    alone = columns(CompactAST([sums], loops, [x, y]))
    assert (alone["tasks"], alone["imbalance_4"]) == (0, 4)
    assert alone["serial_ops"] == alone["vector_ops"]


def test_a_network_reads_this_version_alone() -> None:
    config = NetworkConfig.of_manifest(asdict(NetworkConfig(schedule=True)))
    assert config.stored_width == WIDTH + NETWORK_SCHEDULE_WIDTH
    assert config.leaf_width == config.stored_width + LAUNCH_WIDTH
    names = network_columns(config)["leaf"]
    assert names[: config.stored_width] == [*COLUMNS, *SCHEDULE_COLUMNS[:-1]] and len(names) == config.leaf_width
    for fields in ({"schedule": True}, {"schedule": True, "schedule_version": 4}):
        with pytest.raises(UnsupportedOptionError, match=rf"this version computes {SCHEDULE_VERSION}"):
            NetworkConfig.of_manifest(fields)
    assert NetworkConfig.of_manifest({"schedule_version": 4}) == NetworkConfig()  # reads no schedules
