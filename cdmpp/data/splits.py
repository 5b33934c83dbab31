"""Train, validation and test: by operator shape, by task, by device.

Splits are data: which part a row falls in depends on nothing but its program (or device), so it is the same
in every table, on every machine and in every version of this package. Whole networks are held out by
:mod:`cdmpp.data.networks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.labels import U64, Mask, hash_rows, splitmix64
from cdmpp.data.table import MeasurementTable, OperatorBlock
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, UnknownDeviceError
from cdmpp.programs.collectives import COLLECTIVES
from cdmpp.programs.operators import operator_family

TRAIN, VALIDATION, TEST, UNUSED = 0, 1, 2, -1
PART_NAMES = {TRAIN: "train", VALIDATION: "validation", TEST: "test"}
TEST_SHARE, VALIDATION_SHARE = 0.10, 0.05

# The columns that make a shape, by family. GEMMs share (m, n, k) over operators, batches and sources; a
# convolution shares its forward problem over directions; all of them over element types. They are part of the
# split's definition: a change here moves rows between the parts of every published figure.
_SHAPE = {
    "gemm": ("m", "n", "k"),
    "conv": (
        "n",
        "c_in",
        "h",
        "w",
        "c_out",
        "kh",
        "kw",
        "stride_h",
        "stride_w",
        "pad_h",
        "pad_w",
        "dil_h",
        "dil_w",
        "groups",
    ),
    "attention": ("batch", "q_len", "past_len", "heads", "kv_heads", "head_dim"),
    "moe": ("tokens", "hidden", "intermediate", "experts", "topk", "tp", "ep"),
}
#: Operators with other sizes than the rest of their family. Latent attention shares its shapes over kernel and module.
_LATENT = ("batch", "q_len", "past_len", "heads")
_OWN_SHAPE = {
    "mla_prefill": _LATENT,
    "mla_decode": _LATENT,
    "attention_mixed": ("q_len", "past_len", "decodes", "decode_past_len", "heads", "kv_heads", "head_dim"),
    "grouped_gemm": ("groups", "rows", "n", "k"),
}
_SEED = {"gemm": 1, "conv": 2, "attention": 3, "vector": 4, "moe": 6}
_TVM_SEED = 5
#: Collectives share (operator, bytes) over devices, links, ranks, libraries and modes: one seed for each operator.
_COLLECTIVE_SEED = 16

#: Near twins, held out together: one in training would make the other an easy test. A device that stands in
#: no group is a group of its own.
DEVICE_GROUPS: dict[str, tuple[str, ...]] = {
    "a100": (
        "a100-pcie-40gb",
        "a100-sxm4-40gb",
        "a100-pcie-80gb",
        "a100-sxm4-80gb",
        "a800-sxm4-80gb",
        "a800-pcie-80gb",
    ),
    "h100": ("h100-pcie", "h100-sxm", "h100-nvl", "h200", "h200-nvl", "h800", "gh200"),
    "b200": ("b200", "gb200", "b300", "gb300"),
    "v100": ("v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm2-16gb", "v100-sxm2-32gb", "titan-v"),
    "p100": ("p100-pcie-16gb", "p100-sxm2-16gb"),
    "titan-x-pascal": ("titan-x-pascal", "titan-xp", "gtx-1080-ti"),
    "titan-x-maxwell": ("titan-x-maxwell", "m40"),
    "rtx-pro-6000": ("rtx-pro-6000-server", "rtx-pro-6000-max-q"),
    "l40s": ("l40", "l40s", "rtx-6000-ada"),
    "a40": ("a40", "rtx-a6000"),
    "mi210": ("mi210", "mi250-gcd", "mi250x-gcd"),
    "mi300x": ("mi300x", "mi325x", "gfx942-tensile"),
    "mi355x": ("mi350x", "mi355x", "gfx950-mi350x-mi355x"),
    "navi21": ("rx-6800-xt", "gfx1030-navi21"),
    "vega10": ("rx-vega-56", "mi25", "vega-frontier-edition", "gfx900-vega10"),
    "vega20": ("mi50", "mi60", "gfx906-vega20", "gfx906-mi50-mi60"),
}


def shape_hash(block: OperatorBlock) -> U64:
    """Hash of each operator's shape: splitmix64 over the columns of its family (see the module's source).

    Vector operators hash every size in declaration order, so that equal [rows, cols] fall together whatever
    the operator.
    """
    family = operator_family(block.operator)
    if family == "collective":
        return hash_rows(_COLLECTIVE_SEED + COLLECTIVES.index(block.operator), [block.sizes["bytes"]])
    names = (
        _OWN_SHAPE.get(block.operator)
        or _SHAPE.get(family)
        or [name for name in block.sizes if name not in block.flags]
    )
    return hash_rows(_SEED[family], [block.sizes[name] for name in names])


def program_parts(
    table: MeasurementTable, *, test: float = TEST_SHARE, validation: float = VALIDATION_SHARE
) -> NDArray[np.int8]:
    """Part of every program, by key: ``TEST``, ``VALIDATION`` or ``TRAIN``.

    The hash, as a fraction u of 2^64, decides: u < test, u < test + validation, or the rest. A TVM program
    hashes its task (workload), so that all schedules of one workload fall together; without a task, itself.
    """
    hashes = np.zeros(table.n_programs, dtype=np.uint64)
    for block in table.programs:
        hashes[block.row_index] = shape_hash(block)
    tvm = table.tvm
    for position, (digest, task) in enumerate(zip(tvm.hashes, tvm.tasks, strict=True)):
        hashes[tvm.first_key + position] = _text_hash(task or digest)
    u = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53
    parts = np.full(table.n_programs, TRAIN, dtype=np.int8)
    parts[u < test + validation] = VALIDATION
    parts[u < test] = TEST
    return parts


def split_by_shape(
    table: MeasurementTable, *, test: float = TEST_SHARE, validation: float = VALIDATION_SHARE
) -> NDArray[np.int8]:
    """Part of every row by the shape of its operator; ``UNUSED`` for rows without a program."""
    parts = program_parts(table, test=test, validation=validation)
    return np.append(parts, np.int8(UNUSED))[table.program_key]


def device_group(name: str, specs: Mapping[str, DeviceSpec] | None = None) -> str:
    """Group of near twins that a device belongs to; its canonical name if it is in none.

    ``name`` may also be a group of :data:`DEVICE_GROUPS` itself, or a device whose specification records
    bring (``specs``, see :attr:`MeasurementTable.device_specs`).
    """
    if name in DEVICE_GROUPS:
        return name
    canonical: str = lookup(name, specs).name
    return next((group for group, members in DEVICE_GROUPS.items() if canonical in members), canonical)


def split_by_device(table: MeasurementTable, holdout: Sequence[str]) -> tuple[Mask, Mask]:
    """Hold devices out, together with their near twins.

    Parameters
    ----------
    holdout : sequence of str
        Devices, or groups of :data:`DEVICE_GROUPS`.

    Returns
    -------
    train, test : bool arrays
        ``test``: rows of the named devices' groups; ``train``: rows of all other known devices. Rows of
        unknown devices are in neither.
    """
    groups = {device_group(name, table.device_specs) for name in holdout}
    part = np.full(len(table.device.names) + 1, UNUSED, dtype=np.int8)
    for code, name in enumerate(table.device.names):
        with suppress(UnknownDeviceError):
            part[code] = TEST if device_group(name, table.device_specs) in groups else TRAIN
    rows = part[table.device.codes]
    return rows == TRAIN, rows == TEST


def assert_disjoint(table: MeasurementTable, parts: NDArray[np.int8]) -> None:
    """Make sure that no program occurs in two parts.

    Raises
    ------
    DataError
        A program hash occurs in two parts; the message names one.
    """
    seen: dict[str, int] = {}
    hashes = table.program_hashes
    for part, name in PART_NAMES.items():
        keys = np.unique(table.program_key[(parts == part) & (table.program_key >= 0)])
        for digest in (hashes[key] for key in keys):
            if seen.setdefault(digest, part) != part:
                raise DataError(
                    f"program {digest} is in {PART_NAMES[seen[digest]]} and in {name}",
                    hint="split by shape or by network, never by row",
                )


def _text_hash(text: str) -> np.uint64:
    """FNV-1a of the text, then splitmix64: the same everywhere, unlike ``hash()``."""
    state = 0xCBF29CE484222325 ^ _TVM_SEED
    for byte in text.encode():
        state = ((state ^ byte) * 0x100000001B3) % 2**64
    return np.uint64(splitmix64(np.array([state], dtype=np.uint64))[0])
