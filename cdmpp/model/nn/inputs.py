"""Inputs of the network besides the leaves: summaries of programs combined with figures of devices.

Device figures enter as ratios to the program's quantities: duration of the arithmetic at peak, duration of the
traffic at full bandwidth, waves of tiles on the compute units. Ratios transfer to devices outside the training set,
absolute figures do not (docs/accuracy.md).

Some summary columns come from an operator's own fields: types, scales, sizes, loads of experts. The leaves of a program
give its loops and accesses. What a kernel does with scales, cached keys or the rows of an expert does not follow from
them as directly, so the fields are inputs themselves. They are read from
:attr:`cdmpp.features.encode.EncodedPrograms.structure` and ``sizes``; the columns of other programs are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

import numpy as np

from cdmpp.devices.limits import bandwidth_share, matrix_share, power_share
from cdmpp.devices.spec import FAMILIES as RATED
from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.encode import EncodedPrograms
from cdmpp.features.schema import COLUMN
from cdmpp.programs.elements import DTYPE_BYTES, SCALINGS, canonical_dtype
from cdmpp.programs.operators import derived_sizes, operator_family, operator_types
from cdmpp.programs.products import Layout
from cdmpp.programs.query_options import BACKENDS, FLOOR_S, FRAMEWORKS, PROTOCOLS
from cdmpp.programs.templates import size_names

Array = np.ndarray[Any, np.dtype[Any]]

LAYOUTS: tuple[str, ...] = get_args(Layout)
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
_AT = {name: i for i, name in enumerate(OPERATOR_COLUMNS)}
_FIRST_LOAD = _AT[f"load_{LOADS[0]}"]
#: A grouped product has the sizes of a layer of experts under other names.
_GROUPED = {"groups": "experts", "rows": "tokens", "n": "intermediate", "k": "hidden"}
#: Families whose sizes are inputs. The extents of the others are in the leaves.
_SIZED = ("attention", "moe")


@dataclass(frozen=True)
class _Layout:
    """What the operators of one structural class have in common.

    Attributes
    ----------
    constant : (len(OPERATOR_COLUMNS),) float32
    columns : columns of the sizes
    sizes : their positions in :attr:`EncodedPrograms.sizes`
    names : size names of the operator
    operator : str
    flags : structural fields, for the loads of experts; None for other operators
    """

    constant: Array
    columns: Array
    sizes: Array
    names: tuple[str, ...]
    operator: str
    flags: Mapping[str, str] | None


def _bits(dtype: str | None) -> float:
    return 0.0 if dtype is None else float(np.log2(8 * DTYPE_BYTES[dtype]))


@lru_cache(maxsize=4096)
def _layout(structure: str) -> _Layout | None:
    """Layout of a structural class; None for a name that is not one."""
    operator, _, *parts = structure.split(":")
    if operator not in operator_types():
        return None
    flags = dict(part.partition("=")[::2] for part in parts)
    constant = np.zeros(len(OPERATOR_COLUMNS), dtype=np.float32)
    constant[_AT["weight_bits"]] = _bits(flags.get("weight_dtype"))
    constant[_AT["cache_bits"]] = _bits(flags.get("kv_dtype"))
    constant[_AT["half_accumulate"]] = "accumulate" in flags
    constant[_AT["wide_result"]] = "out_dtype" in flags
    for name in ("scaling", "layout"):
        if name in flags:
            constant[_AT[f"{name}_{flags[name]}"]] = 1
    for name in ("module", "gated"):
        constant[_AT[name]] = flags.get(name) == "True"
    balance = flags.get("balance", "balanced")
    constant[_AT["power_law"]] = 0.0 if balance == "balanced" else float(balance.rpartition("_")[2])
    names, family = tuple(size_names(operator)), operator_family(operator)
    # Without projections, ``hidden`` of latent attention is unused.
    unused = {"hidden"} if operator.startswith("mla_") and flags.get("module") != "True" else set()
    pairs = [
        (_AT[f"size_{known}"], position)
        for position, name in enumerate(names)
        if (known := _GROUPED.get(name, name) if operator == "grouped_gemm" else name) in SIZES and name not in unused
        if family in _SIZED or name in ("topk", "head_dim")
    ]
    columns, positions = (np.array(column, dtype=np.intp) for column in zip(*pairs, strict=True)) if pairs else ((), ())
    return _Layout(
        constant,
        np.asarray(columns, dtype=np.intp),
        np.asarray(positions, dtype=np.intp),
        names,
        operator,
        {**flags, "balance": balance} if family == "moe" else None,
    )


def operator_columns(structure: str, sizes: Array) -> tuple[Array, Array | None]:
    """Columns of operators that share a structural class.

    Parameters
    ----------
    structure : str
    sizes : (programs, size names of the operator) int64

    Returns
    -------
    columns : float32, (programs, len(OPERATOR_COLUMNS))
    grouped : float64, (programs, 2), optional
        Experts with rows and mean rows per such expert; None for other operators.
    """
    layout, count = _layout(structure), len(sizes)
    if layout is None:
        return np.zeros((count, len(OPERATOR_COLUMNS)), dtype=np.float32), None
    out = np.tile(layout.constant, (count, 1))
    if len(layout.columns):
        out[:, layout.columns] = np.log2(1.0 + sizes[:, layout.sizes])
    if layout.flags is None:
        return out, None
    loads, intermediate = _loads(layout, sizes)
    active, mean, largest = loads["active"] * 1.0, loads["rank_rows"] / loads["active"], loads["largest"]
    figures = [np.log2(1.0 + x) for x in (active, mean, loads["tiles"], loads["tile_rows"])]
    for column, values in enumerate([*figures, np.log2(np.maximum(largest / mean, 1.0))]):
        out[:, _FIRST_LOAD + column] = values
    if intermediate is not None:
        out[:, _AT["size_intermediate"]] = np.log2(1.0 + intermediate)
    grouped = np.empty((count, 2))
    grouped[:, 0], grouped[:, 1] = active, mean
    return out, grouped


def _loads(layout: _Layout, sizes: Array) -> tuple[dict[str, Any], Any]:
    """Loads of experts, and the columns of the first product's weight that the rank holds."""
    single = len(sizes) == 1  # integers are cached by size, arrays are not
    row = sizes[0].tolist() if single else list(sizes.T)
    fields = dict(zip(layout.names, row, strict=True)) | dict(layout.flags or {})
    derived = derived_sizes(layout.operator, fields)
    return derived, derived.get("rank_intermediate")


#: Tile sizes of GEMM kernels. The kernel is not known before the run, so the waves of several sizes are inputs.
TILES = ((32, 32), (64, 64), (128, 64), (128, 128), (256, 128))
FAMILIES = ("gemm", "conv", "attention", "vector", "tir", "moe")
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
_FIRST_DTYPE, _FIRST_OWN = _S[f"dtype_{DTYPES[0]}"], _S[OPERATOR_COLUMNS[0]]
_ONE_HOT_DTYPE = slice(_FIRST_DTYPE, _FIRST_DTYPE + len(DTYPES))
#: log2 of peak flop/s, bytes/s, bytes of last-level cache, compute units: subtracted from leaf magnitudes.
DEVICE_LOGS = ("peak", "bandwidth", "cache", "units")
#: Leaf columns that DEVICE_LOGS are subtracted from, in the same order.
LEAF_DEVICE_RATIOS = tuple(COLUMN[c] for c in ("flops", "leaf_bytes", "leaf_bytes", "spatial_trips"))
#: Columns of :func:`device_numbers`; before VECTOR the matrix peaks, one per dtype.
VECTOR, BANDWIDTH, CACHE, UNITS, GPU, CLOCK, VECTOR_SHARE, BANDWIDTH_SHARE, MATRIX_SHARES = range(
    len(DTYPES), len(DTYPES) + 9
)
_HALF, _NARROW = DTYPES.index("float16"), DTYPES.index("float8_e4m3")
#: Types whose measured share of the peak stands in for another type's.
_SHARE_OF = {"tfloat32": "bfloat16", "float8_e4m3": "bfloat16", "float4_e2m1": "bfloat16", "int4": "bfloat16"}
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
_FLAGS = ("dtype_", "family_", "scaling_", "layout_", "protocol_", "framework_", "backend_")
#: Positions of the inputs that are numbers; the others are flags.
NUMERIC_INPUTS = tuple(
    i
    for i, name in enumerate((*SUMMARY_COLUMNS, *QUERY_COLUMNS))
    if not name.startswith(_FLAGS)
    and name not in ("matrix", "module", "gated", "half_accumulate", "wide_result", "gpu", "has_cache_size")
)


def summarise(encoded: EncodedPrograms) -> Array:
    """Device-independent summary of each program: (programs, len(SUMMARY_COLUMNS)) float32.

    Magnitudes are log2(1 + x). The contraction, extents and accesses are those of the leaf with most flops.
    """
    leaves, totals = encoded.leaves, encoded.totals
    count = len(encoded)
    main = leaves[:, :, COLUMN["flops"]].argmax(axis=1)
    pick = leaves[np.arange(count), main]
    out = np.zeros((count, len(SUMMARY_COLUMNS)))
    out[:, :3] = np.log2(1 + totals[:, [0, 1, 4]])
    out[:, _S["matrix"]] = totals[:, 2]
    out[:, _S["work_fraction"]] = totals[:, 3]
    out[:, _S["leaves"]] = np.log2(leaves.shape[1])
    out[:, _S["blocks"]] = np.log2(1 + totals[:, 5])
    for name, column in (
        ("batch", "contraction_batch"),
        ("m", "contraction_m"),
        ("n", "contraction_n"),
        ("k", "contraction_k"),
        ("align_m", "align_m"),
        ("align_n", "align_n"),
        ("align_k", "align_k"),
        *((f"spatial_{i}", f"spatial_{i}") for i in range(4)),
        *((f"reduce_{i}", f"reduce_{i}") for i in range(3)),
        ("leaf_bytes", "leaf_bytes"),
        ("reuse_0", "read_0_reuse"),
        ("reuse_1", "read_1_reuse"),
        ("run_0", "read_0_run_bytes"),
        ("run_1", "read_1_run_bytes"),
        ("element_bytes", "store_element_bytes"),
        ("operand_bytes_0", "read_0_unique_bytes"),
        ("operand_bytes_1", "read_1_unique_bytes"),
    ):
        out[:, _S[name]] = pick[:, COLUMN[column]]
    dtype = canonical_dtype(encoded.dtype)
    if dtype in DTYPES:
        out[:, _S[f"dtype_{dtype}"]] = 1
    out[:, _S[f"family_{encoded.family}"]] = 1
    out = out.astype(np.float32)
    add_operator_columns(out, slice(None), encoded.structure, encoded.sizes)
    return out


def add_operator_columns(summary: Array, rows: Array | slice, structure: str, sizes: Array | None) -> None:
    """Write what depends on the operators' own fields into rows of ``summary``, which share a structural class.

    A grouped product has one contraction per expert: its ``batch`` and ``m`` are the experts with rows and the mean
    rows of such an expert.
    """
    if not structure or sizes is None:
        return
    columns, grouped = operator_columns(structure, sizes)
    summary[rows, _FIRST_OWN:] = columns
    if grouped is not None:
        summary[rows, _S["batch"]], summary[rows, _S["m"]] = np.log2(1.0 + grouped).T


def device_numbers(device: DeviceSpec) -> Array:
    """Figures of a device for :func:`query_inputs`, float64.

    Matrix peak per dtype, vector peak, bandwidth, cache bytes (NaN: not published), compute units, 1 for a GPU,
    clock in Hz; then the sustained shares of vector peak, of bandwidth, and of each matrix peak by family
    (:mod:`cdmpp.devices.limits`).
    """
    return np.array(
        [
            *(device.peak(dtype, matrix=True) for dtype in DTYPES),
            device.peak("float32", matrix=False),
            device.mem_bandwidth_bytes_per_s,
            device.l2_bytes if device.l2_bytes else np.nan,
            device.compute_units,
            float(device.kind == "gpu"),
            device.clock_hz,
            power_share(device),
            bandwidth_share(device),
            *(matrix_share(device, family, _SHARE_OF.get(dtype, dtype)) for family in RATED for dtype in DTYPES),
        ]
    )


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


def query_inputs(
    summary: Array, device: Array, backend: Array, protocol: Array, framework: Array
) -> tuple[Array, Array, Array]:
    """Inputs of rows (program, device, backend, protocol, framework).

    Parameters
    ----------
    summary : float32, (rows, len(SUMMARY_COLUMNS))
    device : float64, (rows, .) of :func:`device_numbers`
    backend, protocol, framework : int, (rows,)
        Indices into BACKENDS, PROTOCOLS, FRAMEWORKS; framework -1 where not known.

    Returns
    -------
    inputs : float32, (rows, len(SUMMARY_COLUMNS) + len(QUERY_COLUMNS))
    device_logs : float32, (rows, len(DEVICE_LOGS))
    log_reference : float64, (rows,)
        Natural log of the reference in seconds: arithmetic + traffic + the protocol's floor.
    """
    compute, memory = roofline_s(summary, device)
    peak, bandwidth = sustained_rates(summary, device)
    compute, memory = compute * peaks(summary, device) / peak, memory * device[:, BANDWIDTH] / bandwidth
    floor = floor_s(device, protocol)
    reference = compute + memory + floor
    cache, units = device[:, CACHE], device[:, UNITS]
    known = np.isfinite(cache)
    cache = np.where(known, cache, 4e6)
    traffic_log, output_log = summary[:, _S["bytes"]], summary[:, _S["output_elements"]]
    batch, m, n = (np.exp2(summary[:, _S[c]].astype(np.float64)) - 1 for c in ("batch", "m", "n"))
    contracts = m > 0.5
    # Without a contraction, tiles are rows of the output.
    m = np.where(contracts, np.maximum(m, 1), np.exp2(summary[:, _S["output_elements"]].astype(np.float64)))
    n, batch = np.where(contracts, np.maximum(n, 1), 1), np.where(contracts, np.maximum(batch, 1), 1)
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
    columns += [protocol == i for i in range(len(PROTOCOLS))]
    columns += [framework == i for i in range(len(FRAMEWORKS))]
    columns += [backend == i for i in range(len(BACKENDS))]
    # The same arithmetic at the 16-bit rate, which is the rate of weights that are widened before the product.
    half = np.where(summary[:, _S["matrix"]] > 0, compute * peaks(summary, device) / device[:, _HALF], compute)
    operand = np.exp2(summary[:, _S["operand_bytes_1"]].astype(np.float64)) - 1
    columns += [
        device[:, GPU],
        known,
        np.log2(half * 1e6 + 1e-4),
        np.log2(operand / bandwidth * 1e6 + 1e-4),
        np.log2(device[:, _NARROW] / device[:, _HALF]),
    ]
    query = np.stack([np.asarray(c, dtype=np.float32) for c in columns], axis=1)
    rates = np.stack([peak, bandwidth, cache, units], axis=1)
    logs = np.log2(rates) - _CENTRE
    inputs = np.concatenate([summary, query], axis=1).astype(np.float32)
    return inputs, logs.astype(np.float32), np.log(reference)


def stack_devices(devices: Sequence[DeviceSpec]) -> Array:
    """:func:`device_numbers` of several devices, (devices, .)."""
    return np.stack([_remembered(d) for d in devices])


@lru_cache(maxsize=1024)
def _remembered(device: DeviceSpec) -> Array:
    return device_numbers(device)


#: Standard deviation (natural log) of the factors of a virtual device: a common one on both rates, and one each for
#: arithmetic, bandwidth, cache and units.
VIRTUAL_SPEED, VIRTUAL_SHAPE = 0.7, 0.5


def virtual_devices(device: Array, rng: np.random.Generator) -> Array:
    """Virtual devices: real ones with randomly changed figures, as training data for unseen devices.

    With some ten devices per source, a network learns to recognise each by its ratios and treats an unseen one like
    the nearest. A virtual device is a real one made faster or slower, wider or narrower, with the same efficiency:
    the label log(latency / reference) stays. The network then learns what holds in a neighbourhood of the device
    (gain: docs/accuracy.md).

    Parameters
    ----------
    device : float64, (rows, .) of :func:`device_numbers`
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
