"""The columnar measurement table that training and evaluation read, its operators, and tables put one below the other.

The models in :mod:`cdmpp.programs.operators` stay the one definition of an operator: ranges and defaults of integer
fields are read from them, and a test compares :func:`contradictory` with ``spec.check()`` on random sizes of every
operator.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeAlias

import annotated_types
import numpy as np
from numpy.typing import NDArray

from cdmpp.data.arrow import pa
from cdmpp.data.device_specs import merge_specs
from cdmpp.data.labels import Labels, Mask, PackedTexts, distinct_rows, packed_if_any
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.programs.collectives import is_collective
from cdmpp.programs.elements import MAX_ELEMENTS, types_label
from cdmpp.programs.operators import OperatorSpec, make_operator, operator_types
from cdmpp.programs.query_options import launcher_of
from cdmpp.programs.vectors import output_hw

Sizes = Mapping[str, NDArray[np.int64]]
Flag: TypeAlias = bool | int | str | None
Flags: TypeAlias = Mapping[str, Flag]
Int64: TypeAlias = NDArray[np.int64]
Float64: TypeAlias = NDArray[np.float64]
#: Why a row cannot be predicted; the code stands in ``MeasurementTable.unsupported``.
UNSUPPORTED = {
    "unknown_operator": "the operator is not one of cdmpp.programs.operator_types()",
    "unknown_dtype": "the operator does not exist for the element type",
    "missing_size": "a size that the operator needs is null or its column is absent",
    "invalid_size": "a size is not a whole number or out of its range",
    "contradictory_sizes": "the sizes contradict each other (groups, heads, kernel size) or are absurd",
    "unknown_device": "the device is not in cdmpp.devices, and the record brings no specification",
    "invalid_device": "the record's device specification cannot be read, or is one of another device",
    "unknown_setting": "backend, protocol, framework or implementation is not supported by cdmpp",
    "missing_program": "the record has no program text, or one that cannot be read",
    "inexpressible_schedule": "no program is built of the configuration or schedule; column inexpressible says why",
    "unknown_workload": "the workload of a schedule is not known; column inexpressible says why",
}
TEXT_COLUMNS = ("op", "device_name", "device", "backend", "protocol", "framework", "implementation", "source")


@dataclass(frozen=True, eq=False)
class OperatorBlock:
    """Sizes of many operators that share operator, element type and structural fields."""

    operator: str
    dtype: str
    flags: Flags  # every structural field of the operator's specification, e.g. ``direction``, ``bias``, ``inputs``
    sizes: Mapping[str, Int64]  # every integer field, defaults filled in, as ``OperatorSpec.sizes()`` names them
    # In :attr:`MeasurementTable.specs` the rows of the table; in :attr:`MeasurementTable.programs` the program keys,
    # which are consecutive.
    row_index: Int64

    def __len__(self) -> int:
        return len(self.row_index)

    @property
    def group(self) -> tuple[Any, ...]:
        """Properties that all operators of the block share, as a dictionary key."""
        return (self.operator, self.dtype, *sorted((name, str(value)) for name, value in self.flags.items()))

    @property
    def given_flags(self) -> dict[str, Any]:
        """The structural fields that are not None."""
        return {name: value for name, value in self.flags.items() if value is not None}

    def fields(self, position: int) -> dict[str, Any]:
        """The fields of one operator, as :func:`cdmpp.programs.operators.make_operator` takes them."""
        sizes = {name: int(column[position]) for name, column in self.sizes.items()}
        return {"operator": self.operator, "dtype": self.dtype, **self.given_flags, **sizes}

    def spec(self, position: int) -> OperatorSpec:
        """One operator as a checked specification."""
        return make_operator(self.fields(position))

    def take(self, positions: NDArray[Any]) -> OperatorBlock:
        """Some operators of the block."""
        sizes = {name: column[positions] for name, column in self.sizes.items()}
        return replace(self, sizes=sizes, row_index=self.row_index[positions])

    def texts(self) -> list[str]:
        """Canonical JSON of every operator: what ``OperatorSpec.hash()`` hashes."""
        shared = {"operator": self.operator, "dtype": self.dtype, **self.given_flags}
        names = sorted({*shared, *self.sizes})
        values = ("%d" if n in self.sizes else json.dumps(shared[n]).replace("%", "%%") for n in names)
        template = "{" + ",".join(f'"{n}":{v}' for n, v in zip(names, values, strict=True)) + "}"
        columns = [self.sizes[n].tolist() for n in names if n in self.sizes]
        return [template % row for row in zip(*columns, strict=True)]

    def hashes(self) -> list[str]:
        """``OperatorSpec.hash()`` of every operator, without building the specifications."""
        return [hashlib.sha256(b"operator\0" + t.encode()).hexdigest()[:32] for t in self.texts()]


@dataclass(frozen=True, eq=False)
class TvmPrograms:
    """Programs stored as TVM JSON; their keys start at ``first_key``. Many texts are compressed
    (:class:`cdmpp.data.labels.PackedTexts`): read each one once."""

    first_key: int = 0
    hashes: tuple[str, ...] = ()
    texts: Sequence[str] = ()
    tasks: tuple[str, ...] = ()  #: the workload each schedule belongs to ("" unknown): splits keep it whole


@dataclass(frozen=True, eq=False)
class MeasurementTable:
    """Measurements by column; see ``docs/data.md``."""

    # Each distinct operator once. ``row_index`` holds program keys, consecutive and ascending over the blocks; those of
    # ``tvm`` follow.
    programs: tuple[OperatorBlock, ...]
    program_key: Int64  # -1 for rows without a program (``unsupported`` has the reason)
    latency_s: Float64  # NaN where none was given
    op: Labels  # operator and device as the file calls them (for reports)
    device_name: Labels
    device: Labels  # canonical name; the name in the file where no such device is known
    backend: Labels
    protocol: Labels
    framework: Labels  # "" where not known
    implementation: Labels  # one of :data:`cdmpp.programs.query_options.IMPLEMENTATIONS`
    source: Labels
    # "" for a row that is used for training; else a code of :data:`cdmpp.data.physics.EXCLUDED`, or one of the
    # measurer's
    excluded: Labels
    unsupported: Labels  # "" for a row that can be predicted; else a code of :data:`UNSUPPORTED`
    source_row: Int64  # row in the file that the measurement comes from
    row_filter: Mask | None = None  # ``neusight_filter``, for reports only; True where a table has no such column
    repeats_s: Any = None  # pyarrow list<double>: raw repeats
    failure: Labels | None = None  # why a program could not be measured, "" where it was; None: no such column
    # further text columns of project records (versions, clocks, date)
    provenance: Mapping[str, Labels] = field(default_factory=dict)
    # specifications that the records bring, by canonical name; use :meth:`device_spec`
    device_specs: Mapping[str, DeviceSpec] = field(default_factory=dict)
    tvm: TvmPrograms = field(default_factory=TvmPrograms)

    def __len__(self) -> int:
        return len(self.program_key)

    @property
    def n_programs(self) -> int:
        """Number of distinct programs; keys are smaller."""
        return sum(map(len, self.programs)) + len(self.tvm.hashes)

    @property
    def predictable(self) -> Mask:
        """Rows that can be predicted."""
        return self.unsupported.is_("")

    @property
    def trainable(self) -> Mask:
        """Rows used for training: predictable, and not left out by a physics rule."""
        return self.predictable & self.excluded.is_("")

    @property
    def failed(self) -> Mask:
        """Rows whose program could not be measured."""
        return np.zeros(len(self), dtype=np.bool_) if self.failure is None else ~self.failure.is_("")

    @cached_property
    def collective(self) -> Mask:
        """Rows whose program is a collective: predicted without the network, so never encoded."""
        keys = np.zeros(self.n_programs + 1, dtype=np.bool_)  # key -1, no program, is the last
        for block in self.programs:
            keys[block.row_index] = is_collective(block.operator)
        return keys[self.program_key]

    @cached_property
    def element_types(self) -> Labels:
        """Element types of each row's operator as one text ("float8_e4m3+block128"); "" where it has none."""
        names = ["", *(types_label(block.dtype, block.flags) for block in self.programs)]
        distinct = tuple(dict.fromkeys(names))
        return Labels(np.array([*map(distinct.index, names)], dtype=np.int32)[self._block], distinct)

    @cached_property
    def launcher(self) -> Labels:
        """The framework with which a query for a row's implementation is answered (:func:`launcher_of`); "" for any."""
        operators = ["", *(block.operator for block in self.programs)]
        codes = np.stack([self._block, self.framework.codes, self.implementation.codes], axis=1)
        distinct, inverse = np.unique(codes, axis=0, return_inverse=True)
        names = [
            launcher_of(operators[o], self.framework.names[f] or None, self.implementation.names[i]) or ""
            for o, f, i in distinct.tolist()
        ]
        known = tuple(dict.fromkeys(("", *names)))
        return Labels(np.array([known.index(name) for name in names], dtype=np.int32)[inverse.reshape(-1)], known)

    @cached_property
    def _block(self) -> NDArray[np.int32]:
        """Number of each row's block of operators, from 1; 0 for a row without an operator."""
        keys = np.zeros(self.n_programs + 1, dtype=np.int32)  # key -1, no program, is the last
        for number, block in enumerate(self.programs, start=1):
            keys[block.row_index] = number
        return keys[self.program_key]

    def device_spec(self, name: str) -> DeviceSpec:
        """Specification used for a device of this table; see :mod:`cdmpp.devices.registry`."""
        return lookup(name, self.device_specs)

    @cached_property
    def specs(self) -> tuple[OperatorBlock, ...]:
        """The rows grouped by (operator, dtype, structural fields): ``row_index`` are rows of this table."""
        order = np.argsort(self.program_key, kind="stable")
        keys = self.program_key[order]
        blocks = []
        for block in self.programs:
            if not len(block):
                continue
            first, last = int(block.row_index[0]), int(block.row_index[-1])
            low, high = np.searchsorted(keys, first), np.searchsorted(keys, last, side="right")
            rows = np.sort(order[low:high])
            if len(rows):
                selected = block.take(self.program_key[rows] - first)
                blocks.append(replace(selected, row_index=rows))
        return tuple(blocks)

    @cached_property
    def program_hashes(self) -> tuple[str, ...]:
        """Structural hash of every program, by key."""
        return (*(h for block in self.programs for h in block.hashes()), *self.tvm.hashes)

    def program_fields(self, key: int) -> dict[str, Any]:
        """Fields of the operator with this key, as ``make_operator`` takes them."""
        for block in self.programs:
            if len(block) and block.row_index[0] <= key <= block.row_index[-1]:
                return block.fields(key - int(block.row_index[0]))
        raise KeyError(f"program {key} is not an operator")

    def select(self, rows: NDArray[Any]) -> MeasurementTable:
        """Some rows, by index or mask; programs and keys stay as they are."""
        named = {name: getattr(self, name).take(rows) for name in (*TEXT_COLUMNS, "excluded", "unsupported")}
        return replace(
            self,
            **named,
            program_key=self.program_key[rows],
            latency_s=self.latency_s[rows],
            source_row=self.source_row[rows],
            row_filter=None if self.row_filter is None else self.row_filter[rows],
            repeats_s=None if self.repeats_s is None else self.repeats_s.take(pa.array(_indices(rows))),
            failure=None if self.failure is None else self.failure.take(rows),
            provenance={name: column.take(rows) for name, column in self.provenance.items()},
        )


def make_block(operator: str, dtype: str, flags: Flags, sizes: Mapping[str, Int64], row_index: Int64) -> OperatorBlock:
    """Build a block with every integer field and structural field present, defaults filled in."""
    complete = {**flag_defaults(operator), **flags}
    columns: dict[str, Int64] = {}
    for info in integer_fields(operator):
        if info.name in complete:
            columns[info.name] = np.full(len(row_index), complete[info.name], dtype=np.int64)
        elif info.name in sizes:
            columns[info.name] = sizes[info.name]
        else:
            if info.default is None:
                raise ValueError(f"{operator} needs {info.name}")
            columns[info.name] = np.full(len(row_index), info.default, dtype=np.int64)
    return OperatorBlock(operator, dtype, complete, columns, row_index)


@dataclass(frozen=True)
class IntField:
    """One integer field of an operator: its range, and its default unless it must be given."""

    name: str
    low: int
    high: int
    default: int | None


@cache
def integer_fields(operator: str) -> tuple[IntField, ...]:
    """The integer fields of ``operator`` in declaration order (those of ``OperatorSpec.sizes()``)."""
    fields = []
    for name, info in operator_types()[operator].model_fields.items():
        if info.annotation is not int:
            continue
        low, high = 1, 2**31 - 1
        for bound in info.metadata:
            if isinstance(bound, annotated_types.Ge):
                low = int(bound.ge)  # type: ignore[call-overload]
            elif isinstance(bound, annotated_types.Le):
                high = int(bound.le)  # type: ignore[call-overload]
        fields.append(IntField(name, low, high, None if info.is_required() else int(info.default)))
    return tuple(fields)


@cache
def default_dtype(operator: str) -> str:
    """Element type of an operator that states none; "" for an unknown operator."""
    return str(operator_types()[operator].model_fields["dtype"].default) if operator in operator_types() else ""


@cache
def flag_defaults(operator: str) -> dict[str, bool | int | str | None]:
    """Structural fields of ``operator`` with their defaults."""
    spec = operator_types()[operator]
    return {name: spec.model_fields[name].default for name in spec.structural_fields}


def contradictory(operator: str, flags: Mapping[str, bool | int | str | None], sizes: Sizes) -> NDArray[np.bool_]:
    """Rows for which ``OperatorSpec.check()`` raises; ``sizes`` must be within their fields' ranges."""
    bad = operator_types()[operator].elements({n: v.astype(np.float64) for n, v in sizes.items()}) > MAX_ELEMENTS
    for broken, _, _ in operator_types()[operator].violations({**flags, **sizes}):
        bad |= broken
    if operator == "conv2d":
        groups = sizes["groups"]
        bad |= (sizes["c_in"] % groups != 0) | (sizes["c_out"] % groups != 0)
        bad |= np.minimum(*output_hw(sizes)) < 1
        if flags.get("bias") and flags.get("direction", "fwd") != "fwd":
            bad[:] = True
    elif operator in ("max_pool2d", "avg_pool2d"):
        bad |= sizes["h"] + 2 * sizes["pad_h"] < sizes["kh"]
        bad |= sizes["w"] + 2 * sizes["pad_w"] < sizes["kw"]
    return np.asarray(bad)


def _indices(rows: NDArray[Any]) -> NDArray[Any]:
    return np.flatnonzero(rows) if rows.dtype == np.bool_ else rows


def merge_blocks(parts: Sequence[OperatorBlock], keys: int) -> tuple[tuple[OperatorBlock, ...], Int64]:
    """Give each distinct operator one key: blocks with consecutive keys, and the key of the operator at each of
    ``keys`` positions, -1 where no block named it. ``row_index`` of ``parts`` holds positions, each at most once."""
    groups: dict[tuple[Any, ...], list[OperatorBlock]] = {}
    for part in parts:
        groups.setdefault(part.group, []).append(part)
    key_of = np.full(keys, -1, dtype=np.int64)
    blocks: list[OperatorBlock] = []
    offset = 0
    for members in groups.values():
        names = list(members[0].sizes)
        columns = [np.concatenate([m.sizes[name] for m in members]) for name in names]
        first, inverse = distinct_rows(columns)
        key_of[np.concatenate([m.row_index for m in members])] = offset + inverse
        sizes = {name: column[first] for name, column in zip(names, columns, strict=True)}
        index = np.arange(offset, offset + len(first), dtype=np.int64)
        blocks.append(replace(members[0], sizes=sizes, row_index=index))
        offset += len(first)
    return tuple(blocks), key_of


def concat(tables: Sequence[MeasurementTable]) -> MeasurementTable:
    """Put tables one below the other; a program that occurs in several gets one key. Contradicting specifications of
    one device name are a DataError."""
    if not tables:
        raise ValueError("no tables to put together")
    if len(tables) == 1:
        return tables[0]
    offsets = np.cumsum([0, *(t.n_programs for t in tables)])
    parts = [
        replace(block, row_index=block.row_index + offset)
        for table, offset in zip(tables, offsets, strict=False)
        for block in table.programs
        if len(block)
    ]
    blocks, key_of = merge_blocks(parts, int(offsets[-1]))
    tvm = _merge_tvm(tables, offsets, sum(map(len, blocks)), key_of)
    keys = []
    for table, offset in zip(tables, offsets, strict=False):
        mapped = key_of[np.maximum(table.program_key, 0) + offset] if table.n_programs else table.program_key
        keys.append(np.where(table.program_key < 0, -1, mapped))
    provenance = sorted({name for t in tables for name in t.provenance})
    named = {
        name: Labels.concat([getattr(t, name) for t in tables]) for name in (*TEXT_COLUMNS, "excluded", "unsupported")
    }
    return MeasurementTable(
        programs=blocks,
        program_key=np.concatenate(keys),
        latency_s=np.concatenate([t.latency_s for t in tables]),
        source_row=np.concatenate([t.source_row for t in tables]),
        row_filter=_concat_optional(tables, "row_filter", lambda t: np.ones(len(t), dtype=np.bool_), np.concatenate),
        repeats_s=_concat_optional(
            tables, "repeats_s", lambda t: pa.nulls(len(t), pa.list_(pa.float64())), pa.concat_arrays
        ),
        failure=_concat_optional(tables, "failure", lambda t: Labels.constant("", len(t)), Labels.concat),
        device_specs=merge_specs(t.device_specs for t in tables),
        provenance={
            name: Labels.concat([t.provenance.get(name, Labels.constant("", len(t))) for t in tables])
            for name in provenance
        },
        tvm=tvm,
        **named,
    )


def without_programs(table: MeasurementTable, drop: NDArray[np.bool_]) -> MeasurementTable:
    """A table without some of its TVM programs and their rows; keys of the programs that stay are renumbered. ``drop``,
    (programs,), is by key; operators, which belong to no network, cannot be dropped."""
    tvm, first = table.tvm, table.tvm.first_key
    if drop[:first].any():
        raise ValueError("only TVM programs can be dropped")
    kept = np.flatnonzero(~drop[first:]).tolist()
    key = np.append(np.arange(len(drop), dtype=np.int64), -1)
    key[[first + i for i in kept]] = first + np.arange(len(kept))
    # Key -1, a row without a program, is the last entry.
    rows = table.select(np.flatnonzero(~np.append(drop, False)[table.program_key]))
    entries = PackedTexts.entries(tvm.texts)
    hashes, tasks = (tuple(column[i] for i in kept) for column in (tvm.hashes, tvm.tasks))
    programs = TvmPrograms(first, hashes, packed_if_any([entries[i] for i in kept]), tasks)
    return replace(rows, program_key=key[rows.program_key], tvm=programs)


def _merge_tvm(tables: Sequence[MeasurementTable], offsets: NDArray[Any], first_key: int, key_of: Int64) -> TvmPrograms:
    index: dict[str, int] = {}
    texts: list[str | bytes] = []
    tasks: list[str] = []
    for table, offset in zip(tables, offsets, strict=False):
        entries = PackedTexts.entries(table.tvm.texts)
        for position, digest in enumerate(table.tvm.hashes):
            if digest not in index:
                index[digest] = first_key + len(index)
                texts.append(entries[position])
                tasks.append(table.tvm.tasks[position])
            key_of[int(offset) + table.tvm.first_key + position] = index[digest]
    return TvmPrograms(first_key, tuple(index), packed_if_any(texts), tuple(tasks))


def _concat_optional(
    tables: Sequence[MeasurementTable],
    name: str,
    absent: Callable[[MeasurementTable], Any],
    join: Callable[[list[Any]], Any],
) -> Any:
    """Join a column that tables may lack; None if all do, else ``absent`` stands for the columns that lack."""
    columns = [getattr(table, name) for table in tables]
    if all(column is None for column in columns):
        return None
    return join([absent(t) if column is None else column for t, column in zip(tables, columns, strict=True)])
