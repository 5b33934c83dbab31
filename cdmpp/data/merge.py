"""Distinct programs among many blocks, and tables put one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.arrow import pa
from cdmpp.data.device_specs import merge_specs
from cdmpp.data.distinct import distinct_rows
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.packed_texts import PackedTexts, packed_if_any
from cdmpp.data.table import TEXT_COLUMNS, Int64, MeasurementTable, OperatorBlock, TvmPrograms


def merge_blocks(parts: Sequence[OperatorBlock], keys: int) -> tuple[tuple[OperatorBlock, ...], Int64]:
    """Give each distinct operator one key.

    Parameters
    ----------
    parts : sequence of OperatorBlock
        ``row_index`` holds positions in ``range(keys)``, each at most once.
    keys : int
        Length of the returned map.

    Returns
    -------
    blocks : tuple of OperatorBlock
        Distinct operators, keys consecutive.
    key_of : int64 array of length ``keys``
        Key of the operator at each position; -1 where no block named the position.
    """
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
    """Put tables one below the other; a program that occurs in several gets one key.

    Raises
    ------
    DataError
        Two tables bring contradicting specifications of one device name.
    """
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
        row_filter=_concat_filters(tables),
        repeats_s=_concat_repeats(tables),
        failure=_concat_failures(tables),
        device_specs=merge_specs(t.device_specs for t in tables),
        provenance={
            name: Labels.concat([t.provenance.get(name, Labels.constant("", len(t))) for t in tables])
            for name in provenance
        },
        tvm=tvm,
        **named,
    )


def without_programs(table: MeasurementTable, drop: NDArray[np.bool_]) -> MeasurementTable:
    """A table without some of its TVM programs and their rows; keys of the programs that stay are renumbered.

    Parameters
    ----------
    table : MeasurementTable
    drop : (programs,) bool
        By program key. Operators, which belong to no network, cannot be dropped.
    """
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


def _concat_failures(tables: Sequence[MeasurementTable]) -> Labels | None:
    if all(t.failure is None for t in tables):
        return None
    return Labels.concat([Labels.constant("", len(t)) if t.failure is None else t.failure for t in tables])


def _concat_filters(tables: Sequence[MeasurementTable]) -> Mask | None:
    if all(t.row_filter is None for t in tables):
        return None
    return np.concatenate([np.ones(len(t), dtype=np.bool_) if t.row_filter is None else t.row_filter for t in tables])


def _concat_repeats(tables: Sequence[MeasurementTable]) -> Any:
    if all(t.repeats_s is None for t in tables):
        return None
    kind = pa.list_(pa.float64())
    return pa.concat_arrays([pa.nulls(len(t), kind) if t.repeats_s is None else t.repeats_s for t in tables])
