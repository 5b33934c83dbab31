"""Queries as arrays of numbers, and the programs and devices that these numbers refer to.

Encoded programs are stored by key, in buckets of equal padded leaf count. The bucket of a program depends only on its
leaf count, so a prediction does not depend on the other programs of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cdmpp.features.launch_schema import GPU_COLUMNS, GPU_WIDTH
from cdmpp.features.schedule import LAUNCH_FROM
from cdmpp.features.schema import WIDTH
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.inputs import GPU, SUMMARY_COLUMNS, query_inputs
from cdmpp.model.nn.launch_inputs import KERNEL_WIDTH, LAUNCH_WIDTH, launch_inputs, main_kernel

if TYPE_CHECKING:
    from cdmpp.devices.spec import DeviceSpec
    from cdmpp.features.encode import EncodedPrograms

Array = np.ndarray[Any, np.dtype[Any]]

#: Columns of a leaf's launch, and the one that only launched leaves have above 0.
_LAUNCH = slice(WIDTH + LAUNCH_FROM, WIDTH + LAUNCH_FROM + GPU_WIDTH)
_THREADS = WIDTH + LAUNCH_FROM + GPU_COLUMNS.index("threads")
#: Padded leaf counts; longer programs are padded to a multiple of the last.
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def bucket_of(leaves: int) -> int:
    """Padded leaf count of a program with this many leaves."""
    for size in BUCKETS:
        if leaves <= size:
            return size
    return -(-leaves // BUCKETS[-1]) * BUCKETS[-1]


@dataclass(frozen=True)
class LeafBucket:
    """Programs padded to one leaf count: leaves (n, size, width), positions and mask (n, size)."""

    leaves: Array
    positions: Array
    mask: Array


class ProgramStore:
    """Encoded programs, looked up by key (0 .. count-1).

    ``width``: columns of a leaf. Operators have no schedule; their schedule columns are 0.
    """

    def __init__(self, count: int, width: int = WIDTH) -> None:
        self.width = width
        self.summary = np.zeros((count, len(SUMMARY_COLUMNS)), dtype=np.float32)
        self.bucket = np.zeros(count, dtype=np.int32)
        self.slot = np.zeros(count, dtype=np.int64)
        #: Programs with thread bindings, where the leaves have schedule columns.
        self.launched = np.zeros(count, dtype=bool)
        self._parts: dict[int, list[LeafBucket]] = {}
        self._sizes: dict[int, int] = {}
        self.buckets: dict[int, LeafBucket] = {}

    def add(self, keys: Array, encoded: EncodedPrograms, summary: Array) -> None:
        """Store programs and their :func:`~cdmpp.model.nn.figures.summarise` under their keys.

        Columns of leaves from ``width`` on are left out.
        """
        encoded = encoded.narrow(self.width)
        count, real = encoded.leaves.shape[:2]
        size = bucket_of(real)
        leaves = np.zeros((count, size, self.width), dtype=np.float32)
        leaves[:, :real, : encoded.leaves.shape[2]] = encoded.leaves
        positions = np.zeros((count, size), dtype=np.int32)
        positions[:, :real] = encoded.positions
        mask = np.zeros((count, size), dtype=bool)
        mask[:, :real] = True
        self.place(keys, LeafBucket(leaves, positions, mask), summary)

    def place(self, keys: Array, bucket: LeafBucket, summary: Array) -> None:
        """:meth:`add` of programs that are padded already."""
        count, size = bucket.mask.shape
        start = self._sizes.get(size, 0)
        self._sizes[size] = start + count
        self._parts.setdefault(size, []).append(bucket)
        self.bucket[keys] = size
        self.slot[keys] = np.arange(start, start + count)
        self.summary[keys] = summary
        if self.width > _THREADS:
            self.launched[keys] = (bucket.leaves[:, :, _THREADS] > 0).any(axis=1)

    def order(self, programs: Array) -> Array:
        """Positions of program keys by leaf count, those of one program beside each other."""
        return np.lexsort((programs, self.bucket[programs]))

    def finish(self) -> None:
        """Join the added programs; call once before reading :attr:`buckets`."""
        for size in list(self._parts):
            parts = self._parts.pop(size)
            self.buckets[size] = (
                parts[0]
                if len(parts) == 1
                else LeafBucket(
                    *(np.concatenate([getattr(p, f) for p in parts]) for f in ("leaves", "positions", "mask"))
                )
            )


#: Rows whose inputs are computed together.
BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class QueryRows:
    """Queries as integer arrays of one length n."""

    program: Array  # keys into a :class:`ProgramStore`
    device: Array  # rows of the device matrix
    # Indices into BACKENDS and PROTOCOLS.
    backend: Array
    protocol: Array
    framework: Array  # index into FRAMEWORKS, -1 where the framework is not known

    def __len__(self) -> int:
        return len(self.program)

    def take(self, rows: Array) -> Self:
        """The rows with these positions."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def distinct(self) -> tuple[Array, Array]:
        """Positions of the first row of each distinct query, and for every row the index of its query."""
        return distinct_rows([getattr(self, field.name) for field in fields(QueryRows)])  # -1 is "not known"


def distinct_rows(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Positions of the first of each distinct row of integer columns (values from -1), and each row's index of it."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    if len(code) == 1:
        return code, code
    for column in columns:
        code = code * (int(column.max(initial=0)) + 2) + column + 1
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def concatenate(parts: Sequence[QueryRows]) -> QueryRows:
    """Rows of ``parts`` (at least one) in order."""
    columns = (np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(QueryRows))
    return QueryRows(*columns)


@dataclass(frozen=True)
class QueryBatch:
    """Queries with the programs and devices that they refer to."""

    store: ProgramStore  # encoded programs; ``rows.program`` holds its keys
    # kinds of programs as the domain score names them ("tir" for a program given as TIR)
    kinds: Sequence[tuple[str, str]]
    kind: Array  # (programs,) int: index into ``kinds`` for each program key
    specs: Sequence[DeviceSpec]  # devices; ``rows.device`` holds positions in it
    rows: QueryRows
    # (programs,) int: key of the same operator with 16-bit elements for each program key; -1 where it is not in the
    # store.
    half: Array | None = None


class RowInputs:
    """Computes the network's inputs of rows.

    ``device_matrix``: (devices, .) float64, :func:`cdmpp.model.nn.figures.stack_devices` of the devices.
    """

    def __init__(self, store: ProgramStore, device_matrix: Array) -> None:
        self.store, self.device_matrix = store, device_matrix

    def reference(self, rows: QueryRows) -> Array:
        """log(reference seconds) of rows, (n,)."""
        out = np.empty(len(rows))
        for start in range(0, len(rows), BLOCK_ROWS):
            part = rows.take(np.arange(start, min(start + BLOCK_ROWS, len(rows))))
            out[start : start + len(part)] = self.queries(part)[2]
        return out

    def queries(self, rows: QueryRows, device: Array | None = None) -> tuple[Array, Array, Array]:
        """:func:`query_inputs` of rows; ``device``, (n, .), replaces the rows of the device matrix."""
        figures = self.device_matrix[rows.device] if device is None else device
        summary = self.store.summary[rows.program]
        inputs, logs, reference = query_inputs(summary, figures, rows.backend, rows.protocol, rows.framework)
        for chosen, leaves in self._launched(rows, figures):
            reference[chosen] = launch_inputs(leaves, figures[chosen])[1]
        return inputs, logs, reference

    def network_leaves(self, rows: QueryRows, config: NetworkConfig) -> Array:
        """Leaves of rows of one leaf count as a network reads them, (n, leaves, NetworkConfig.leaf_width)."""
        bucket = self.store.buckets[int(self.store.bucket[rows.program[0]])]
        leaves = np.ascontiguousarray(bucket.leaves[self.store.slot[rows.program]][:, :, : config.stored_width])
        if not config.schedule:
            return leaves
        return np.concatenate([leaves, self.launches(rows, self.device_matrix[rows.device])], axis=2)

    def launches(self, rows: QueryRows, device: Array) -> Array:
        """:func:`launch_inputs` of rows of one leaf count, (n, leaves, LAUNCH_WIDTH); 0 where nothing is launched."""
        size = int(self.store.bucket[rows.program[0]])
        out = np.zeros((len(rows), size, LAUNCH_WIDTH), dtype=np.float32)
        for chosen, leaves in self._launched(rows, device):
            out[chosen] = launch_inputs(leaves, device[chosen])[0]
        return out

    def kernels(self, rows: QueryRows) -> Array:
        """:func:`main_kernel` of rows, (n, KERNEL_WIDTH); 0 where nothing is launched."""
        out, device = np.zeros((len(rows), KERNEL_WIDTH), dtype=np.float32), self.device_matrix[rows.device]
        for chosen, leaves in self._launched(rows, device):
            out[chosen] = main_kernel(launch_inputs(leaves, device[chosen])[0])
        return out

    def _launched(self, rows: QueryRows, device: Array) -> Iterator[tuple[Array, Array]]:
        """Positions of rows of one leaf count with GPU programs on a GPU, and the launch columns of their leaves."""
        store = self.store
        launched = np.flatnonzero(store.launched[rows.program] & (device[:, GPU] > 0))
        for size in np.unique(store.bucket[rows.program[launched]]):
            chosen = launched[store.bucket[rows.program[launched]] == size]
            slots = store.slot[rows.program[chosen]]
            yield chosen, store.buckets[size].leaves[slots, :, _LAUNCH]
