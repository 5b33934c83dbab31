"""Occupancy, waves and times of resources, computed by hand from the limits of a V100, an MI50 and a K80."""

import math
from typing import Any

import numpy as np
import pytest

from cdmpp.devices.registry import lookup
from cdmpp.features.launch_schema import GPU_COLUMNS, GPU_FLAGS, GPU_WIDTH
from cdmpp.model.nn.figures import device_numbers
from cdmpp.model.nn.launch_inputs import LAUNCH_INPUTS, LAUNCH_S, launch_inputs

V100, MI50, K80 = (lookup(name) for name in ("v100-pcie-16gb", "mi50", "k80"))


def leaf(**values: float) -> Any:
    """Columns of a leaf; one block of 32 threads unless stated."""
    row = np.zeros(GPU_WIDTH)
    for name, value in ({"blocks": 1, "threads": 32} | values).items():
        row[GPU_COLUMNS.index(name)] = value
    row[: -len(GPU_FLAGS)] = np.log2(1 + row[: -len(GPU_FLAGS)])
    return row.astype(np.float32)


def inputs(device: Any, *leaves: Any) -> tuple[dict[str, Any], float]:
    """Inputs of each leaf by name, and the reference in seconds."""
    found, log_reference = launch_inputs(np.stack(leaves)[None], device_numbers(device)[None])
    return dict(zip(LAUNCH_INPUTS, found[0].T, strict=True)), float(np.exp(log_reference[0]))


def test_blocks_of_a_unit() -> None:
    # A thread has 28 registers and its local words. A block that does not fit still runs.
    cases = {
        # 2,048 threads, 32 blocks, 96 KiB, 65,536 registers, at most 255 of a thread.
        "v100-pcie-16gb": [(1024, 0, 0, 2), (32, 0, 0, 32), (256, 0, 24576, 4), (256, 0, 24580, 3), (256, 100, 0, 2)],
        "v100-pcie-32gb": [(128, 1000, 0, 2), (1024, 200, 0, 1)],
        # Wavefronts of 64, 64 KiB, at most 64 registers a thread.
        "mi50": [(96, 0, 0, 65536 // (28 * 128)), (256, 0, 16384, 4), (64, 100, 0, 65536 // (64 * 64))],
        # 16 blocks, 131,072 registers.
        "k80": [(32, 0, 0, 16), (256, 100, 0, 4)],
    }
    for name, rows in cases.items():
        for threads, local_words, shared_bytes, blocks in rows:
            row = leaf(threads=threads, local_words=local_words, shared_bytes=shared_bytes)
            found, _ = inputs(lookup(name), row)
            assert 2.0 ** found["occupancy"][0] == pytest.approx(blocks), (name, threads, local_words, shared_bytes)


def test_columns_in_single_precision_give_whole_warps() -> None:
    for threads in range(32, 1025, 32):
        found, _ = inputs(V100, leaf(threads=threads, blocks=10**5))
        assert 2.0 ** (found["active_warps"][0] - found["occupancy"][0]) == pytest.approx(threads / 32)


def test_waves_and_fill() -> None:
    # 80 units with two blocks of 1,024 threads.
    for blocks, waves, fill in ((40, 0.25, 0.25), (160, 1, 1), (161, 161 / 160, 161 / 320), (400, 2.5, 2.5 / 3)):
        found, _ = inputs(V100, leaf(threads=1024, blocks=blocks))
        assert found["waves"][0] == pytest.approx(math.log2(waves), abs=1e-5)
        assert found["fill"][0] == pytest.approx(fill)


def test_registers_beyond_the_limit_are_spilled() -> None:
    many, few = (leaf(threads=64, blocks=600, local_words=n, accumulators=n, float_ops=1e4) for n in (100, 20))
    assert inputs(MI50, many)[0]["spilled"][0] == pytest.approx(1)  # 128 registers are twice ROCm's 64
    assert inputs(MI50, many)[1] > 2 * inputs(MI50, few)[1]


def test_reference_is_the_longest_resource_over_the_fill_and_a_launch() -> None:
    # 1,000 operations of each of 161 * 1,024 threads; a multiply-add of each core in a cycle is the peak.
    found, reference = inputs(V100, leaf(threads=1024, blocks=161, float_ops=1000))
    arithmetic = 1000 * 1024 * 161 / (V100.peak_flops_fp32 / 2)
    assert reference == pytest.approx(arithmetic / (161 / 320) + LAUNCH_S, rel=1e-4)
    assert found["kernel_arithmetic"][0] == pytest.approx(math.log2(161 / 320), abs=1e-4)
    assert found["kernel_share"][0] == pytest.approx(1 - LAUNCH_S / reference, rel=1e-4)
    # A block of 20 threads is one warp: 10,000 blocks fetch 40,000 sectors each, four in a cycle, 32 of 64 bytes.
    _, reference = inputs(V100, leaf(threads=20, blocks=10240, global_load_sectors=4e4))
    assert reference == pytest.approx(4e4 * 10240 / (2 * 80 * V100.clock_hz) + LAUNCH_S, rel=1e-4)


def test_leaves_of_a_kernel_share_its_time_and_kernels_are_added() -> None:
    first, second, sum_of_both = (leaf(threads=256, blocks=3200, float_ops=n) for n in (3000, 1000, 4000))
    both, reference = inputs(V100, first, second)
    assert reference == pytest.approx(inputs(V100, sum_of_both)[1], rel=1e-4)
    assert both["leaf_arithmetic"][0] - both["leaf_arithmetic"][1] == pytest.approx(math.log2(3), abs=1e-4)
    apart, reference = inputs(V100, first, leaf(threads=256, blocks=3200, float_ops=1000, kernel=1))
    alone = [inputs(V100, row)[1] for row in (first, second)]
    assert reference == pytest.approx(sum(alone), rel=1e-4)
    assert apart["kernel_share"] == pytest.approx([(t - LAUNCH_S) / sum(alone) for t in alone], rel=1e-3)


def test_padding_and_other_rows_change_nothing() -> None:
    programs = [
        [leaf(threads=192, blocks=77, float_ops=500, global_loads=3, global_load_sectors=12)],
        [leaf(threads=64, blocks=9000, shared_loads=64, shared_load_cycles=99), leaf(kernel=1, blocks=5)],
        [np.zeros(GPU_WIDTH, np.float32)],
    ]
    devices, padded = np.stack([device_numbers(d) for d in (V100, MI50, K80)]), np.zeros((3, 4, GPU_WIDTH), np.float32)
    for i, leaves in enumerate(programs):
        padded[i, : len(leaves)] = leaves
    together, references = launch_inputs(padded, devices)
    for i, leaves in enumerate(programs):
        alone, reference = launch_inputs(np.stack(leaves)[None], devices[i : i + 1])
        assert np.array_equal(together[i, : len(leaves)], alone[0]) and references[i] == reference[0]
        assert not together[i, len(leaves) :].any()
    # Without a launch: zeros, and the time of one launch.
    assert not together[2].any() and math.exp(references[2]) == pytest.approx(LAUNCH_S)
