"""Rows of a measurement table as batches of queries, some thousands of programs at a time to bound the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.features.encode import TIR, encode_shapes, encode_tvm_json, finite, unbound, unbound_error
from cdmpp.model.inference.encoder import BatchBuilder, HalfType
from cdmpp.model.nn.rows import QueryBatch, QueryRows
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS
from cdmpp.train.evaluation.cache import FeatureCache

Array = np.ndarray[Any, np.dtype[Any]]

#: Programs that are encoded together. The longest operator has 8 leaves: about 200 MB with intermediates.
CHUNK_PROGRAMS = 16_384
#: The same for programs given as TIR, which may have any number of leaves.
CHUNK_TVM = 1024


def _reason(error: CdmppError) -> str:
    return f"{error.code}: {error.message}"


_OVERFLOW = InvalidProgramError("its sizes overflow the features")
_UNBOUND = _reason(unbound_error("the program", "its device"))


@dataclass(frozen=True)
class QueryPart:
    """Part of the rows of a table."""

    index: Array  # (n,): positions of the part's rows among the given rows
    batch: QueryBatch  # distinct queries of these rows: a query that was measured several times is computed once
    position: Array  # (n,): position of each row's query in the batch
    failed: Array  # (m,): positions of the given rows whose program cannot be encoded, or cannot run on the device
    reasons: list[str]  # of the failed ones


def query_parts(
    table: MeasurementTable,
    rows: Array,
    cache: FeatureCache,
    specs: Mapping[str, DeviceSpec] | None = None,
    half_type: HalfType = lambda *_: None,
) -> Iterator[QueryPart]:
    """Rows of a table as queries.

    ``rows`` are row numbers, ordered by ``table.program_key``. Each row is in exactly one part, in ``index`` or in
    ``failed``. ``cache`` is that of programs given as TVM JSON; it decides whether their schedule columns are computed.
    ``specs``: specifications by canonical device name that replace the table's. ``half_type``:
    :meth:`cdmpp.model.inference.pipeline.InferencePipeline.half_type` where the batches are for ``forward``.
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
        framework=_codes(table.launcher.names, FRAMEWORKS)[table.launcher.codes[rows]],
    )
    needed = np.zeros(table.n_programs, dtype=np.bool_)
    needed[keys] = True
    for chunk in _chunks(table, needed, cache, half_type):
        low, high = np.searchsorted(keys, [chunk.first, chunk.first + chunk.builder.programs])
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
        yield QueryPart(index, chunk.builder.batch(devices, part.take(first)), position, failed, reasons)


@dataclass
class _Chunk:
    """Encoded programs of a table."""

    first: int  # program key in the table of the builder's first program
    builder: BatchBuilder
    failed: dict[int, str] = field(default_factory=dict)  # why a program (key in the builder) cannot be encoded
    # programs given as TIR that no GPU can run (:func:`cdmpp.features.encode.unbound`)
    unbound: set[int] = field(default_factory=set)

    def finish(self) -> _Chunk:
        """Finish the builder and note the programs that overflow."""
        self.failed.update(dict.fromkeys(self.builder.finish().tolist(), _reason(_OVERFLOW)))
        return self


def _chunks(table: MeasurementTable, needed: Array, cache: FeatureCache, half_type: HalfType) -> Iterator[_Chunk]:
    """Encode the programs that rows refer to (``needed``, a mask); a chunk may hold further ones."""
    backends = sorted(set(table.backend.names))
    for block in table.programs:
        for start in range(0, len(block), CHUNK_PROGRAMS):
            part = block.take(np.arange(start, min(start + CHUNK_PROGRAMS, len(block))))
            first = int(part.row_index[0])
            if not needed[first : first + len(part)].any():
                continue
            chunk = _Chunk(first, BatchBuilder(len(part), cache.width, half_type))
            for keys, encoded in encode_shapes(part.operator, part.dtype, part.flags, part.sizes):
                chunk.builder.add(keys, part.operator, encoded, backends)
            yield chunk.finish()
    for start in range(0, len(table.tvm.texts), CHUNK_TVM):
        first = table.tvm.first_key + start
        texts = table.tvm.texts[start : start + CHUNK_TVM]
        if needed[first : first + len(texts)].any():
            yield _tvm_chunk(first, texts, needed[first : first + len(texts)], cache)


def _tvm_chunk(first: int, texts: Sequence[str], needed: Array, cache: FeatureCache) -> _Chunk:
    chunk = _Chunk(first, BatchBuilder(len(texts), cache.width, lambda *_: None))
    for key in np.flatnonzero(needed).tolist():
        text = texts[key]
        try:
            encoded = cache.get(text)
            if encoded is None:
                encoded = encode_tvm_json(text, schedule=cache.schedule)
                if not finite(encoded).all():
                    raise _OVERFLOW
                cache.put(text, encoded)
        except CdmppError as error:
            chunk.failed[key] = _reason(error)
            continue
        chunk.builder.add(np.array([key]), TIR, encoded, ["tvm"])
        if unbound(encoded.leaves)[0]:
            chunk.unbound.add(key)
    return chunk.finish()


def _codes(names: Iterable[str], known: Iterable[str]) -> Array:
    """Index of each name among the known ones; -1 where it is not there (no framework is "")."""
    index = {name: i for i, name in enumerate(known)}
    return np.array([index.get(name, -1) for name in names], dtype=np.int64)
