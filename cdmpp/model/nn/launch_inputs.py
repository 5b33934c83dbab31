"""Where a GPU program meets a device: occupancy, waves, and the time of each resource, per leaf.

The reference of a program is the time of the resource that each of its kernels needs longest, over the fill of the last
wave, and a launch for each kernel. The network predicts the latency over it. Its inputs are ratios of times: they
transfer to devices and sizes outside of the training set.

Occupancy follows from threads, blocks, shared memory and registers of a compute unit
(:mod:`cdmpp.devices.limits`); TVM's kernels hold their local buffers in registers, and some more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cdmpp.features.launch_schema import GPU_COLUMNS, GPU_FLAGS, GPU_WIDTH, LAUNCH, SECTOR_BYTES, WARP
from cdmpp.model.nn.inputs import BANDWIDTH, CLOCK, HALF, UNIT, UNITS, VECTOR

Array = np.ndarray[Any, np.dtype[Any]]

#: Registers of a thread besides its local buffers: addresses, operands, loop counters.
OTHER_REGISTERS = 28
#: Requests of a unit in a cycle: sectors of the first-level cache, words of a bank; bytes of a unit from the L2.
L1_SECTORS, L2_BYTES = 4.0, 64.0
#: Cycles of an access to global and shared memory, of an instruction, a barrier and the start of a block.
GLOBAL_CYCLES, SHARED_CYCLES, ISSUE_CYCLES, BARRIER_CYCLES, BLOCK_CYCLES = 500.0, 30.0, 4.0, 40.0, 300.0
LAUNCH_S = 4e-6
#: Resources whose times are compared.
RESOURCES = ("arithmetic", "tensor", "issue", "l1", "shared", "l2", "dram", "spill", "blocks")
#: Figures of a kernel on a device, equal in its leaves.
KERNEL = ("occupancy", "waves", "fill", "active_warps", "spilled", "shared_share", "kernel_share", "latency")
#: Columns of :func:`launch_inputs`: logarithms (base 2) of ratios, but for fill and shares.
LAUNCH_INPUTS: tuple[str, ...] = (
    *KERNEL,
    *(f"kernel_{name}" for name in RESOURCES),
    *(f"leaf_{name}" for name in (*RESOURCES[:-2], "latency")),
)
LAUNCH_WIDTH, KERNEL_WIDTH = len(LAUNCH_INPUTS), len(KERNEL) + len(RESOURCES)
#: Smallest ratio that is told from none, as log2.
_LEAST = -12.0
_AT = {name: i for i, name in enumerate(GPU_COLUMNS)}
_UNIT = ("warp", "threads", "blocks", "shared", "registers", "per_thread")


def launch_inputs(columns: Array, device: Array) -> tuple[Array, Array]:
    """Inputs of the leaves of GPU programs on devices, float32, (rows, leaves, LAUNCH_WIDTH), and the reference.

    Inputs are 0 for leaves without a launch. The reference, float64, (rows,), is the natural log of seconds; that of
    one launch for a program without any. ``columns``: float32, (rows, leaves, GPU_WIDTH) of
    :mod:`cdmpp.features.launch_columns`; a leaf without a launch (padding) has no threads. ``device``: float64, (rows,
    .) of :func:`cdmpp.model.nn.figures.device_numbers`.
    """
    flags = GPU_WIDTH - len(GPU_FLAGS)
    x = np.concatenate([np.exp2(columns[..., :flags].astype(np.float64)) - 1, columns[..., flags:]], axis=2)
    # Whole numbers again: 1,024 threads from a float32 logarithm are 1,024.0003, a warp more.
    x[..., : len(LAUNCH)] = np.rint(x[..., : len(LAUNCH)])
    d = {name: device[:, [column]] for name, column in zip(_UNIT, UNIT, strict=True)}
    d |= {"units": device[:, [UNITS]], "clock": device[:, [CLOCK]], "bandwidth": device[:, [BANDWIDTH]]}
    d |= {"lane_rate": device[:, [VECTOR]] / 2, "tensor_rate": device[:, [HALF]]}
    real, kernel = x[..., _AT["threads"]] > 0, x[..., _AT["kernel"]]
    leaf = _leaf_times(x, d)
    out = np.zeros((*real.shape, LAUNCH_WIDTH))
    reference = np.full(len(x), LAUNCH_S)
    times = np.zeros(real.shape)
    for number in range(int(kernel.max(initial=0)) + 1):
        of_kernel = real & (kernel == number)
        if not of_kernel.any():
            continue
        figures, ratios, time = _kernel(x, leaf, of_kernel, d)
        reference += time + LAUNCH_S * of_kernel.any(axis=1) * (number > 0)
        values = np.concatenate([figures, ratios], axis=1)[:, None, :]
        out[..., : values.shape[2]] = np.where(of_kernel[..., None], values, out[..., : values.shape[2]])
        times = np.where(of_kernel, time[:, None], times)
    safe = reference[:, None]
    out[..., KERNEL.index("kernel_share")] = np.where(real, times / safe, 0)
    shares = np.stack([leaf[name] for name in (*RESOURCES[:-2], "latency")], axis=2)
    out[..., len(KERNEL) + len(RESOURCES) :] = np.where(real[..., None], _ratio(shares, times[..., None]), 0)
    return out.astype(np.float32), np.log(reference)


def main_kernel(inputs: Array) -> Array:
    """Figures of the kernel with the largest share of the time, (rows, KERNEL_WIDTH), of :func:`launch_inputs`."""
    main = inputs[:, :, KERNEL.index("kernel_share")].argmax(axis=1)
    return np.asarray(inputs[np.arange(len(inputs)), main, :KERNEL_WIDTH])


def _ratio(a: Array, b: Array) -> Array:
    return np.asarray(np.clip(np.log2((a + 1e-30) / (b + 1e-30)), _LEAST, -_LEAST))


def _leaf_times(x: Array, d: dict[str, Array]) -> dict[str, Array]:
    """Seconds of each resource that a leaf needs on the whole device, and its latency in one thread."""

    def of(*names: str) -> Array:
        return np.asarray(np.sum([x[..., _AT[name]] for name in names], axis=0))

    lanes = np.ceil(of("threads") / d["warp"]) * d["warp"] * of("blocks")
    warps = np.ceil(of("threads") / WARP) * of("blocks")
    cycle = 1 / (d["units"] * d["clock"])
    ops = of("float_ops", "int_ops") + 4 * of("slow_ops")
    sectors = of("global_load_sectors", "global_store_sectors") * warps
    issued = ops + of("global_loads", "global_stores", "shared_loads", "shared_stores", "loop_steps")
    return {
        "arithmetic": ops * lanes / d["lane_rate"],
        "tensor": of("tensor_ops") * warps / d["tensor_rate"],
        "issue": issued * lanes / d["lane_rate"],
        "l1": sectors * cycle / L1_SECTORS,
        "shared": of("shared_load_cycles", "shared_store_cycles") * warps * cycle,
        "l2": sectors * SECTOR_BYTES * cycle / L2_BYTES,
        "dram": of("global_store_sectors") * warps * SECTOR_BYTES / d["bandwidth"],
        "latency": (
            GLOBAL_CYCLES * of("global_loads")
            + SHARED_CYCLES * of("shared_loads")
            + ISSUE_CYCLES * ops
            + BARRIER_CYCLES * of("barriers")
        )
        / d["clock"],
    }


def _kernel(x: Array, leaf: dict[str, Array], in_kernel: Array, d: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Figures (rows, KERNEL), log ratios (rows, RESOURCES) and seconds (rows,) of one kernel."""

    def figure(name: str) -> Array:
        return np.asarray(np.where(in_kernel, x[..., _AT[name]], 0).max(axis=1))

    d = {name: column[:, 0] for name, column in d.items()}
    threads, blocks, local = np.maximum(figure("threads"), 1), figure("blocks"), figure("local_words")
    warps = np.ceil(threads / d["warp"])
    lanes = warps * d["warp"]
    cap = np.minimum(d["per_thread"], np.maximum(d["registers"] / lanes, 16))
    wanted = local + OTHER_REGISTERS
    held = np.minimum(wanted, cap)
    limits = [
        d["threads"] / lanes,
        d["blocks"],
        d["shared"] / np.maximum(figure("shared_bytes"), 1),
        d["registers"] / (held * lanes),
    ]
    occupancy = np.maximum(np.floor(np.minimum.reduce(limits)), 1)
    waves = blocks / (d["units"] * occupancy)
    active = occupancy * warps * np.minimum(waves, 1)
    fill = waves / np.maximum(np.ceil(waves), 1)
    spilled = np.maximum(wanted - cap, 0) / wanted
    times = {name: np.where(in_kernel, leaf[name], 0).sum(axis=1) for name in leaf}
    # A spilled register is read and written with each operation on it.
    ops = np.where(in_kernel & (x[..., _AT["accumulators"]] > 0), x[..., _AT["float_ops"]], 0).sum(axis=1)
    times["spill"] = 8 * spilled * ops * lanes * blocks / (L2_BYTES * d["units"] * d["clock"])
    times["blocks"] = BLOCK_CYCLES * blocks / (d["units"] * np.minimum(occupancy, 8) * d["clock"])
    latency = times["latency"] * np.ceil(waves) / np.maximum(active / 8, 1)
    longest = np.maximum.reduce([times[name] for name in RESOURCES])
    present = in_kernel.any(axis=1)
    seconds = np.where(present, longest / np.maximum(fill, 1e-9), 0)
    ratios = np.stack([_ratio(times[name], seconds) for name in RESOURCES], axis=1)
    figures = [
        np.log2(occupancy),
        np.clip(np.log2(np.maximum(waves, 1e-9)), -8, 8),
        fill,
        np.log2(np.maximum(active, 1e-3)),
        np.log2(wanted / cap),
        np.log2(figure("shared_bytes") / d["shared"] + 2.0**_LEAST),
        np.zeros(len(x)),
        _ratio(latency, seconds),
    ]
    return np.stack(figures, axis=1), ratios, seconds
