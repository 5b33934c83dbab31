"""The network in ONNX Runtime, which is faster than torch on small batches.

With ``batch_invariant`` a row's result does not depend on the other rows of the batch: chunks have a multiple of a few
rows, where the engine found the results of all such shapes equal to the last digit, and a fixed shape otherwise.
Without it the engine computes large batches, for evaluation and surveys, and the last digit may differ between two
batch sizes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from cdmpp.errors import MissingDependencyError, install_hint
from cdmpp.model.nn.config import LEVELS, NetworkConfig
from cdmpp.model.nn.inputs import DEVICE_LOGS, INPUT_WIDTH
from cdmpp.model.nn.positions import encode_positions
from cdmpp.model.nn.rows import LeafBucket, QueryRows, RowInputs
from cdmpp.model.nn.weights import Weights
from cdmpp.model.raw_predictions import RawPredictions

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Array = np.ndarray[Any, np.dtype[Any]]
#: Programs of one leaf count, positions of rows, and the same padded to the chunk's size.
Chunk = tuple[LeafBucket, Array, Array]

#: Rows of a chunk with ``batch_invariant``: minimum where a row's last digits depend on the shape, maximum elsewhere.
CHUNK_ROWS, MAX_CHUNK_ROWS = 32, 128
#: Vector instructions compute so many values at once and the remaining ones otherwise, with other last digits.
STEPS = (8, 16)
#: Rows of a large batch, its leaves (with padding), and leaf pairs of any batch: they bound the memory.
BATCH_ROWS, MAX_LEAVES, MAX_PAIRS = 1024, 8192, 1 << 18


def all_threads() -> int:
    """Threads for large batches: OMP_NUM_THREADS where it is set, as in torch, else one per processor."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_lock = threading.Lock()
_engines: WeakKeyDictionary[Weights, dict[int, Engine]] = WeakKeyDictionary()


def engine_of(weights: Weights, threads: int = 1) -> Engine:
    """The engine of a network; every model that shares the weights shares the engine.

    ``threads``: of one call; the last digit of a result may depend on it.
    """
    with _lock:
        engines = _engines.setdefault(weights, {})
        if threads not in engines:
            engines[threads] = Engine(weights.config, weights.arrays, weights.view(), threads=threads)
        return engines[threads]


def _missing(error: ImportError) -> MissingDependencyError:
    return MissingDependencyError(
        f"predictions need {error.name or 'onnxruntime'}, which is not installed", hint=install_hint("predict")
    )


def session_of(graph: bytes, threads: int = 1) -> InferenceSession:
    """A session of ONNX Runtime."""
    # ONNX Runtime starts its telemetry on import: a database in the user's cache folder, and uploads.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime
    except ImportError as error:
        raise _missing(error) from None
    onnxruntime.disable_telemetry_events()  # where the caller imported it before
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Threads that spin while they wait slow other threads down.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # An arena never frees the memory of the largest batch, and is no faster here.
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


class Engine:
    """One network in ONNX Runtime. Safe to share between threads.

    ``arrays``: state of the network by name. ``view``: (config.head_width, columns) float32, projection of the last
    hidden layer. ``threads``: of one call; a service uses one and makes several calls at a time.
    """

    def __init__(self, config: NetworkConfig, arrays: dict[str, Array], view: Array, *, threads: int = 1) -> None:
        self.config = config
        try:
            from cdmpp.model.nn.network_graph import network_graph
        except ImportError as error:
            raise _missing(error) from None
        self._session = session_of(network_graph(config, arrays, view), threads)
        self._columns = view.shape[1]

    @cached_property
    def step(self) -> int:
        """Chunks with a multiple of so many rows give a row the same result; 0 where no such number was found.

        The results of random rows are compared to the last digit, on the processor at hand.
        """
        rng, config, rows, leaves = np.random.default_rng(0), self.config, 2 * CHUNK_ROWS, 2

        def numbers(*shape: int) -> Array:
            return rng.uniform(-3.0, 3.0, (rows, *shape)).astype(np.float32)

        feed = {
            "leaves": numbers(leaves, config.leaf_width),
            "mask": np.arange(leaves) <= rng.integers(0, leaves, rows)[:, None],
            "inputs": numbers(INPUT_WIDTH),
            "logs": numbers(len(DEVICE_LOGS)),
            "device": np.zeros(rows, dtype=np.int64),
            "places": numbers(leaves, config.width),
        }

        def results(size: int) -> Array:
            parts = [{k: v[i : i + size] for k, v in feed.items()} for i in range(0, rows, size)]
            return np.concatenate([np.column_stack(self._session.run(["point", "levels", "view"], p)) for p in parts])

        whole = results(rows)
        for step in STEPS:
            if all(np.array_equal(results(size), whole, equal_nan=True) for size in (step, 3 * step, 5 * step)):
                return step
        return 0

    def predict(
        self,
        inputs: RowInputs,
        rows: QueryRows,
        queries: tuple[Array, Array, Array],
        *,
        embedding: Array,
        batch_invariant: bool = False,
        view: bool = False,
        parallel_chunks: int = 1,
    ) -> RawPredictions:
        """Predict rows, in their order.

        ``queries``: :func:`network_queries` of the rows. ``embedding``: for each row of the device matrix, the device's
        index in the network's embedding (0: not trained on). ``batch_invariant``: compute each row independently of the
        other rows, equal to the last digit. ``view``: return :attr:`RawPredictions.view`. ``parallel_chunks``: chunks
        that are computed at the same time; the results do not depend on it.
        """
        columns, logs, reference = queries
        devices = embedding[rows.device].astype(np.int64)
        point, levels = np.empty(len(rows)), np.empty((len(rows), len(LEVELS)))
        views = np.empty((len(rows), self._columns), dtype=np.float32) if view else None
        names = ["point", "levels", *(["view"] if view else [])]
        step = self.step if batch_invariant else 0

        def compute(chunk: Chunk) -> None:
            bucket, members, padded = chunk
            slots = inputs.store.slot[rows.program[padded]]
            feed = {
                "leaves": inputs.network_leaves(rows.take(padded), self.config),
                "mask": bucket.mask[slots],
                "inputs": columns[padded],
                "logs": logs[padded],
                "device": devices[padded],
                "places": encode_positions(self.config.positions, bucket.positions[slots], self.config.width),
            }
            outputs = self._session.run(names, feed)
            count = len(members)
            point[members] = outputs[0][:count].astype(np.float64) + reference[members]
            levels[members] = outputs[1][:count].astype(np.float64) + reference[members, None]
            if views is not None:
                views[members] = outputs[2][:count]

        chunks = _chunks(inputs, rows, batch_invariant, step)
        if parallel_chunks > 1 and len(rows) > CHUNK_ROWS:
            # The chunks with most leaves first, so that the threads end at about the same time.
            ordered = sorted(chunks, key=lambda chunk: -chunk[0].leaves.shape[1] * len(chunk[2]))
            list(_executor(os.getpid(), parallel_chunks).map(compute, ordered))
        else:
            for chunk in chunks:
                compute(chunk)
        return RawPredictions(point, levels, reference, views)


@lru_cache(maxsize=8)
def _executor(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that all engines of a process share; a forked process has its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix="chunks")


def network_queries(inputs: RowInputs, rows: QueryRows) -> tuple[Array, Array, Array]:
    """:meth:`RowInputs.queries`, computed in blocks of ``BATCH_ROWS``."""
    if len(rows) <= BATCH_ROWS:
        return inputs.queries(rows)
    starts = range(0, len(rows), BATCH_ROWS)
    parts = [inputs.queries(rows.take(np.arange(start, min(start + BATCH_ROWS, len(rows))))) for start in starts]
    queries, logs, reference = (np.concatenate(column) for column in zip(*parts, strict=True))
    return queries, logs, reference


def _chunks(inputs: RowInputs, rows: QueryRows, batch_invariant: bool, step: int) -> Iterator[Chunk]:
    """Rows of one leaf count that are computed together: their positions, and the same padded to the chunk's size."""
    sizes = inputs.store.bucket[rows.program]
    for size, bucket in inputs.store.buckets.items():
        members = np.flatnonzero(sizes == size)
        max_rows = max(1, MAX_PAIRS // size**2)
        # Many leaves leave few rows, and then one shape.
        flexible = batch_invariant and 0 < step <= max_rows
        if flexible:
            count = min(MAX_CHUNK_ROWS, max_rows // step * step)
        else:
            large = max(1, min(BATCH_ROWS, MAX_LEAVES // size, max_rows))
            count = min(CHUNK_ROWS, max_rows) if batch_invariant else large
        for start in range(0, len(members), count):
            chunk = members[start : start + count]
            padded = chunk
            if batch_invariant:
                padded = _padded(chunk, count, step if flexible else 0)
            yield bucket, chunk, padded


def _padded(rows: Array, count: int, step: int) -> Array:
    """At most ``count`` rows, and their first row repeated up to a shape that gives each row the same result."""
    full = -(-len(rows) // step) * step if 0 < step <= count else count
    return rows if len(rows) >= full else np.concatenate([rows, np.repeat(rows[:1], full - len(rows))])
