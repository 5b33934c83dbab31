"""Rows of a measurement table as batches of queries, some thousands of programs at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.encode import unbound_error
from cdmpp.model.nn.rows import QueryBatch, QueryRows
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.chunks import HalfType, program_chunks, reason_of

Array = np.ndarray[Any, np.dtype[Any]]

_UNBOUND = reason_of(unbound_error("the program", "its device"))


@dataclass(frozen=True)
class QueryPart:
    """Part of the rows of a table.

    Attributes
    ----------
    index : (n,) int
        Positions of the part's rows among the given rows.
    batch : QueryBatch
        Distinct queries of these rows: a query that was measured several times is computed once.
    position : (n,) int
        Position of each row's query in the batch.
    failed : (m,) int
        Positions among the given rows of those whose program cannot be encoded, or cannot run on the device.
    reasons : list of str, length m
    """

    index: Array
    batch: QueryBatch
    position: Array
    failed: Array
    reasons: list[str]


def query_parts(
    table: MeasurementTable,
    rows: Array,
    cache: FeatureCache,
    specs: Mapping[str, DeviceSpec] | None = None,
    half_type: HalfType = lambda *_: None,
) -> Iterator[QueryPart]:
    """Rows of a table as queries.

    Parameters
    ----------
    table : MeasurementTable
    rows : (n,) int
        Row numbers, ordered by ``table.program_key``. Each row is in exactly one part, in ``index`` or in
        ``failed``.
    cache : FeatureCache
        Cache of programs given as TVM JSON; decides whether their schedule columns are computed.
    specs : mapping, optional
        Specifications by canonical device name that replace the table's.
    half_type : callable
        :meth:`cdmpp.model.inference.pipeline.InferencePipeline.half_type` where the batches are for ``predict``.
    """
    keys = table.program_key[rows]
    device_names = sorted({table.device.names[code] for code in np.unique(table.device.codes[rows])})
    given = specs or {}
    devices = [given[name] if name in given else table.device_spec(name) for name in device_names]
    on_gpu = np.array([device.kind == "gpu" for device in devices])
    queries = QueryRows(
        program=keys,
        device=_codes(table.device.names, device_names)[table.device.codes[rows]],
        backend=_codes(table.backend.names, BACKENDS)[table.backend.codes[rows]],
        protocol=_codes(table.protocol.names, PROTOCOLS)[table.protocol.codes[rows]],
        framework=_codes(table.framework.names, FRAMEWORKS)[table.framework.codes[rows]],
    )
    needed = np.zeros(table.n_programs, dtype=np.bool_)
    needed[keys] = True
    for chunk in program_chunks(table, needed, cache, half_type):
        low, high = np.searchsorted(keys, [chunk.first, chunk.first + len(chunk)])
        index = np.arange(low, high)
        chunk_keys = keys[index] - chunk.first
        loose = np.isin(chunk_keys, list(chunk.unbound)) & on_gpu[queries.device[index]]
        loose &= queries.backend[index] == BACKENDS.index("tvm")
        bad = np.isin(chunk_keys, list(chunk.failed)) | loose
        reasons = [chunk.failed.get(key, _UNBOUND) for key in chunk_keys[bad].tolist()]
        failed, index = index[bad], index[~bad]
        part = queries.take(index)
        part = replace(part, program=part.program - chunk.first)
        first, position = part.distinct()
        batch = QueryBatch(chunk.store, chunk.kinds, chunk.kind, devices, part.take(first), chunk.half)
        yield QueryPart(index, batch, position, failed, reasons)


def _codes(names: Iterable[str], known: Iterable[str]) -> Array:
    """Index of each name among the known ones; -1 where it is not there (no framework is "")."""
    index = {name: i for i, name in enumerate(known)}
    return np.array([index.get(name, -1) for name in names], dtype=np.int64)
