"""Measurement tables as training data: programs encoded once, one row per measurement, and the split into parts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.ceilings import check_ceilings, derive_ceilings
from cdmpp.data.splits import (
    PART_NAMES,
    TEST,
    TRAIN,
    UNUSED,
    VALIDATION,
    assert_disjoint,
    assert_tasks_apart,
    network_names,
    network_parts,
    networks_of,
    program_parts,
    without_sizes,
)
from cdmpp.data.summary import fingerprint
from cdmpp.data.table import UNSUPPORTED, MeasurementTable
from cdmpp.devices.limits import TYPICAL
from cdmpp.devices.spec import Ceilings, DeviceSpec
from cdmpp.errors import DataError, InvalidProgramError
from cdmpp.features.encode import TIR, encode_many, encode_shapes
from cdmpp.features.schedule import SCHEDULE_WIDTH
from cdmpp.features.schema import WIDTH
from cdmpp.model.nn.figures import stack_devices, summarise
from cdmpp.model.nn.rows import ProgramStore
from cdmpp.programs.collectives import is_collective
from cdmpp.programs.elements import types_label
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS, framework_code, implementation_of
from cdmpp.train.config import DataConfig
from cdmpp.train.job import LabelledRows

Array = np.ndarray[Any, np.dtype[Any]]

logger = logging.getLogger(__name__)


def choose_parts(table: MeasurementTable, data: DataConfig) -> NDArray[np.int8]:
    """Part per program key (see :mod:`cdmpp.data.splits`).

    ``split = "shape"``: by the hash of an operator's shape or of a TVM program's task; ``"network"``: see
    :func:`cdmpp.data.splits.network_parts`. A task in two parts is a DataError.
    """
    if data.split == "shape":
        parts = program_parts(table, test=data.test_share, validation=data.validation_share)
    else:
        parts = network_parts(table, data.test_networks, validation=data.validation_share)
    assert_tasks_apart(table, parts)
    return parts


def parts_of_rows(table: MeasurementTable, data: DataConfig, rows: NDArray[np.int64]) -> tuple[NDArray[np.int8], str]:
    """Part per program key, (programs,), such that no part of these rows is empty; and what is split: "task" (shapes of
    operators, tasks of TVM programs), "network" or "program".

    ``split = "shape"`` leaves a part of few tasks empty. Then single programs are split by their hash, and a warning is
    logged. ``rows`` (n,) are of devices that are not held out, with a program and a latency.
    """
    parts = choose_parts(table, data)
    empty = _empty_parts(parts, table.program_key[rows])
    if not empty:
        return parts, "network" if data.split == "network" else "task"
    if data.split == "network":
        raise DataError(
            f"the {' and the '.join(empty)} part is empty with data.test_networks = {', '.join(data.test_networks)}",
            hint="measure more networks, raise data.validation_share, or use data.split = 'shape'",
        )
    parts = _parts_of_few(table, data, rows)
    counts = {
        name: int(np.isin(table.program_key[rows], np.flatnonzero(parts == part)).sum())
        for part, name in PART_NAMES.items()
    }
    logger.warning(
        "the records have too few tasks for a %s part: split by program instead, %s rows. The errors below are about "
        "other programs of trained tasks, not about new tasks",
        " and a ".join(empty),
        ", ".join(f"{name} {count:,}" for name, count in counts.items()),
    )
    return parts, "program"


def _empty_parts(parts: NDArray[np.int8], keys: NDArray[np.int64]) -> list[str]:
    present = set(parts[keys].tolist())
    return [name for part, name in PART_NAMES.items() if part not in present]


def _parts_of_few(table: MeasurementTable, data: DataConfig, rows: NDArray[np.int64]) -> NDArray[np.int8]:
    """Parts by rank of the programs' hashes; test and validation have at least one program each."""
    hashes = table.program_hashes
    digests = sorted({hashes[key] for key in np.unique(table.program_key[rows]).tolist()})
    if len(digests) < len(PART_NAMES):
        raise DataError(
            f"the records have {len(digests)} usable programs: training, validation and test need one each"
            + _unusable(table),
            hint="measure more programs, at least some dozens; `cdmpp data info FILE` counts them. `cdmpp adapt` "
            "adapts a trained model by few measurements",
        )
    test = max(1, round(data.test_share * len(digests)))
    validation = max(1, round(data.validation_share * len(digests)))
    part_of = dict.fromkeys(digests, TRAIN)
    part_of |= dict.fromkeys(digests[:test], TEST) | dict.fromkeys(digests[test : test + validation], VALIDATION)
    return np.array([part_of.get(digest, UNUSED) for digest in hashes], dtype=np.int8)


def _unusable(table: MeasurementTable) -> str:
    """Numbers of rows that cannot be trained on, by reason, and what each reason means."""
    counts = Counter(table.unsupported.counts()) + Counter(table.excluded.counts())
    reasons = [
        f"{count:,} {reason} ({UNSUPPORTED.get(reason, 'left out by a check of the times')})"
        for reason, count in counts.most_common()
        if reason
    ]
    devices = sorted(set(table.device.array()[table.unsupported.is_("unknown_device")].tolist()))
    needed = (
        f". For {', '.join(devices[:5]) or 'a device without a name'}: write a name of `cdmpp devices` in the column "
        "device, train on records with a column device_spec (docs/data.md), or use `cdmpp adapt --device SPEC.toml`"
    )
    return f"; unusable of {len(table):,} rows: {', '.join(reasons)}{needed * bool(devices)}" if reasons else ""


def encode_table(table: MeasurementTable, *, schedule: bool = False) -> tuple[ProgramStore, dict[int, str]]:
    """Encode every distinct program of a table, TVM programs with schedule columns if ``schedule``; and the messages of
    TVM programs that cannot be encoded, by key, which are not in the store."""
    store = ProgramStore(table.n_programs, WIDTH + SCHEDULE_WIDTH if schedule else WIDTH)
    failed: dict[int, str] = {}
    for block in table.programs:
        if is_collective(block.operator):
            continue
        for rows, encoded in encode_shapes(block.operator, block.dtype, block.flags, block.sizes):
            store.add(block.row_index[rows], encoded, summarise(encoded))
    for key, outcome in enumerate(encode_many(table.tvm.texts, schedule=schedule), table.tvm.first_key):
        if isinstance(outcome, InvalidProgramError):
            failed[key] = str(outcome)
        else:
            store.add(np.array([key]), outcome, summarise(outcome))
    store.finish()
    return store, failed


@dataclass(frozen=True)
class MeasuredRows(LabelledRows):
    """Measured queries as arrays of one length n; ``device`` is an index into :attr:`Dataset.devices`."""

    part: Array  # int8: 0 train, 1 validation, 2 test, -1 in no part
    source: Array  # index into :attr:`Dataset.sources`
    op: Array  # index into :attr:`Dataset.ops`
    report: Array  # whether the row passes the filter of the source's authors


#: Operator, dtype, weight_dtype and scaling of a program; None where the operator has no such field or it is unset.
ProgramTypes = tuple[str, str, str | None, str | None]


@dataclass(frozen=True)
class Dataset:
    """Programs, rows and devices of a training run."""

    store: ProgramStore
    rows: MeasuredRows
    devices: tuple[DeviceSpec, ...]
    sources: tuple[str, ...]
    ops: tuple[str, ...]
    #: Kinds of programs as (operator, dtype), and the index of the kind per program key.
    kinds: tuple[tuple[str, str], ...]
    kind: Array
    #: Task per program key, -1 for a program without a task; schedules of one task are ranked.
    task: Array
    #: :func:`cdmpp.data.summary.fingerprint` of the rows' table.
    fingerprint: str
    #: Networks per program key, without their sizes; empty where the records name no networks.
    networks: tuple[frozenset[str], ...] = ()
    #: Operator, dtype, weight_dtype and scaling of programs, and the index into them per program key.
    types: tuple[ProgramTypes, ...] = ()
    type_of: Array | None = None
    #: What the parts consist of: "task", "network" or "program" (:func:`cdmpp.train.dataset.parts_of_rows`).
    split: str = "task"
    #: Part per program key, also of programs without a row here.
    part_of: Array | None = None

    @property
    def device_matrix(self) -> Array:
        """:func:`cdmpp.model.nn.figures.stack_devices` of the devices."""
        return stack_devices(self.devices)

    @property
    def composed(self) -> Array:
        """Rows that eager PyTorch composes of several kernels, (rows,) bool. Their framework says so."""
        kinds = np.array([implementation_of(operator, "pytorch") == "composed" for operator, _ in self.kinds])
        return np.asarray(kinds[self.kind[self.rows.program]] & (self.rows.framework == framework_code("pytorch")))

    def group(self, rows: MeasuredRows) -> Array:
        """Task and device of rows as one number; -1 for programs without a task."""
        task = self.task[rows.program].astype(np.int64)
        return np.where(task < 0, -1, task * len(self.devices) + rows.device)


def code(names: Sequence[str], known: Sequence[str]) -> Array:
    """Index of each name in ``known``, -1 for an unknown name."""
    index = {name: i for i, name in enumerate(known)}
    return np.array([index.get(name, -1) for name in names], dtype=np.int16)


def make_dataset(
    table: MeasurementTable, data: DataConfig | None = None, *, schedule: bool = False, every_part: bool = False
) -> Dataset:
    """Encode a table's programs and turn its trainable rows into numbers.

    ``data`` has the split of the rows; default: by the hash of the shape or task. ``schedule``: TVM programs with their
    schedule's columns (``NetworkConfig.schedule``). ``every_part``: no part may be empty; few tasks are split by
    program (:func:`cdmpp.train.dataset.parts_of_rows`). A program in two parts is a DataError.
    """
    store, failed = encode_table(table, schedule=schedule)
    keep = table.trainable & ~table.collective & np.isfinite(table.latency_s) & (table.latency_s > 0)
    if failed:
        keep &= ~np.isin(table.program_key, list(failed))
    rows = np.flatnonzero(keep)
    used = table.select(rows)
    device_names = sorted(set(used.device.array().tolist()))
    data = data or DataConfig()
    if every_part:
        parts, split = parts_of_rows(table, data, rows[~np.isin(used.device.array(), data.holdout_devices)])
    else:
        parts, split = choose_parts(table, data), "network" if data.split == "network" else "task"
    assert_disjoint(used, parts[used.program_key])
    report = np.ones(len(rows), dtype=bool) if used.row_filter is None else np.asarray(used.row_filter)
    kinds = sorted({(b.operator, types_label(b.dtype, b.flags)) for b in table.programs} | {("tir", "float32")})
    kind = np.full(table.n_programs, kinds.index(("tir", "float32")), dtype=np.int16)
    for block in table.programs:
        kind[block.row_index] = kinds.index((block.operator, types_label(block.dtype, block.flags)))
    types, type_of = program_types(table)
    sources, ops = sorted(set(used.source.names)), sorted(set(used.op.names))
    # Ceilings are fitted to training rows, so a held-out device has none.
    trained = parts[table.program_key] == 0
    for name in data.holdout_devices:
        trained &= ~table.device.is_(name)
    device_codes = code(used.device.names, device_names)
    return Dataset(
        store=store,
        rows=MeasuredRows(
            program=used.program_key,
            device=device_codes[used.device.codes].astype(np.int32),
            backend=code(used.backend.names, BACKENDS)[used.backend.codes],
            protocol=code(used.protocol.names, PROTOCOLS)[used.protocol.codes],
            framework=code(used.launcher.names, FRAMEWORKS)[used.launcher.codes],
            log_latency=np.log(used.latency_s),
            part=parts[used.program_key],
            source=code(used.source.names, sources)[used.source.codes],
            op=code(used.op.names, ops)[used.op.codes],
            report=report,
        ),
        devices=tuple(_with_ceilings(table, name, trained) for name in device_names),
        sources=tuple(sources),
        ops=tuple(ops),
        kinds=tuple(kinds),
        kind=kind,
        task=task_codes(table),
        fingerprint=fingerprint(table),
        networks=tuple(frozenset(map(without_sizes, names)) for names in networks_of(table))
        if network_names(table)
        else (),
        types=types,
        type_of=type_of,
        split=split,
        part_of=parts,
    )


def program_types(table: MeasurementTable) -> tuple[tuple[ProgramTypes, ...], Array]:
    """Distinct types of a table's programs, and the index of its types per program key."""
    index: dict[ProgramTypes, int] = {(TIR, "float32", None, None): 0}
    type_of = np.zeros(table.n_programs, dtype=np.int16)
    for block in table.programs:
        weight, scaling = (block.flags.get(name) for name in ("weight_dtype", "scaling"))
        key = (block.operator, block.dtype, str(weight) if weight else None, str(scaling) if scaling else None)
        type_of[block.row_index] = index.setdefault(key, len(index))
    return tuple(index), type_of


def _with_ceilings(table: MeasurementTable, name: str, rows: Array) -> DeviceSpec:
    """A device with ceilings derived from these rows; existing ceilings are kept."""
    spec = table.device_spec(name)
    if spec.kind != "gpu" or spec.sustained is not None:
        return spec
    ceilings = check_ceilings(derive_ceilings(table, name, rows), spec)[0]
    rates = {k: v for k, v in ceilings.figures().items() if k in TYPICAL}
    return spec.model_copy(update={"sustained": Ceilings(**rates, source="training rows")}) if rates else spec


def task_codes(table: MeasurementTable) -> Array:
    """Task number per program key; -1 for operators and for programs without a task."""
    codes = np.full(table.n_programs, -1, dtype=np.int64)
    names = {name: i for i, name in enumerate(sorted(set(table.tvm.tasks) - {""}))}
    if names:
        codes[table.tvm.first_key :] = [names.get(task, -1) for task in table.tvm.tasks]
    return codes
