"""Checking of imported rows: validity of every row, distinct programs, flags, and rows of doubtful meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.labels import Labels, Mask
from cdmpp.data.physics import flag_rows
from cdmpp.data.raw import IntColumn
from cdmpp.data.table import (
    UNSUPPORTED,
    Flags,
    Int64,
    MeasurementTable,
    OperatorBlock,
    TvmPrograms,
    contradictory,
    integer_fields,
    make_block,
    merge_blocks,
)
from cdmpp.devices import lookup
from cdmpp.errors import UnknownDeviceError
from cdmpp.programs.operators import operator_types
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, IMPLEMENTATIONS, PROTOCOLS, implementation_of

#: Rules that leave rows of doubtful meaning out of training; the rows stay in every evaluation. An importer states them
#: per source (:attr:`cdmpp.data.importers.base.Importer.doubtful`). Unlike the rules of :mod:`cdmpp.data.physics` they
#: depend on columns that records do not keep, so records store their reasons.
DOUBTFUL = {
    "fused": "the compiler fused the layer into its neighbour: the latency does not grow with the tokens",
    "other_kernel": "a limit of the model switches to another kernel (sliding window: an explicit mask)",
    "stand_in": "the operator has no specification; another one of equal arithmetic and traffic is predicted",
    "composite": "the timed region contains further operators",
    "no_sizes": "the source states no lengths; the smallest are predicted",
    "paged_copy": "a copy per page of the cache, from the host",
}
Reasons: TypeAlias = NDArray[np.int32]
#: Codes of the reasons, 0 for none.
REASONS = ("", *UNSUPPORTED)
CODE = {name: code for code, name in enumerate(REASONS)}


@dataclass(frozen=True)
class Group:
    """Rows of a file that are one operator with one set of structural flags."""

    operator: str
    rows: Mask  # of the file
    # columns of the whole file; a size that is left out takes the specification's default
    sizes: Mapping[str, IntColumn]
    # as the specification keeps them: types and scalings complete, defaults as None
    flags: Flags = field(default_factory=dict)
    dtype: str | None = None  # element type of the rows; None: the table's label


def complete_table(
    programs: tuple[OperatorBlock, ...],
    program_key: Int64,
    reason: Reasons,
    device_name: Labels,
    doubtful: Mapping[str, Mask],
    **columns: Any,
) -> MeasurementTable:
    """Build a table whose programs are checked: look up devices, check settings, and flag rows.

    ``programs``, ``program_key`` and ``reason`` are what :func:`check_groups` returns, ``device_name`` what the file
    calls the devices, ``doubtful`` rows by the reasons of :data:`DOUBTFUL`, ``columns`` further fields of the table.
    """
    device, known = canonical_devices(device_name)
    mark(reason, ~known, "unknown_device")
    mark(reason, ~settings_known(columns), "unknown_setting")
    columns.setdefault("tvm", TvmPrograms(first_key=sum(map(len, programs))))
    table = MeasurementTable(
        programs=programs,
        program_key=program_key,
        device_name=device_name,
        device=device,
        excluded=Labels.constant("", len(reason)),
        unsupported=Labels(reason, REASONS),
        source_row=np.arange(len(reason), dtype=np.int64),
        **columns,
    )
    return replace(table, excluded=with_doubts(flag_rows(table), doubtful))


def with_doubts(excluded: Labels, doubtful: Mapping[str, Mask]) -> Labels:
    """``excluded`` with the reasons of ``doubtful`` in rows that have none; earlier reasons come first."""
    if not doubtful:
        return excluded
    names = (*excluded.names, *(name for name in doubtful if name not in excluded.names))
    codes = excluded.codes.copy()
    free = np.array([not name for name in excluded.names])[codes]
    for name, rows in doubtful.items():
        if name not in DOUBTFUL:
            raise ValueError(f"unknown reason {name!r}; known: {', '.join(DOUBTFUL)}")
        codes[rows & free] = names.index(name)
        free &= ~rows
    return Labels(codes, names)


def canonical_devices(names: Labels) -> tuple[Labels, Mask]:
    """Look up each distinct device name; also return the mask of rows whose device is known."""
    canonical: dict[str, str] = {}
    known: set[str] = set()
    for name in names.names:
        try:
            canonical[name] = lookup(name).name
            known.add(name)
        except UnknownDeviceError:
            canonical[name] = name
    return names.map(canonical.__getitem__), names.is_in(known)


#: Columns that say which latency a row holds, and their values.
SETTINGS: dict[str, tuple[str, ...]] = {
    "backend": BACKENDS,
    "protocol": PROTOCOLS,
    "framework": ("", *FRAMEWORKS),
    "implementation": IMPLEMENTATIONS,
}


def settings_known(columns: Mapping[str, Labels]) -> Mask:
    """Mask of rows whose :data:`SETTINGS` are supported."""
    known: Mask = np.all([columns[name].is_in(allowed) for name, allowed in SETTINGS.items()], axis=0)
    return known


def stated_or_default(implementation: Labels, operator: Labels, framework: Labels) -> Labels:
    """``implementation``, with the default of operator and framework in the rows that state none (``""``)."""
    width = len(framework.names)
    pairs, inverse = np.unique(operator.codes.astype(np.int64) * width + framework.codes, return_inverse=True)
    defaults = Labels(
        inverse.reshape(-1).astype(np.int32),
        tuple(implementation_of(operator.names[pair // width], framework.names[pair % width]) for pair in pairs),
    )
    both = Labels.concat([implementation, defaults])
    given, default = both.codes[: len(implementation)], both.codes[len(implementation) :]
    return Labels(np.where(implementation.is_(""), default, given).astype(np.int32), both.names)


def mark(reason: Reasons, rows: Mask, name: str) -> None:
    """Give ``rows`` a reason unless they have one already."""
    reason[rows & (reason == 0)] = CODE[name]


def check_groups(groups: Sequence[Group], dtypes: Labels) -> tuple[tuple[OperatorBlock, ...], Int64, Reasons]:
    """Check every row of every group: distinct operators; key of each row's operator, -1 for rows without one; and its
    code in :data:`REASONS`, ``unknown_operator`` for the rows of no group."""
    rows = len(dtypes)
    reason = np.full(rows, CODE["unknown_operator"], dtype=np.int32)
    parts: list[OperatorBlock] = []
    for group in groups:
        parts += _check_group(group, dtypes, reason)
    blocks, key = merge_blocks(parts, rows)
    return blocks, key, reason


def _check_group(group: Group, dtypes: Labels, reason: Reasons) -> list[OperatorBlock]:
    """Check one group, write the reasons of its rows, and return its usable rows by element type."""
    index: Int64 = np.flatnonzero(group.rows).astype(np.int64)
    if group.dtype is not None:
        dtypes = Labels.constant(group.dtype, len(reason))
    state = np.zeros(len(index), dtype=np.int32)
    columns: dict[str, Int64] = {}
    for info in integer_fields(group.operator):
        if info.name not in group.sizes:
            continue
        column = group.sizes[info.name]
        values = column.values[index]
        missing = column.missing[index]
        mark(state, missing, "missing_size")
        mark(state, column.invalid[index] | (values < info.low) | (values > info.high), "invalid_size")
        columns[info.name] = values
    allowed = operator_types()[group.operator].dtypes
    mark(state, ~dtypes.is_in(allowed)[index], "unknown_dtype")
    parts = []
    for code, dtype in enumerate(dtypes.names):
        usable = np.flatnonzero((state == 0) & (dtypes.codes[index] == code))
        if len(usable):
            sizes = {name: column[usable] for name, column in columns.items()}
            block = make_block(group.operator, dtype, group.flags, sizes, index[usable])
            wrong = contradictory(group.operator, block.flags, block.sizes)
            state[usable[wrong]] = CODE["contradictory_sizes"]
            parts.append(block.take(~wrong) if wrong.any() else block)
    reason[index] = state
    return parts
