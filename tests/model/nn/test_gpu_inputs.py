"""Occupancy, waves and times of a GPU schedule on a GPU, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cdmpp.devices.limits import DEFAULT, unit_limits
from cdmpp.devices.registry import lookup
from cdmpp.features.gpu_schedule import GPU_COLUMNS, GPU_FLAGS, GPU_WIDTH
from cdmpp.model.nn.gpu_inputs import DEVICE_COLUMNS, gpu_inputs, summarise_schedule

#: 68 units of 64 lanes; 1,024 threads, 16 blocks, 64 KiB and 65,536 registers in each.
TURING = lookup("rtx-2080-ti")


def schedule(**values: float) -> np.ndarray:
    """A summary with these counts; shares are 1 unless stated."""
    row = [values.get(name, 1.0 if name in GPU_FLAGS else 0.0) for name in GPU_COLUMNS]
    plain = np.array([[v if name in GPU_FLAGS else np.log2(1 + v) for name, v in zip(GPU_COLUMNS, row, strict=True)]])
    return plain.astype(np.float32)


def met(device=TURING, program_bytes: float = 1e6, **values: float) -> tuple[dict[str, float], float]:
    inputs, log_reference = gpu_inputs(schedule(**values), np.array([program_bytes]), device)
    return dict(zip(DEVICE_COLUMNS, inputs[0].tolist(), strict=True)), float(log_reference[0])


@pytest.mark.parametrize(
    ("values", "blocks", "limit"),
    [
        ({"threads": 32}, 16, ""),
        ({"threads": 256}, 4, "limited_by_threads"),
        ({"threads": 64, "shared_bytes": 20 * 1024}, 3, "limited_by_shared"),
        ({"threads": 128, "local_words": 128}, 3, "limited_by_registers"),
    ],
)
def test_blocks_of_a_unit_are_what_its_scarcest_resource_allows(values, blocks, limit):
    found, _ = met(blocks=1000, **values)
    assert found["blocks_per_unit"] == blocks
    flags = [name for name in DEVICE_COLUMNS if name.startswith("limited_") and found[name]]
    assert flags == ([limit] if limit else [])
    assert found["occupancy"] == pytest.approx(blocks * values["threads"] / 1024)


def test_waves_are_counted_over_the_units():
    slots = 68 * 4
    for blocks, fill in ((slots, 1.0), (slots + 1, (slots + 1) / (2 * slots)), (slots // 2, 0.5)):
        found, _ = met(threads=256, blocks=blocks)
        assert found["wave_fill"] == pytest.approx(fill, rel=1e-4)
        assert found["log_waves"] == pytest.approx(np.log2(blocks / slots), abs=1e-4)


def test_reference_is_the_busiest_resource():
    many = 68 * 4 * 100
    # 1,000 multiply-adds of every thread: 64 lanes of 68 units at 1.545 GHz.
    _, log_reference = met(threads=256, blocks=many, float_ops=1000)
    by_hand = 1000 * 256 * many / (68 * 64 * 1.545e9)
    assert np.exp(log_reference) == pytest.approx(by_hand, rel=0.02)
    # Shared memory serves one request of a warp per cycle: conflicts of 32 make it the busiest.
    found, log_reference = met(threads=256, blocks=many, float_ops=1000, shared_loads=500, shared_load_cycles=16_000)
    assert np.exp(log_reference) == pytest.approx(16_000 * 8 * many / (68 * 1.545e9), rel=0.02)
    assert found["log_shared_share"] == pytest.approx(0, abs=0.05) and found["log_arithmetic_share"] < -4


def test_a_faster_memory_shortens_the_reference_of_a_copy():
    values = {"threads": 256, "blocks": 10_000, "global_loads": 1, "global_load_sectors": 4, "block_bytes": 8192}
    slow, fast = (met(lookup(name), 8e9, **values)[1] for name in ("rtx-2080-ti", "a100-pcie-40gb"))
    assert np.exp(slow - fast) == pytest.approx(1555 / 616, rel=0.05)


def test_summary_adds_instructions_and_keeps_the_largest_of_the_rest():
    leaves = np.zeros((2, GPU_WIDTH), dtype=np.float32)
    at = {name: i for i, name in enumerate(GPU_COLUMNS)}
    leaves[:, at["threads"]] = 5
    leaves[:, at["float_ops"]] = np.log2(1 + np.array([100, 28]))
    leaves[:, at["accumulators"]] = np.log2(1 + np.array([16, 1]))
    leaves[:, at["global_load_sectors"]] = np.log2(1 + np.array([30, 10]))
    leaves[:, at["load_efficiency"]] = 1.0, 0.2
    found = summarise_schedule(leaves)
    assert found[at["threads"]] == 5
    assert found[at["float_ops"]] == pytest.approx(np.log2(129))
    assert found[at["accumulators"]] == pytest.approx(np.log2(17))
    assert found[at["load_efficiency"]] == pytest.approx(0.8)
    assert found[at["store_efficiency"]] == 1.0


def test_every_architecture_of_the_table_has_limits():
    assert unit_limits(lookup("rtx-3090")).threads == 1536
    assert unit_limits(lookup("a100-pcie-40gb")).shared_bytes == 164 * 1024
    assert unit_limits(lookup("mi250x-gcd")).warp == 64
    assert unit_limits(lookup("pro-w7800")).warp == 32
    other = lookup("rtx-3090").model_copy(update={"arch": "Unheard-of"})
    assert unit_limits(other) == DEFAULT
