"""Computing predictions: the network as a graph in ONNX Runtime, which beats torch on small batches.

Two ways in: ``alone``, for the predictor, in chunks of a fixed shape, so that an answer never depends on its
neighbours; and in large batches for evaluation and surveys, where the last digit may differ between two
batch sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.errors import MissingDependencyError
from cdmpp.nn.config import NetworkConfig
from cdmpp.nn.levels import LEVELS
from cdmpp.nn.positional_encoding_np import encode_places
from cdmpp.nn.rows import QueryRows, RowInputs
from cdmpp.nn.store import Bucket

Array = np.ndarray[Any, np.dtype[Any]]

#: Rows that are computed together when an answer may not depend on its neighbours. Fixed: matrix kernels are
#: chosen by shape, and their last digits differ.
CHUNK_ROWS = 32
#: Rows of a large batch, its leaves (padding counted), and leaf pairs of any batch: memory goes with them.
BATCH_ROWS, MAX_LEAVES, MAX_PAIRS = 1024, 8192, 1 << 18


@dataclass(frozen=True)
class NetworkOutput:
    """What the network says of rows, arrays of one length.

    Attributes
    ----------
    point : (n,)
        log of the predicted seconds.
    levels : (n, len(LEVELS))
        Their log quantiles.
    view : (n, VIEW_COLUMNS) float32, or None
        The last hidden layer in few columns: what the network finds alike is near.
    reference : (n,)
        log of the reference seconds.
    """

    point: Array
    levels: Array
    view: Array | None
    reference: Array

    def first(self, count: int) -> NetworkOutput:
        """The first rows."""
        view = None if self.view is None else self.view[:count]
        return NetworkOutput(self.point[:count], self.levels[:count], view, self.reference[:count])

    @classmethod
    def concat(cls, parts: Sequence[NetworkOutput]) -> NetworkOutput:
        """Rows of ``parts``, which is not empty and agrees about ``view``, one after the other."""
        if len(parts) == 1:
            return parts[0]
        views = [part.view for part in parts if part.view is not None]
        return cls(
            np.concatenate([part.point for part in parts]),
            np.concatenate([part.levels for part in parts]),
            np.concatenate(views) if views else None,
            np.concatenate([part.reference for part in parts]),
        )


def all_threads() -> int:
    """Threads for large batches: OMP_NUM_THREADS where it is set, as for torch, else a processor each."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Engine:
    """One network, ready to be asked. Safe to share between threads.

    Parameters
    ----------
    config : NetworkConfig
    arrays : dict of arrays
        The network's state by name.
    view : (config.head_width, columns) float32
        Projection of the last hidden layer.
    threads : int
        Threads of one call. Services answer several calls at a time instead.

    Raises
    ------
    MissingDependencyError
        ONNX Runtime or onnx is not installed.
    """

    def __init__(self, config: NetworkConfig, arrays: dict[str, Array], view: Array, *, threads: int = 1) -> None:
        self.config = config
        try:
            import onnxruntime

            from cdmpp.nn.network_graph import network_graph
        except ImportError as error:
            raise MissingDependencyError(
                f"predictions need {error.name or 'onnxruntime'}",
                hint="pip install '.[predict]' in a checkout of cdmpp",
            ) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        # Threads that wait in a loop are in the way of others.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # An arena keeps the memory of the largest batch for ever, and is no faster here.
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            network_graph(config, arrays, view), options, providers=["CPUExecutionProvider"]
        )
        self._columns = view.shape[1]

    def predict(
        self, inputs: RowInputs, rows: QueryRows, *, embedding: Array, alone: bool = False, view: bool = False
    ) -> NetworkOutput:
        """Predict rows, in their order.

        Parameters
        ----------
        inputs : RowInputs
        rows : QueryRows
        embedding : int array
            Per row of the device matrix, the device's index in the network's embedding (0: not trained on).
        alone : bool
            Each row as if it were asked alone: equal to the last digit in any company.
        view : bool
            Whether :attr:`NetworkOutput.view` is wanted.
        """
        queries, logs, reference = _query_inputs(inputs, rows)
        known = embedding[rows.device].astype(np.int64)
        point, levels = np.empty(len(rows)), np.empty((len(rows), len(LEVELS)))
        seen = np.empty((len(rows), self._columns), dtype=np.float32) if view else None
        names = ["point", "levels", *(["view"] if view else [])]
        for bucket, chosen, padded in _chunks(inputs, rows, alone):
            slots = inputs.store.slot[rows.program[padded]]
            feed = {
                "leaves": bucket.leaves[slots],
                "mask": bucket.mask[slots],
                "inputs": queries[padded],
                "logs": logs[padded],
                "device": known[padded],
                **self._places(bucket.positions[slots]),
            }
            found = self._session.run(names, feed)
            count = len(chosen)
            point[chosen] = found[0][:count].astype(np.float64) + reference[chosen]
            levels[chosen] = found[1][:count].astype(np.float64) + reference[chosen, None]
            if seen is not None:
                seen[chosen] = found[2][:count]
        return NetworkOutput(point, levels, seen, reference)

    def _places(self, positions: Array) -> dict[str, Array]:
        kind = self.config.positions
        if kind == "none":
            return {}
        if kind == "structural":
            return {"positions": positions.astype(np.int64)}
        return {"places": encode_places(kind, positions, self.config.width)}


def _query_inputs(inputs: RowInputs, rows: QueryRows) -> tuple[Array, Array, Array]:
    """:meth:`RowInputs.queries`, some thousands of rows at a time."""
    if len(rows) <= BATCH_ROWS:
        return inputs.queries(rows)
    starts = range(0, len(rows), BATCH_ROWS)
    parts = [inputs.queries(rows.take(np.arange(start, min(start + BATCH_ROWS, len(rows))))) for start in starts]
    queries, logs, reference = (np.concatenate(column) for column in zip(*parts, strict=True))
    return queries, logs, reference


def _chunks(inputs: RowInputs, rows: QueryRows, alone: bool) -> Iterator[tuple[Bucket, Array, Array]]:
    """Rows of one leaf count that are computed together: which they are, and the same filled up."""
    sizes = inputs.store.bucket[rows.program]
    for size, bucket in inputs.store.buckets.items():
        members = np.flatnonzero(sizes == size)
        most = max(1, MAX_PAIRS // size**2)
        count = min(CHUNK_ROWS, most) if alone else max(1, min(BATCH_ROWS, MAX_LEAVES // size, most))
        for start in range(0, len(members), count):
            chosen = members[start : start + count]
            padded = chosen
            if alone and len(chosen) < count:
                # A short chunk repeats its first row: the shape of the computation stays the same.
                padded = np.concatenate([chosen, np.repeat(chosen[:1], count - len(chosen))])
            yield bucket, chosen, padded
