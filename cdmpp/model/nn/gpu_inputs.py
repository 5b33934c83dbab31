"""Where a GPU schedule meets a GPU: occupancy, waves, and the time of each kind of instruction at full rate.

The schedule's columns (:mod:`cdmpp.features.gpu_schedule`) do not depend on a device, and the limits of a compute unit
(:mod:`cdmpp.devices.limits`) do not depend on a program. Times enter as ratios to the reference
of :func:`gpu_inputs`, which transfer to devices outside the training set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.devices.limits import unit_limits
from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.gpu_schedule import GPU_COLUMNS, GPU_FLAGS, LARGEST, LEAF, PROGRAM, WARP

Array = np.ndarray[Any, np.dtype[Any]]

_S = {name: i for i, name in enumerate(GPU_COLUMNS)}
_ADDED = slice(len(PROGRAM), len(PROGRAM) + len(LEAF))
_LARGEST = slice(_ADDED.stop, _ADDED.stop + len(LARGEST))
#: Share -> column whose sums weigh the leaves.
_WEIGHED = {
    "load_efficiency": "global_load_sectors",
    "store_efficiency": "global_store_sectors",
    "bank_efficiency": "shared_load_cycles",
}
#: Registers that a thread needs besides its local buffers: addresses, loop counters, operands.
OTHER_REGISTERS = 24
#: Cycles until the result of an arithmetic instruction, and until data come from memory.
ARITHMETIC_CYCLES, MEMORY_CYCLES = 6.0, 400.0
#: Quarter-rate instructions: divisions, functions, conversions.
SLOW = 4.0
#: Sectors of 32 bytes that a unit's first-level cache delivers in one cycle.
SECTORS_PER_CYCLE = 2.0
#: Bandwidth of the second-level cache over that of the memory, where it is not known.
CACHE_OVER_MEMORY = 3.0
LAUNCH_S = 3e-6

#: Kinds of time: issue slots, arithmetic, first-level cache, shared memory, second-level cache, memory, latency.
TIMES = ("issue", "arithmetic", "sectors", "shared", "cache", "memory", "latency")
DEVICE_COLUMNS = (
    *(f"log_{name}_share" for name in TIMES),
    "log_reference_us",
    "occupancy",
    "blocks_per_unit",
    "log_waves",
    "wave_fill",
    "log_units_used",
    "limited_by_threads",
    "limited_by_shared",
    "limited_by_registers",
    "spilled_words",
    "warp_lanes_used",
    "log_block_bytes_in_unit",
    "log_bytes_over_cache",
    "log_warps_per_lane_group",
    "balance",
)


def summarise_schedule(leaves: Array) -> Array:
    """Summary of a program over its leaves.

    Parameters
    ----------
    leaves : float32, (leaves, GPU_WIDTH) of :func:`cdmpp.features.gpu_schedule.gpu_columns`

    Returns
    -------
    float32, (GPU_WIDTH,)
        Sums of what leaves add up to, the largest of the rest, shares weighted by what they are shares of.
    """
    plain = np.exp2(leaves.astype(np.float64)) - 1
    out = leaves[0].astype(np.float64)
    out[_ADDED] = np.log2(1 + plain[:, _ADDED].sum(axis=0))
    out[_LARGEST] = leaves[:, _LARGEST].max(axis=0)
    for name, weight in _WEIGHED.items():
        share, weights = leaves[:, _S[name]], plain[:, _S[weight]]
        out[_S[name]] = float(share @ weights / weights.sum()) if weights.sum() else 1.0
    return np.asarray(out, dtype=np.float32)


def gpu_inputs(schedule: Array, program_bytes: Array, device: DeviceSpec) -> tuple[Array, Array]:
    """Inputs of scheduled programs on one GPU.

    Parameters
    ----------
    schedule : (programs, GPU_WIDTH) of :func:`summarise_schedule`
    program_bytes : (programs,)
        Distinct bytes of the arguments.
    device : DeviceSpec

    Returns
    -------
    inputs : float32, (programs, len(DEVICE_COLUMNS))
    log_reference : float64, (programs,)
        Natural log of the seconds that the busiest resource needs, waves counted whole.
    """
    limits, n = unit_limits(device), _Counts(schedule)
    warps = np.ceil(n["threads"] / limits.warp)
    registers = np.clip(np.ceil((n["local_words"] + OTHER_REGISTERS) / 8) * 8, 24, limits.registers_per_thread)
    spilled = np.maximum(n["local_words"] + OTHER_REGISTERS - limits.registers_per_thread, 0)
    fits = np.stack(
        [
            np.full(len(schedule), float(limits.blocks)),
            np.floor(limits.threads / (warps * limits.warp)),
            np.floor(limits.shared_bytes / np.maximum(n["shared_bytes"], 1.0)),
            np.floor(limits.registers / (registers * warps * limits.warp)),
        ]
    )
    per_unit = np.maximum(fits.min(axis=0), 1.0)
    limited = fits.argmin(axis=0)
    slots = device.compute_units * per_unit
    waves = n["blocks"] / slots
    fill = waves / np.ceil(waves)
    # Warp-wide instructions of all blocks. A unit issues one per cycle for each group of lanes as wide as a warp.
    groups, hertz = device.cores_per_unit / limits.warp, device.clock_hz
    all_warps = warps * n["blocks"]
    arithmetic = n["float_ops"] + n["int_ops"] + SLOW * n["slow_ops"]
    accesses = n["global_loads"] + n["global_stores"] + n["shared_loads"] + n["shared_stores"]
    issued = arithmetic + accesses + 2 * n["loop_steps"]
    cycles_of = device.compute_units * hertz
    # Sectors and cycles are counted for warps of 32.
    narrow = np.ceil(n["threads"] / WARP) * n["blocks"]
    sectors = (n["global_load_sectors"] + n["global_store_sectors"]) * narrow
    shared = (n["shared_load_cycles"] + n["shared_store_cycles"]) * narrow
    traffic = n["block_bytes"] * n["blocks"]
    cache_rate = device.l2_bandwidth_bytes_per_s or CACHE_OVER_MEMORY * device.mem_bandwidth_bytes_per_s
    chain = n["loop_steps"] * ARITHMETIC_CYCLES + accesses * MEMORY_CYCLES / np.maximum(per_unit * warps, 1.0)
    times = np.stack(
        [
            issued * all_warps / (groups * cycles_of),
            n["float_ops"] * all_warps / (groups * cycles_of),
            sectors / (SECTORS_PER_CYCLE * cycles_of),
            shared / cycles_of,
            traffic / cache_rate,
            program_bytes / device.mem_bandwidth_bytes_per_s,
            chain * np.ceil(waves) / hertz,
        ],
        axis=1,
    )
    busiest = times[:, :-1].max(axis=1) / fill + LAUNCH_S
    share = np.log2(times / busiest[:, None] + 1e-4)
    cache = device.l2_bytes or 4e6
    columns = np.stack(
        [
            np.log2(busiest * 1e6),
            per_unit * warps * limits.warp / limits.threads,
            per_unit,
            np.log2(waves),
            fill,
            np.minimum(np.log2(n["blocks"] / device.compute_units), 4.0),
            limited == 1,
            limited == 2,
            limited == 3,
            np.log2(1 + spilled),
            n["threads"] / (warps * limits.warp),
            np.log2(1 + n["block_bytes"] * per_unit),
            np.log2(1 + n["block_bytes"] * np.minimum(slots, n["blocks"])) - np.log2(cache),
            np.log2(per_unit * warps / groups),
            np.full(len(schedule), np.log2(device.peak_flops_fp32 / device.mem_bandwidth_bytes_per_s)),
        ],
        axis=1,
    )
    return np.concatenate([share, columns], axis=1).astype(np.float32), np.log(busiest)


class _Counts:
    """Columns of summaries by name, as plain counts."""

    def __init__(self, schedule: Array) -> None:
        self._logs = schedule.astype(np.float64)

    def __getitem__(self, name: str) -> Array:
        values = self._logs[:, _S[name]]
        if name in GPU_FLAGS:
            return values
        plain = np.exp2(values) - 1
        # Whole numbers, of which the logarithm in float32 loses the last digits: 256 threads are 8 warps, not 9.
        return np.asarray(np.rint(plain) if name in PROGRAM else plain)


def stack_summaries(programs: Sequence[Array]) -> Array:
    """:func:`summarise_schedule` of several programs, (programs, GPU_WIDTH)."""
    return np.stack([summarise_schedule(leaves) for leaves in programs])
