"""Inputs of the network besides the leaves: summaries of programs combined with figures of devices.

Device figures enter as ratios to the program's quantities: duration of the arithmetic at peak, duration of the
traffic at full bandwidth, waves of tiles on the compute units. Ratios transfer to devices outside the training set,
absolute figures do not (docs/accuracy.md).

:mod:`cdmpp.model.nn.figures` has the figures of a program and of a device on their own. This module needs numpy alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cdmpp.features.schema import COLUMN
from cdmpp.programs.elements import DTYPE_BYTES, LAYOUTS, SCALINGS
from cdmpp.programs.query_options import BACKENDS, FLOOR_S, FRAMEWORKS, PROTOCOLS

Array = np.ndarray[Any, np.dtype[Any]]

#: Sizes of attention and of layers of experts that are inputs, as log2(1 + x).
SIZES = (
    "batch",
    "q_len",
    "past_len",
    "heads",
    "kv_heads",
    "head_dim",
    "decodes",
    "decode_past_len",
    "hidden",
    "tokens",
    "intermediate",
    "experts",
    "topk",
    "tp",
    "ep",
)
#: Loads of the rank with most rows (:mod:`cdmpp.programs.products`), as log2(1 + x); ``imbalance`` is log2 of the
#: largest load over the mean load.
LOADS = ("active_experts", "rows_per_expert", "tiles", "tile_rows", "imbalance")

OPERATOR_COLUMNS = (
    "weight_bits",  # log2 of the bits of a weight that has another type than the activations
    *(f"scaling_{name}" for name in SCALINGS),
    "cache_bits",  # log2 of the bits of a cached key that has another type than the query
    "module",
    "gated",
    "power_law",  # exponent of the rows per expert; 0: balanced
    *(f"layout_{name}" for name in LAYOUTS),  # of a product that states another layout than its operator's
    "half_accumulate",
    "wide_result",
    *(f"size_{name}" for name in SIZES),
    *(f"load_{name}" for name in LOADS),
)
#: Tile sizes of GEMM kernels. The kernel is not known before the run, so the waves of several sizes are inputs.
TILES = ((32, 32), (64, 64), (128, 64), (128, 128), (256, 128), (16, 128), (64, 256), (128, 256))
#: Steps of the reduction: a kernel rounds it up to one.
REDUCE_STEPS = (64, 128)
FAMILIES = ("gemm", "conv", "attention", "vector", "tir", "moe")
#: Families with sustained rates of their own (:data:`cdmpp.devices.spec.FAMILIES`).
RATED = FAMILIES[:3]
#: Element types with a peak rate; a program of another type counts as the first.
DTYPES = tuple(DTYPE_BYTES)

SUMMARY_COLUMNS = (
    "flops",
    "bytes",
    "output_elements",
    "matrix",
    "work_fraction",
    "leaves",
    "blocks",
    "batch",
    "m",
    "n",
    "k",
    "align_m",
    "align_n",
    "align_k",
    "spatial_0",
    "spatial_1",
    "spatial_2",
    "spatial_3",
    "reduce_0",
    "reduce_1",
    "reduce_2",
    "leaf_bytes",
    "reuse_0",
    "reuse_1",
    "run_0",
    "run_1",
    "element_bytes",
    *(f"dtype_{d}" for d in DTYPES),
    *(f"family_{f}" for f in FAMILIES),
    "operand_bytes_0",
    "operand_bytes_1",
    *OPERATOR_COLUMNS,
)
_S = {name: i for i, name in enumerate(SUMMARY_COLUMNS)}
_FIRST_DTYPE = _S[f"dtype_{DTYPES[0]}"]
_ONE_HOT_DTYPE = slice(_FIRST_DTYPE, _FIRST_DTYPE + len(DTYPES))
#: log2 of peak flop/s, bytes/s, bytes of last-level cache, compute units: subtracted from leaf magnitudes.
DEVICE_LOGS = ("peak", "bandwidth", "cache", "units")
#: Leaf columns that DEVICE_LOGS are subtracted from, in the same order.
LEAF_DEVICE_RATIOS = tuple(COLUMN[c] for c in ("flops", "leaf_bytes", "leaf_bytes", "spatial_trips"))
#: Columns of :func:`cdmpp.model.nn.figures.device_numbers`; before VECTOR the matrix peaks, one per dtype.
VECTOR, BANDWIDTH, CACHE, UNITS, GPU, CLOCK, VECTOR_SHARE, BANDWIDTH_SHARE, MATRIX_SHARES = range(
    len(DTYPES), len(DTYPES) + 9
)
#: Behind the shares: threads of a warp, and what a compute unit holds of threads, blocks, shared bytes and
#: 32-bit registers; then the registers of one thread.
UNIT = range(MATRIX_SHARES + len(RATED) * len(DTYPES), MATRIX_SHARES + len(RATED) * len(DTYPES) + 6)
HALF, _NARROW = DTYPES.index("float16"), DTYPES.index("float8_e4m3")
#: Clock for which FLOOR_S is defined.
FLOOR_CLOCK_HZ = 2e9
#: Launch floor on a CPU: a function call.
CPU_FLOOR_S = 5e-8
_CENTRE = np.array([20.0, 20.0, 0.0, 10.0])

QUERY_COLUMNS = (
    "log_compute_us",
    "log_memory_us",
    "log_ratio",
    "log_reference_us",
    "floor_share",
    "cache_ratio",
    "outputs_per_unit",
    "flops_per_unit",
    "units_per_program",
    "rows_per_unit",
    "balance",
    *(f"{what}_{a}x{b}" for a, b in TILES for what in ("waves", "wave_fill", "tile_fill")),
    *(f"reduce_fill_{step}" for step in REDUCE_STEPS),
    *(f"protocol_{p}" for p in PROTOCOLS),
    *(f"framework_{f}" for f in FRAMEWORKS),
    *(f"backend_{b}" for b in BACKENDS),
    "gpu",
    "has_cache_size",
    "log_compute_half_us",
    "log_operand_us",
    "log_narrow_speed",
)
#: Columns of :func:`query_inputs`.
INPUT_WIDTH = len(SUMMARY_COLUMNS) + len(QUERY_COLUMNS)


def peaks(summary: Array, device: Array) -> Array:
    """Nominal flop/s for each row: the matrix rate of its dtype, or the vector rate."""
    dtype = summary[:, _ONE_HOT_DTYPE].argmax(axis=1)
    matrix, vector = device[np.arange(len(device)), dtype], device[:, VECTOR]
    return np.where(summary[:, _S["matrix"]] > 0, matrix, vector)


def sustained_rates(summary: Array, device: Array) -> tuple[Array, Array]:
    """Sustained flop/s and bytes/s of each row's device, relative to typical shares."""
    dtype = summary[:, _ONE_HOT_DTYPE].argmax(axis=1)
    family = summary[:, [_S[f"family_{f}"] for f in RATED]].argmax(axis=1)
    column = MATRIX_SHARES + family * len(DTYPES) + dtype
    matrix = device[np.arange(len(device)), column]
    share = np.where(summary[:, _S["matrix"]] > 0, matrix, device[:, VECTOR_SHARE])
    return peaks(summary, device) * share, device[:, BANDWIDTH] * device[:, BANDWIDTH_SHARE]


def floor_s(device: Array, protocol: Array) -> Array:
    """Seconds of the smallest program, per row.

    A call from the host costs host time. A launch inside the device costs a number of device cycles: the smallest
    matrix products take 3.2 us on an A100 at 1.4 GHz, and 1.8 to 2.2 us on GPUs at 2 to 2.5 GHz. On a CPU, a launch
    is a function call.
    """
    floor = np.array([FLOOR_S[p] for p in PROTOCOLS])[protocol]
    gpu = device[:, GPU] > 0
    from_host = protocol == PROTOCOLS.index("eager")
    on_gpu = np.where(from_host, floor, floor * FLOOR_CLOCK_HZ / device[:, CLOCK])
    return np.where(gpu | from_host, on_gpu, CPU_FLOOR_S)


def roofline_s(summary: Array, device: Array) -> tuple[Array, Array]:
    """Seconds of arithmetic at peak and of traffic at full bandwidth, per row (float64)."""
    flops = np.exp2(summary[:, _S["flops"]].astype(np.float64)) - 1
    traffic = np.exp2(summary[:, _S["bytes"]].astype(np.float64)) - 1
    return flops / peaks(summary, device), traffic / device[:, BANDWIDTH]


#: A product of 8-bit floats without scales runs in one kernel on NVIDIA GPUs, with tiles of 128 x 128 whose reduction
#: goes in steps of 128: seconds follow from the tiles of the busiest unit. The constants are fitted to H100, H800 and
#: H200 (5 % mean error) and hold for a part with a seventh of their peak: bytes per cycle at which a unit
#: reads operands, cycles of a tile and of a launch, share of the bandwidth (docs/accuracy.md).
ONE_TILE, OPERAND_BYTES, TILE_CYCLES, LAUNCH_CYCLES, TRAFFIC_SHARE = 128, 0.70 * 64, 3300.0, 5400.0, 0.64


def _has_one_tile(summary: Array, device: Array) -> Array:
    """Rows whose kernel has one tile, (rows,) bool."""
    scales = [_S[name] for name in ("weight_bits", *(f"scaling_{name}" for name in SCALINGS))]
    narrow = (summary[:, _FIRST_DTYPE + _NARROW] > 0) & (summary[:, _S["family_gemm"]] > 0)
    return np.asarray(narrow & (device[:, GPU] > 0) & (summary[:, scales] == 0).all(axis=1))


def one_tile_s(summary: Array, device: Array, batch: Array, m: Array, n: Array, k: Array) -> tuple[Array, Array, Array]:
    """Seconds of the tiles of the busiest unit, of the traffic, and of the launch, (rows,) each."""
    units, clock = device[:, UNITS], device[:, CLOCK]
    waves = np.ceil(np.ceil(m / ONE_TILE) * np.ceil(n / ONE_TILE) * batch / units)
    steps = np.ceil(k / ONE_TILE) * ONE_TILE
    arithmetic = 2 * ONE_TILE**2 * steps * units / peaks(summary, device)
    tile = np.maximum(arithmetic, 2 * ONE_TILE * steps / (OPERAND_BYTES * clock))
    traffic = np.exp2(summary[:, _S["bytes"]].astype(np.float64)) - 1
    return (
        waves * (tile + TILE_CYCLES / clock),
        traffic / (TRAFFIC_SHARE * device[:, BANDWIDTH]),
        LAUNCH_CYCLES / clock,
    )


class ReferenceTerms(NamedTuple):
    """Seconds of arithmetic, traffic and launch of rows, and of all; their contraction (batch, m, n, k), and the
    :func:`sustained_rates` of their devices."""

    compute: Array
    memory: Array
    floor: Array
    reference: Array
    contraction: tuple[Array, Array, Array, Array]
    rates: tuple[Array, Array]


def reference_terms(summary: Array, device: Array, protocol: Array) -> ReferenceTerms:
    """The reference of rows, (rows,) each: arithmetic + traffic + the floor, or that of a kernel of one tile."""
    compute, memory = roofline_s(summary, device)
    peak, bandwidth = sustained_rates(summary, device)
    compute, memory = compute * peaks(summary, device) / peak, memory * device[:, BANDWIDTH] / bandwidth
    floor = floor_s(device, protocol)
    # Whole numbers, of which the logarithm in float32 loses the last digits: 4,096 rows are 32 tiles of 128, not 33.
    batch, m, n, k = (np.rint(np.exp2(summary[:, _S[c]].astype(np.float64)) - 1) for c in ("batch", "m", "n", "k"))
    contracts = m > 0.5
    # Without a contraction, tiles are rows of the output.
    m = np.where(contracts, np.maximum(m, 1), np.exp2(summary[:, _S["output_elements"]].astype(np.float64)))
    n, batch = np.where(contracts, np.maximum(n, 1), 1), np.where(contracts, np.maximum(batch, 1), 1)
    reference = compute + memory + floor
    tiled = np.flatnonzero(_has_one_tile(summary, device))
    if len(tiled):
        compute[tiled], memory[tiled], floor[tiled] = one_tile_s(
            summary[tiled], device[tiled], batch[tiled], m[tiled], n[tiled], k[tiled]
        )
        reference[tiled] = np.maximum(compute[tiled], memory[tiled]) + floor[tiled]
    return ReferenceTerms(compute, memory, floor, reference, (batch, m, n, k), (peak, bandwidth))


def query_inputs(
    summary: Array, device: Array, backend: Array, protocol: Array, framework: Array
) -> tuple[Array, Array, Array]:
    """Inputs of rows (program, device, backend, protocol, framework).

    ``summary``: float32, (rows, len(SUMMARY_COLUMNS)). ``device``: float64, (rows, .) of
    :func:`cdmpp.model.nn.figures.device_numbers`. ``backend``, ``protocol``, ``framework``: int, (rows,), indices into
    BACKENDS, PROTOCOLS, FRAMEWORKS; framework -1 where not known.

    Returns inputs, float32, (rows, len(SUMMARY_COLUMNS) + len(QUERY_COLUMNS)); logs of the device, float32, (rows,
    len(DEVICE_LOGS)); and the natural log of the reference in seconds, float64, (rows,): arithmetic + traffic + the
    protocol's floor.
    """
    compute, memory, floor, reference, (batch, m, n, k), (peak, bandwidth) = reference_terms(summary, device, protocol)
    cache, units = device[:, CACHE], device[:, UNITS]
    known = np.isfinite(cache)
    cache = np.where(known, cache, 4e6)
    traffic_log, output_log = summary[:, _S["bytes"]], summary[:, _S["output_elements"]]
    columns = [
        np.log2(compute * 1e6 + 1e-4),
        np.log2(memory * 1e6 + 1e-4),
        np.log2((compute + 1e-12) / (memory + 1e-12)),
        np.log2(reference * 1e6),
        floor / reference,
        traffic_log - np.log2(cache),
        output_log - np.log2(units),
        summary[:, _S["flops"]] - np.log2(units),
        np.minimum(output_log - np.log2(units * 256), 4.0),
        summary[:, _S["spatial_1"]] - np.log2(units),
        np.tanh(np.log2((compute + 1e-12) / (memory + 1e-12)) / 2),
    ]
    for tm, tn in TILES:
        tiles_m, tiles_n = np.ceil(m / tm), np.ceil(n / tn)
        waves = tiles_m * tiles_n * batch / units
        columns += [np.log2(waves), waves / np.ceil(waves), m * n / (tiles_m * tm * tiles_n * tn)]
    columns += [np.where(k > 0.5, k / (np.ceil(np.maximum(k, 1) / step) * step), 1.0) for step in REDUCE_STEPS]
    columns += [protocol == i for i in range(len(PROTOCOLS))]
    columns += [framework == i for i in range(len(FRAMEWORKS))]
    columns += [backend == i for i in range(len(BACKENDS))]
    # The same arithmetic at the 16-bit rate, which is the rate of weights that are widened before the product.
    half = np.where(summary[:, _S["matrix"]] > 0, compute * peaks(summary, device) / device[:, HALF], compute)
    operand = np.exp2(summary[:, _S["operand_bytes_1"]].astype(np.float64)) - 1
    columns += [
        device[:, GPU],
        known,
        np.log2(half * 1e6 + 1e-4),
        np.log2(operand / bandwidth * 1e6 + 1e-4),
        np.log2(device[:, _NARROW] / device[:, HALF]),
    ]
    query = np.stack([np.asarray(c, dtype=np.float32) for c in columns], axis=1)
    rates = np.stack([peak, bandwidth, cache, units], axis=1)
    logs = np.log2(rates) - _CENTRE
    inputs = np.concatenate([summary, query], axis=1).astype(np.float32)
    return inputs, logs.astype(np.float32), np.log(reference)


#: Standard deviation (natural log) of the factors of a virtual device: a common one on both rates, and one each for
#: arithmetic, bandwidth, cache and units.
VIRTUAL_SPEED, VIRTUAL_SHAPE = 0.7, 0.5


def virtual_devices(device: Array, rng: np.random.Generator) -> Array:
    """Virtual devices: real ones with randomly changed figures, as training data for unseen devices.

    With some ten devices per source, a network learns to recognise each by its ratios and treats an unseen one like the
    nearest. A virtual device is a real one made faster or slower, wider or narrower, with the same efficiency: the
    label log(latency / reference) stays. The network then learns what holds in a neighbourhood of the device (gain:
    docs/accuracy.md). ``device``: float64, (rows, .) of :func:`cdmpp.model.nn.figures.device_numbers`.
    """
    rows = len(device)
    speed = np.exp(rng.normal(0.0, VIRTUAL_SPEED, rows))
    shape = np.exp(rng.normal(0.0, VIRTUAL_SHAPE, (rows, 4)))
    out = device.copy()
    out[:, : VECTOR + 1] *= (speed * shape[:, 0])[:, None]
    out[:, BANDWIDTH] *= speed * shape[:, 1]
    out[:, CACHE] *= shape[:, 2]
    out[:, UNITS] = np.maximum(1.0, out[:, UNITS] * shape[:, 3])
    return out
