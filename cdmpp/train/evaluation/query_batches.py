"""Rows of a measurement table as batches of queries, some thousands of programs at a time to bound the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.features.encode import EncodedPrograms, encode_shapes, encode_tvm_json, finite, unbound, unbound_error
from cdmpp.model.nn.rows import ProgramStore, QueryBatch, QueryRows
from cdmpp.programs.elements import one_type, types_label
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS
from cdmpp.train.evaluation.cache import FeatureCache

#: Programs that are encoded together. The longest operator has 8 leaves: about 200 MB with intermediates.
CHUNK_PROGRAMS = 16_384
#: The same for programs given as TIR, which may have any number of leaves.
CHUNK_TVM = 1024

#: Function from operator, element type and backend to a 16-bit type or None.
HalfType = Callable[[str, str, str], str | None]
_OVERFLOW = InvalidProgramError("its sizes overflow the features")


@dataclass(frozen=True)
class ProgramChunk:
    """Encoded programs ``first .. first + len(store.bucket) - 1`` of a table.

    Attributes
    ----------
    first : int
        Program key of the store's first program.
    store : ProgramStore
        Keys count from 0. Empty for the programs that failed.
    kinds : list of (operator, dtype)
        As the model's domain names them: the operator ("tir" for a program given as TIR), element type.
    kind : (programs,) int
        Index into ``kinds``.
    failed : dict of int to str
        Why a program (key in the store) cannot be encoded.
    half : (programs,) int, optional
        As in :class:`cdmpp.model.nn.rows.QueryBatch`.
    unbound : set of int
        Programs given as TIR that no GPU can run (:mod:`cdmpp.features.bindings`).
    """

    first: int
    store: ProgramStore
    kinds: list[tuple[str, str]]
    kind: Array
    failed: dict[int, str]
    half: Array | None = None
    unbound: Set[int] = frozenset()

    def __len__(self) -> int:
        """Programs of the table; the store may hold 16-bit forms behind them."""
        return len(self.kind) if self.half is None else len(self.half)


def program_chunks(
    table: MeasurementTable, needed: Array, cache: FeatureCache, half_type: HalfType = lambda *_: None
) -> Iterator[ProgramChunk]:
    """Encode the needed programs of a table.

    Parameters
    ----------
    table : MeasurementTable
    needed : bool array, (table.n_programs,)
        Programs that rows refer to; a chunk may hold further ones.
    cache : FeatureCache
        For programs given as TVM JSON; says whether the schedule's columns are wanted.
    half_type : callable
        Function from operator, element type and backend to the 16-bit type whose features are added, or None.
    """
    backends = sorted(set(table.backend.names))
    for block in table.programs:
        for start in range(0, len(block), CHUNK_PROGRAMS):
            part = block.take(np.arange(start, min(start + CHUNK_PROGRAMS, len(block))))
            first = int(part.row_index[0])
            if not needed[first : first + len(part)].any():
                continue
            types = types_label(part.dtype, part.flags)
            halves = {half_type(part.operator, types, backend) for backend in backends} - {None}
            dtypes = [part.dtype, *sorted(half for half in halves if half is not None)[:1]]
            store, failed = ProgramStore(len(part) * len(dtypes), cache.width), {}
            for number, dtype in enumerate(dtypes):
                flags = one_type(part.flags) if number else part.flags
                for members, encoded in encode_shapes(part.operator, dtype, flags, part.sizes):
                    sound = finite(encoded)
                    failed.update(dict.fromkeys(members[~sound].tolist(), reason_of(_OVERFLOW)))
                    store.add(members + number * len(part), encoded if sound.all() else _cleared(encoded, sound))
            store.finish()
            kinds = [(part.operator, name) for name in (types, *dtypes[1:])]
            kind = np.repeat(np.arange(len(dtypes)), len(part))
            half = len(part) + np.arange(len(part)) if len(dtypes) > 1 else None
            yield ProgramChunk(first, store, kinds, kind, failed, half)
    for start in range(0, len(table.tvm.texts), CHUNK_TVM):
        first = table.tvm.first_key + start
        texts = table.tvm.texts[start : start + CHUNK_TVM]
        if needed[first : first + len(texts)].any():
            yield _tvm_chunk(first, texts, needed[first : first + len(texts)], cache)


def _tvm_chunk(first: int, texts: Sequence[str], needed: Array, cache: FeatureCache) -> ProgramChunk:
    store, failed = ProgramStore(len(texts), cache.width), {}
    kinds: dict[tuple[str, str], int] = {("tir", "float32"): 0}
    kind = np.zeros(len(texts), dtype=np.int64)
    loose: set[int] = set()
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
            failed[key] = reason_of(error)
            continue
        store.add(np.array([key]), encoded)
        kind[key] = kinds.setdefault(("tir", encoded.dtype), len(kinds))
        if unbound(encoded.leaves)[0]:
            loose.add(key)
    store.finish()
    return ProgramChunk(first, store, list(kinds), kind, failed, unbound=loose)


def _cleared(encoded: EncodedPrograms, sound: Array) -> EncodedPrograms:
    leaves, totals = encoded.leaves.copy(), encoded.totals.copy()
    leaves[~sound], totals[~sound] = 0, 1
    return replace(encoded, leaves=leaves, totals=totals)


def reason_of(error: CdmppError) -> str:
    return f"{error.code}: {error.message}"


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
