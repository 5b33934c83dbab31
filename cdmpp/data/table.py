"""The columnar measurement table that training and evaluation read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.arrow import pa
from cdmpp.data.fields import flag_defaults, integer_fields
from cdmpp.data.labels import Labels, Mask
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.programs.collectives import is_collective
from cdmpp.programs.elements import types_label
from cdmpp.programs.operators import OperatorSpec, make_operator

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
    "unknown_setting": "backend, protocol or framework is not supported by cdmpp",
    "missing_program": "the record has no program text, or one that cannot be read",
    "inexpressible_schedule": "no program of the kernel's template is the configuration; column inexpressible says why",
}


@dataclass(frozen=True, eq=False)
class OperatorBlock:
    """Sizes of many operators that share operator, element type and structural fields.

    Attributes
    ----------
    operator, dtype : str
    flags : mapping
        Every structural field of the operator's specification, e.g. ``direction``, ``bias``, ``inputs``.
    sizes : mapping of str to int64 array
        Every integer field, defaults filled in, as ``OperatorSpec.sizes()`` names them.
    row_index : int64 array
        In :attr:`MeasurementTable.specs` the rows of the table; in :attr:`MeasurementTable.programs` the
        program keys, which are consecutive.
    """

    operator: str
    dtype: str
    flags: Flags
    sizes: Mapping[str, Int64]
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
    (:class:`cdmpp.data.packed_texts.PackedTexts`): read each one once."""

    first_key: int = 0
    hashes: tuple[str, ...] = ()
    texts: Sequence[str] = ()
    tasks: tuple[str, ...] = ()  #: the workload each schedule belongs to ("" unknown): splits keep it whole


@dataclass(frozen=True, eq=False)
class MeasurementTable:
    """Measurements by column; see ``docs/data.md``.

    Attributes
    ----------
    programs : tuple of OperatorBlock
        Each distinct operator once. ``row_index`` holds program keys, consecutive and ascending over the
        blocks; :attr:`tvm` programs follow.
    program_key : int64 array
        Program of each row; -1 for rows without one (:attr:`unsupported` has the reason).
    latency_s : float64 array
        Seconds; NaN where none was given.
    device : Labels
        Canonical device name; the name in the file where no such device is known.
    op, device_name : Labels
        Operator and device as the file calls them (for reports).
    backend, protocol, framework, source : Labels
        ``framework`` is "" where not known.
    excluded, unsupported : Labels
        "" for a row that is used for training, or that can be predicted; else a code of
        :data:`cdmpp.data.physics.EXCLUDED` (or one that the measurer gave), or of :data:`UNSUPPORTED`.
    source_row : int64 array
        Row in the file that the measurement comes from.
    row_filter : bool array or None
        ``neusight_filter``, for reports only; True where a table has no such column.
    repeats_s : pyarrow list<double> array or None
        Raw repeats in seconds.
    failure : Labels or None
        Why a program could not be measured, "" where it was; None where the table has no such column.
    provenance : mapping of str to Labels
        Further text columns of project records (versions, clocks, date).
    device_specs : mapping of str to DeviceSpec
        Specifications that the records bring, by canonical device name; use :meth:`device_spec`.
    """

    programs: tuple[OperatorBlock, ...]
    program_key: Int64
    latency_s: Float64
    op: Labels
    device_name: Labels
    device: Labels
    backend: Labels
    protocol: Labels
    framework: Labels
    source: Labels
    excluded: Labels
    unsupported: Labels
    source_row: Int64
    row_filter: Mask | None = None
    repeats_s: Any = None
    failure: Labels | None = None
    provenance: Mapping[str, Labels] = field(default_factory=dict)
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
        names = [types_label(block.dtype, block.flags) for block in self.programs]
        keys = np.zeros(self.n_programs + 1, dtype=np.int32)  # key -1, no program, is the last
        for number, block in enumerate(self.programs, start=1):
            keys[block.row_index] = number
        distinct = tuple(dict.fromkeys(("", *names)))
        codes = np.array([0, *map(distinct.index, names)], dtype=np.int32)
        return Labels(codes[keys[self.program_key]], distinct)

    def device_spec(self, name: str) -> DeviceSpec:
        """Specification used for a device of this table; see :mod:`cdmpp.data.device_specs`.

        Raises
        ------
        UnknownDeviceError
            cdmpp does not know the name, and no record brings its specification.
        """
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


TEXT_COLUMNS = ("op", "device_name", "device", "backend", "protocol", "framework", "source")


def _indices(rows: NDArray[Any]) -> NDArray[Any]:
    return np.flatnonzero(rows) if rows.dtype == np.bool_ else rows


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
