"""A table's rows as queries over encoded programs, some thousands of programs at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import DeviceSpec
from cdmpp.evaluation.cache import FeatureCache
from cdmpp.evaluation.chunks import program_chunks
from cdmpp.nn.pipeline import Queries, QueryBatch
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class AskedPart:
    """Some of the rows.

    Attributes
    ----------
    index : (n,) int
        Positions among the rows that were given.
    asked : QueryBatch
        The distinct queries among them: one that was measured several times is asked once.
    same : (n,) int
        Which of the distinct queries each row is.
    lost : (m,) int
        Positions of rows whose program cannot be encoded.
    why : list of str, length m
    """

    index: Array
    asked: QueryBatch
    same: Array
    lost: Array
    why: list[str]


def asked_parts(
    table: MeasurementTable, rows: Array, cache: FeatureCache, specs: Mapping[str, DeviceSpec] | None = None
) -> Iterator[AskedPart]:
    """Predictable rows of a table as queries.

    Parameters
    ----------
    table : MeasurementTable
    rows : (n,) int
        Row numbers, ordered by ``table.program_key``; each is in exactly one part, as asked or as lost.
    cache : FeatureCache
        For programs given as TVM JSON; says whether the schedule's columns are wanted.
    specs : mapping, optional
        Specifications by canonical device name that stand before the table's own.
    """
    keys = table.program_key[rows]
    device_names = sorted({table.device.names[code] for code in np.unique(table.device.codes[rows])})
    given = specs or {}
    devices = [given[name] if name in given else table.device_spec(name) for name in device_names]
    numbers = Queries(
        program=keys,
        device=_codes(table.device.names, device_names)[table.device.codes[rows]],
        backend=_codes(table.backend.names, BACKENDS)[table.backend.codes[rows]],
        protocol=_codes(table.protocol.names, PROTOCOLS)[table.protocol.codes[rows]],
        framework=_codes(table.framework.names, FRAMEWORKS)[table.framework.codes[rows]],
    )
    needed = np.zeros(table.n_programs, dtype=np.bool_)
    needed[keys] = True
    for chunk in program_chunks(table, needed, cache):
        low, high = np.searchsorted(keys, [chunk.first, chunk.first + len(chunk.kind)])
        index = np.arange(low, high)
        bad = np.isin(keys[index] - chunk.first, list(chunk.failed))
        lost, index = index[bad], index[~bad]
        why = [chunk.failed[key] for key in (keys[lost] - chunk.first).tolist()]
        part = numbers.take(index)
        part = Queries(**{**vars(part), "program": part.program - chunk.first})
        first, same = part.distinct()
        asked = QueryBatch(chunk.store, chunk.kinds, chunk.kind, devices, part.take(first))
        yield AskedPart(index, asked, same, lost, why)


def _codes(names: Iterable[str], known: Iterable[str]) -> Array:
    """Index of each name among the known ones, -1 where it is not there ("" for no framework)."""
    index = {name: i for i, name in enumerate(known)}
    return np.array([index.get(name, -1) for name in names], dtype=np.int64)
