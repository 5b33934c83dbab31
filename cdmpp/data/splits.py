"""Train, validation and test: by operator shape, by task, by device, by network; and sealed networks.

Splits are data: which part a row falls in depends on nothing but its program (or device), so it is the same
in every table, on every machine and in every version of this package. No task of a test network is trained on,
whatever other networks use it.

Sealed networks are programs that no training reads, chosen by a rule from a stated list of networks. ``splits.parquet``
names the sealed networks and the list that they were chosen from. A later collection with more networks does not change
them: the list is stored and is never made again from the records.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

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
#: Provenance column of records: the networks that a program's task occurs in, "resnet18;vgg11".
NETWORKS = "networks"
#: Name of the split, and fields of the metadata: the networks, and the list that they were chosen from.
SEALED, SEALED_FROM = "sealed", "sealed_from"
COUNT = 4
_RULE = "sealed-1:"

# The columns that make a shape, by family. GEMMs share (m, n, k) over operators, batches and sources; a
# convolution shares its forward problem over directions; all of them over element types. They are part of the
# split's definition: a change here moves rows between the parts of every published figure.
_SHAPE = {
    "gemm": ("m", "n", "k"),
    "conv": (
        *("n", "c_in", "h", "w", "c_out", "kh", "kw"),
        *("stride_h", "stride_w", "pad_h", "pad_w", "dil_h", "dil_w", "groups"),
    ),
    "attention": ("batch", "q_len", "past_len", "heads", "kv_heads", "head_dim"),
    "moe": ("tokens", "hidden", "intermediate", "experts", "topk", "tp", "ep"),
}
#: Operators with other sizes than the rest of their family. Latent attention shares its shapes over kernel and module.
_LATENT = ("batch", "q_len", "past_len", "heads")
_OWN_SHAPE = {
    "mla_prefill": _LATENT,
    "mla_decode": _LATENT,
    "attention_backward": ("batch", "q_len", "heads", "kv_heads", "head_dim"),
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
        *("a100-pcie-40gb", "a100-sxm4-40gb", "a100-pcie-80gb", "a100-sxm4-80gb"),
        *("a800-sxm4-80gb", "a800-pcie-80gb"),
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
    """Hold devices, or groups of :data:`DEVICE_GROUPS`, out, together with their near twins: rows of all other known
    devices, and rows of the groups. Rows of unknown devices are in neither."""
    groups = {device_group(name, table.device_specs) for name in holdout}
    part = np.full(len(table.device.names) + 1, UNUSED, dtype=np.int8)
    for code, name in enumerate(table.device.names):
        with suppress(UnknownDeviceError):
            part[code] = TEST if device_group(name, table.device_specs) in groups else TRAIN
    rows = part[table.device.codes]
    return rows == TRAIN, rows == TEST


def assert_disjoint(table: MeasurementTable, parts: NDArray[np.int8]) -> None:
    """Raise a DataError if a program occurs in two parts."""
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


def network_names(table: MeasurementTable) -> list[str]:
    """Networks that the rows name, sorted."""
    column = table.provenance.get(NETWORKS)
    return sorted({name for text in column.used() for name in split_names(text)}) if column else []


def split_names(text: str) -> list[str]:
    """Names of a cell of the column."""
    return [name for name in text.split(";") if name]


def without_sizes(name: str) -> str:
    """A network whatever its sizes: "vit" of "vit:image=32"."""
    return name.partition(":")[0].strip()


def task_of(table: MeasurementTable) -> list[str]:
    """Unit of the split for each program key: a task, or a program without a task."""
    names = list(table.program_hashes)
    first = table.tvm.first_key
    names[first:] = [task or name for task, name in zip(table.tvm.tasks, names[first:], strict=True)]
    return names


def networks_of(table: MeasurementTable) -> list[frozenset[str]]:
    """Networks of every program, by key: those of all records of its task."""
    column = table.provenance.get(NETWORKS)
    if column is None:
        return [frozenset()] * table.n_programs
    unit = task_of(table)
    networks: defaultdict[str, set[str]] = defaultdict(set)
    named = np.flatnonzero(table.program_key >= 0)
    pairs = np.unique(np.stack([table.program_key[named], column.codes[named]], axis=1), axis=0)
    for key, label in pairs.tolist():
        networks[unit[key]].update(split_names(column.names[label]))
    return [frozenset(networks[name]) for name in unit]


def network_parts(
    table: MeasurementTable, test_networks: Collection[str], *, validation: float = VALIDATION_SHARE
) -> NDArray[np.int8]:
    """Part of every program, by key, when whole networks are held out.

    A test network is held out in all its sizes: "vit" takes "vit:image=32" along, and the other way round. The programs
    of every task that occurs in a test network are the test part, even where other networks use the task; of the rest,
    :func:`cdmpp.data.splits.program_parts` puts ``validation`` aside by the task's hash; programs of no network are in
    no part. A test network that no record names is an error.
    """
    networks, known = networks_of(table), network_names(table)
    held = {without_sizes(name) for name in test_networks}
    unknown = sorted(held - {without_sizes(name) for name in known})
    if unknown:
        raise DataError(
            f"no record is of network {', '.join(unknown)}",
            hint=f"names in the records' column {NETWORKS!r}: {', '.join(known) or 'none'}",
        )
    parts = program_parts(table, test=0.0, validation=validation)
    parts[[not names for names in networks]] = UNUSED
    parts[[not held.isdisjoint(map(without_sizes, names)) for names in networks]] = TEST
    return parts


def assert_tasks_apart(table: MeasurementTable, parts: NDArray[np.int8]) -> None:
    """Raise a DataError if a task is in two parts."""
    seen: dict[str, int] = {}
    for task, part in zip(table.tvm.tasks, parts[table.tvm.first_key :].tolist(), strict=True):
        if task and part in PART_NAMES and seen.setdefault(task, part) != part:
            raise DataError(
                f"task {task} is in {PART_NAMES[seen[task]]} and in {PART_NAMES[part]}",
                hint="all schedules of a task belong to one part",
            )


def sealed_names(networks: Iterable[str], count: int = COUNT) -> tuple[str, ...]:
    """The ``count`` networks with the smallest sha256("sealed-1:" + name), sorted; sizes of a network do not count. A
    count that leaves no network to train on is an error."""
    names = {without_sizes(name) for name in networks}
    if not 1 <= count < len(names):
        raise DataError(
            f"cannot seal {count} of {len(names)} networks", hint=f"from 1 to {len(names) - 1}, so that one is left"
        )
    by_hash = sorted(names, key=lambda name: hashlib.sha256((_RULE + name).encode()).hexdigest())
    return tuple(sorted(by_hash[:count]))


def check_sealed(about: Mapping[str, Any]) -> None:
    """Raise a DataError if the sealed networks of a split file do not follow from the list that it states."""
    names = tuple(about.get(SEALED, ()))
    if names and names != sealed_names(about.get(SEALED_FROM, ()), len(names)):
        raise DataError(
            f"sealed networks {', '.join(names)} do not follow from the stated list of networks",
            hint="restore splits.parquet: the sealed networks and their list must not be edited",
        )


def sealed_programs(
    table: MeasurementTable, names: Collection[str], *, tasks: Collection[str] = ()
) -> NDArray[np.bool_]:
    """Mask over program keys: every program of a task that a sealed network, in any size, uses. ``tasks``: tasks, or
    hashes of programs without a task, that are sealed whatever networks the records name."""
    held, unit = {without_sizes(name) for name in names}, task_of(table)
    users = [not held.isdisjoint(map(without_sizes, networks)) for networks in networks_of(table)]
    chosen = frozenset(tasks)
    return np.array([by_name or task in chosen for by_name, task in zip(users, unit, strict=True)], dtype=np.bool_)
