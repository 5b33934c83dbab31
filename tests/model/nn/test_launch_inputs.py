"""Occupancy, waves and times of resources, computed by hand from the limits of a V100 and an MI50."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cdmpp.devices.registry import lookup
from cdmpp.features.launch_columns import GPU_COLUMNS, GPU_FLAGS, GPU_WIDTH
from cdmpp.model.nn.launch_inputs import (
    LAUNCH_INPUTS,
    LAUNCH_S,
    LAUNCH_WIDTH,
    OTHER_REGISTERS,
    launch_figures,
    launch_inputs,
)

V100, MI50, K80 = (lookup(name) for name in ("v100-pcie-16gb", "mi50", "k80"))
Array = np.ndarray[Any, np.dtype[Any]]


def leaf(**values: float) -> Array:
    """Columns of a leaf; one block of 32 threads unless stated."""
    row = np.zeros(GPU_WIDTH)
    for name, value in ({"blocks": 1, "threads": 32, "vthreads": 1, "active_lanes": 1, "lane_use": 1} | values).items():
        row[GPU_COLUMNS.index(name)] = value
    row[: -len(GPU_FLAGS)] = np.log2(1 + row[: -len(GPU_FLAGS)])
    return row.astype(np.float32)


def inputs(device: Any, *leaves: Array) -> tuple[dict[str, Array], float]:
    """Inputs of each leaf by name, and the reference in seconds."""
    found, log_reference = launch_inputs(np.stack(leaves)[None], launch_figures(device)[None])
    assert found.shape == (1, len(leaves), LAUNCH_WIDTH) and log_reference.shape == (1,)
    return dict(zip(LAUNCH_INPUTS, found[0].T, strict=True)), float(np.exp(log_reference[0]))


@pytest.mark.parametrize(
    ("device", "threads", "local_words", "shared_bytes", "blocks"),
    [
        # V100: 2,048 threads, 32 blocks, 96 KiB, 65,536 registers, of which a thread has 28 and its local words.
        (V100, 1024, 0, 0, 2),
        (V100, 32, 0, 0, 32),
        (V100, 256, 0, 24 * 1024, 4),
        (V100, 256, 0, 24 * 1024 + 4, 3),
        (V100, 256, 100, 0, 2),
        (V100, 256, 36, 0, 4),
        # At most 255 registers a thread: 65,536 / (255 * 128).
        (V100, 128, 1000, 0, 2),
        # A block that does not fit still runs.
        (V100, 1024, 200, 0, 1),
        # MI50: 2,560 threads in wavefronts of 64, 40 blocks, 64 KiB, at most 64 registers a thread.
        (MI50, 96, 0, 0, 65536 // (28 * 128)),
        (MI50, 256, 0, 16 * 1024, 4),
        (MI50, 64, 100, 0, 65536 // (64 * 64)),
        (MI50, 1024, 0, 0, 2),
        # K80: 112 KiB, 131,072 registers, 16 blocks.
        (K80, 32, 0, 0, 16),
        (K80, 256, 100, 0, 4),
    ],
)
def test_blocks_of_a_unit(device: Any, threads: int, local_words: int, shared_bytes: int, blocks: int) -> None:
    found, _ = inputs(device, leaf(threads=threads, local_words=local_words, shared_bytes=shared_bytes))
    assert 2.0 ** found["occupancy"][0] == pytest.approx(blocks)


@pytest.mark.parametrize("device", [V100, MI50])
def test_columns_in_single_precision_give_whole_warps(device: Any) -> None:
    warp = 64 if device is MI50 else 32
    for threads in range(warp, 1025, warp):
        found, _ = inputs(device, leaf(threads=threads, blocks=10**5))
        warps = 2.0 ** (found["active_warps"][0] - found["occupancy"][0])
        assert warps == pytest.approx(threads / warp)


def test_waves_and_fill() -> None:
    # 80 units with two blocks of 1,024 threads.
    for blocks, waves, fill in ((40, 0.25, 0.25), (160, 1, 1), (161, 161 / 160, 161 / 320), (400, 2.5, 2.5 / 3)):
        found, _ = inputs(V100, leaf(threads=1024, blocks=blocks))
        assert found["waves"][0] == pytest.approx(math.log2(waves), abs=1e-5)
        assert found["fill"][0] == pytest.approx(fill)


def test_registers_beyond_the_limit_are_spilled() -> None:
    found, _ = inputs(MI50, leaf(threads=64, local_words=128 - OTHER_REGISTERS))
    assert found["spilled"][0] == pytest.approx(1)  # twice ROCm's 64
    arithmetic = leaf(threads=64, blocks=600, local_words=100, accumulators=100, float_ops=1e4)
    fitting = leaf(threads=64, blocks=600, local_words=20, accumulators=20, float_ops=1e4)
    assert inputs(MI50, arithmetic)[1] > 2 * inputs(MI50, fitting)[1]


def test_reference_is_the_longest_resource_over_the_fill_and_a_launch() -> None:
    # 1,000 operations of each of 161 * 1,024 threads; 80 units of 64 cores.
    busy = leaf(threads=1024, blocks=161, float_ops=1000)
    arithmetic = 1000 * 1024 * 161 / (80 * 64 * V100.clock_hz)
    found, reference = inputs(V100, busy)
    assert reference == pytest.approx(arithmetic / (161 / 320) + LAUNCH_S, rel=1e-4)
    assert found["kernel_arithmetic"][0] == pytest.approx(math.log2(161 / 320), abs=1e-4)
    assert found["leaf_arithmetic"][0] == found["kernel_arithmetic"][0]
    assert found["kernel_share"][0] == pytest.approx(1 - LAUNCH_S / reference, rel=1e-4)
    # Stores: 32 bytes a sector, 32 warps a block, to memory; sectors of the L2 take longer.
    stores = leaf(threads=1024, blocks=160, global_stores=100, global_store_sectors=3200)
    store_bytes = 3200 * 32 * 160 * 32.0
    _, reference = inputs(V100, stores)
    slowest = max(store_bytes / V100.mem_bandwidth_bytes_per_s, store_bytes / (64 * 80 * V100.clock_hz))
    assert reference == pytest.approx(slowest + LAUNCH_S, rel=1e-4)


def test_a_block_of_20_threads_is_one_warp() -> None:
    full, part = (
        inputs(V100, leaf(threads=t, blocks=10**4, global_loads=1e4, global_load_sectors=4e4)) for t in (32, 20)
    )
    assert full[1] == pytest.approx(part[1])


def test_leaves_of_a_kernel_share_its_time_and_kernels_are_added() -> None:
    first = leaf(threads=256, blocks=3200, float_ops=3000)
    second = leaf(threads=256, blocks=3200, float_ops=1000)
    both, reference = inputs(V100, first, second)
    _, sum_of_both = inputs(V100, leaf(threads=256, blocks=3200, float_ops=4000))
    assert reference == pytest.approx(sum_of_both, rel=1e-4)
    assert both["kernel_arithmetic"][0] == both["kernel_arithmetic"][1]
    assert both["leaf_arithmetic"][0] - both["leaf_arithmetic"][1] == pytest.approx(math.log2(3), abs=1e-4)
    apart, reference = inputs(V100, first, leaf(threads=256, blocks=3200, float_ops=1000, kernel=1))
    alone = [inputs(V100, row)[1] for row in (first, second)]
    assert reference == pytest.approx(sum(alone), rel=1e-4)
    assert apart["kernel_share"] == pytest.approx([(t - LAUNCH_S) / sum(alone) for t in alone], rel=1e-3)


def test_padding_and_other_rows_change_nothing() -> None:
    programs = [
        [leaf(threads=192, blocks=77, float_ops=500, global_loads=3, global_load_sectors=12)],
        [leaf(threads=64, blocks=9000, shared_loads=64, shared_load_cycles=99), leaf(kernel=1, blocks=5)],
        [leaf(threads=1000, blocks=3, float_ops=10, local_words=70, accumulators=8)],
    ]
    devices = [V100, MI50, K80]
    padded = np.zeros((3, 4, GPU_WIDTH), np.float32)
    for i, leaves in enumerate(programs):
        padded[i, : len(leaves)] = leaves
    together, references = launch_inputs(padded, np.stack([launch_figures(d) for d in devices]))
    for i, leaves in enumerate(programs):
        alone, reference = launch_inputs(np.stack(leaves)[None], launch_figures(devices[i])[None])
        assert np.array_equal(together[i, : len(leaves)], alone[0]) and references[i] == reference[0]
        assert not together[i, len(leaves) :].any()


def test_program_without_a_launch_has_zeros_and_the_time_of_one_launch() -> None:
    found, log_reference = launch_inputs(np.zeros((1, 2, GPU_WIDTH), np.float32), launch_figures(V100)[None])
    assert not found.any() and math.exp(log_reference[0]) == pytest.approx(LAUNCH_S)
