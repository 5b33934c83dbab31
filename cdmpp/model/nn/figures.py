"""Figures of a program, and of a device, on their own: what the network's inputs are computed from.

Some summary columns come from an operator's own fields: types, scales, sizes, loads of experts. The leaves of a program
give its loops and accesses. What a kernel does with scales, cached keys or the rows of an expert does not follow from
them as directly, so the fields are inputs themselves. They are read from
:attr:`cdmpp.features.encode.EncodedPrograms.structure` and ``sizes``; the columns of other programs are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cdmpp.devices.limits import bandwidth_share, matrix_share, power_share, unit_limits
from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.encode import EncodedPrograms
from cdmpp.features.schema import COLUMN
from cdmpp.model.nn.inputs import DTYPES, LOADS, OPERATOR_COLUMNS, RATED, SIZES, SUMMARY_COLUMNS
from cdmpp.programs.elements import DTYPE_BYTES, canonical_dtype
from cdmpp.programs.operators import derived_sizes, operator_family, operator_types
from cdmpp.programs.templates import size_names

Array = np.ndarray[Any, np.dtype[Any]]

_AT = {name: i for i, name in enumerate(OPERATOR_COLUMNS)}
_FIRST_LOAD = _AT[f"load_{LOADS[0]}"]
_S = {name: i for i, name in enumerate(SUMMARY_COLUMNS)}
_FIRST_OWN = _S[OPERATOR_COLUMNS[0]]
#: A grouped product has the sizes of a layer of experts under other names.
_GROUPED = {"groups": "experts", "rows": "tokens", "n": "intermediate", "k": "hidden"}
#: Families whose sizes are inputs. The extents of the others are in the leaves.
_SIZED = ("attention", "moe")


@dataclass(frozen=True)
class _Layout:
    """Columns that the operators of one structural class share, and places of their sizes."""

    constant: Array  # float32, (len(OPERATOR_COLUMNS),)
    columns: Array  # of the sizes
    sizes: Array  # their positions in :attr:`EncodedPrograms.sizes`
    names: tuple[str, ...]  # size names of the operator
    operator: str
    flags: Mapping[str, str] | None  # structural fields, for the loads of experts; None for other operators


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
    """Columns of operators that share a structural class: float32, (programs, len(OPERATOR_COLUMNS)).

    ``sizes``: (programs, size names of the operator) int64. The second result, float64, (programs, 2): experts with
    rows and mean rows per such expert; None for other operators.
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


#: Types whose measured share of the peak stands in for another type's.
_SHARE_OF = {"tfloat32": "bfloat16", "float8_e4m3": "bfloat16", "float4_e2m1": "bfloat16", "int4": "bfloat16"}


def device_numbers(device: DeviceSpec) -> Array:
    """Figures of a device for :func:`cdmpp.model.nn.inputs.query_inputs`, float64.

    Matrix peak per dtype, vector peak, bandwidth, cache bytes (NaN: not published), compute units, 1 for a GPU,
    clock in Hz; then the sustained shares of vector peak, of bandwidth, and of each matrix peak by family, and the
    limits of a compute unit (:mod:`cdmpp.devices.limits`).
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
            *_unit(device),
        ]
    )


#: Registers that ROCm's compiler gives a thread where the kernel does not state its block: those of 1,024 threads.
ROCM_REGISTERS = 64


def _unit(device: DeviceSpec) -> tuple[float, ...]:
    """Figures of one compute unit, as :data:`cdmpp.model.nn.inputs.UNIT` names them."""
    limits = unit_limits(device)
    per_thread = ROCM_REGISTERS if device.vendor == "AMD" else limits.registers_per_thread
    shared, registers = limits.shared_bytes, limits.registers
    return (limits.warp, limits.threads, limits.blocks, shared, registers, per_thread)


def stack_devices(devices: Sequence[DeviceSpec]) -> Array:
    """:func:`device_numbers` of several devices, (devices, .)."""
    return np.stack([_remembered(d) for d in devices])


@lru_cache(maxsize=1024)
def _remembered(device: DeviceSpec) -> Array:
    return device_numbers(device)
