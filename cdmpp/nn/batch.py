"""Many rows through the network at once.

Two ways in: :func:`predict_rows` for training, evaluation and benchmarks, where speed counts and the last
digit may differ between two batch sizes; :func:`predict_rows_alone` for the predictor, in chunks of one fixed
shape, so that an answer never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np
import torch

from cdmpp.nn.inputs import question_inputs
from cdmpp.nn.network import LEVELS, LatencyNetwork
from cdmpp.nn.store import ProgramStore

Array = np.ndarray[Any, np.dtype[Any]]
#: Called with row numbers and their last hidden layer.
Seen = Callable[[Array, torch.Tensor], None]

#: Leaves (padding counted) in one forward pass of :func:`predict_rows`, and leaf pairs of its attention.
MAX_LEAVES, MAX_PAIRS = 65_536, 1 << 21
#: Rows of a forward pass of :func:`predict_rows_alone`. Fixed: matrix kernels are chosen by shape, and their
#: last digits differ.
CHUNK_ROWS = 32


class QuestionRows(Protocol):
    """Rows as numbers, arrays of one length: keys into a store, indices of devices, codes."""

    @property
    def program(self) -> Array:
        """Keys into the store."""

    @property
    def device(self) -> Array:
        """Rows of the device matrix."""

    @property
    def backend(self) -> Array:
        """Index into BACKENDS."""

    @property
    def protocol(self) -> Array:
        """Index into PROTOCOLS."""

    @property
    def framework(self) -> Array:
        """Index into FRAMEWORKS, -1 where not known."""

    def __len__(self) -> int: ...

    def take(self, rows: Array) -> Self:
        """Some rows."""


class Inputs:
    """Network inputs of rows, made batch by batch from encoded programs."""

    def __init__(self, store: ProgramStore, device_matrix: Array) -> None:
        self.store, self.device_matrix = store, device_matrix
        self.tensors = {
            size: (torch.from_numpy(b.leaves), torch.from_numpy(b.positions), torch.from_numpy(b.mask))
            for size, b in store.buckets.items()
        }

    def reference(self, rows: QuestionRows) -> Array:
        """log(reference seconds) of rows."""
        out = np.empty(len(rows))
        for start in range(0, len(rows), 65536):
            part = rows.take(np.arange(start, min(start + 65536, len(rows))))
            out[start : start + len(part)] = self.questions(part)[2]
        return out

    def questions(self, rows: QuestionRows, device: Array | None = None) -> tuple[Array, Array, Array]:
        """:func:`question_inputs` of rows; ``device``, (rows, .), in place of their devices' figures."""
        return question_inputs(
            self.store.summary[rows.program], self.device_matrix[rows.device] if device is None else device,
            rows.backend, rows.protocol, rows.framework,
        )  # fmt: skip

    def forward(
        self, network: LatencyNetwork, rows: QuestionRows, device: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Array]:
        """Point and quantiles of rows, which must be sorted by bucket; and log(reference)."""
        latent, inputs, reference = self.encode(network, rows)
        point, quantiles = network.decode(latent, inputs, device)
        return point, quantiles, reference

    def encode(self, network: LatencyNetwork, rows: QuestionRows) -> tuple[torch.Tensor, torch.Tensor, Array]:
        """Latents and standardised inputs of rows, which must be sorted by bucket; and log(reference)."""
        inputs_np, logs_np, reference = self.questions(rows)
        inputs, logs = network.standardise(torch.from_numpy(inputs_np)), torch.from_numpy(logs_np)
        sizes = self.store.bucket[rows.program]
        latents = []
        edges = np.flatnonzero(np.diff(sizes)) + 1
        for chunk in np.split(np.arange(len(rows)), edges):
            if not len(chunk):
                continue
            leaves, positions, mask = self.tensors[int(sizes[chunk[0]])]
            slots = torch.from_numpy(self.store.slot[rows.program[chunk]])
            where = slice(int(chunk[0]), int(chunk[-1]) + 1)
            real = mask[slots]
            padding = None if bool(real.all()) else real
            latents.append(
                network.encode(leaves[slots], positions[slots], padding, inputs[where], logs[where])
            )
        return torch.cat(latents), inputs, reference


@torch.inference_mode()
def predict_rows(
    network: LatencyNetwork, inputs: Inputs, rows: QuestionRows, *,
    known: bool = True, embedding: Array | None = None, batch: int = 8192, seen: Seen | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Predict rows, in their order.

    Parameters
    ----------
    network : LatencyNetwork
        In evaluation mode.
    inputs : Inputs
    rows : QuestionRows
    known : bool
        False hides the devices: what the network says of a device that it never saw.
    embedding : int array, optional
        Per row of the device matrix, the device's index in the network's embedding (0: not trained on).
        Default: the matrix holds the training devices in their order.
    batch : int
        Most rows of a forward pass; long programs take fewer.
    seen : callable, optional
        Called with the numbers of the rows of every forward pass and their last hidden layer.

    Returns
    -------
    log_latency : (rows,)
    log_quantiles : (rows, len(LEVELS))
    """
    if embedding is None:
        embedding = np.arange(1, len(inputs.device_matrix) + 1)
    if not known:
        embedding = np.zeros_like(embedding)
    buckets = inputs.store.bucket[rows.program]
    order = np.argsort(buckets, kind="stable")
    point, levels = np.empty(len(rows)), np.empty((len(rows), len(LEVELS)))
    start = 0
    while start < len(rows):
        # The last row of a full batch has the most leaves: memory goes with them.
        size = int(buckets[order[min(start + batch, len(rows)) - 1]])
        count = max(1, min(batch, MAX_LEAVES // size, MAX_PAIRS // size**2))
        chosen = order[start : start + count]
        part = rows.take(chosen)
        device = torch.from_numpy(embedding[part.device].astype(np.int64))
        latent, standardised, reference = inputs.encode(network, part)
        p, q, hidden = network.decode_seen(latent, standardised, device)
        if seen is not None:
            seen(chosen, hidden)
        point[chosen] = p.double().numpy() + reference
        levels[chosen] = q.double().numpy() + reference[:, None]
        start += count
    return point, levels


@torch.inference_mode()
def predict_rows_alone(
    network: LatencyNetwork, inputs: Inputs, rows: QuestionRows, *, embedding: Array, seen: Seen | None = None
) -> tuple[Array, Array]:
    """:func:`predict_rows`, each row as if it were asked alone: equal to the last digit in any company.

    ``seen`` gets a hidden layer of :data:`CHUNK_ROWS` rows, however few they are for: what it computes shall
    not depend on their number either.
    """
    device = inputs.device_matrix[rows.device]
    known = embedding[rows.device].astype(np.int64)
    questions, logs, reference = question_inputs(
        inputs.store.summary[rows.program], device, rows.backend, rows.protocol, rows.framework
    )
    point, levels = np.empty(len(rows)), np.empty((len(rows), len(LEVELS)))
    sizes = inputs.store.bucket[rows.program]
    for size, (leaves, positions, mask) in inputs.tensors.items():
        members = np.flatnonzero(sizes == size)
        for start in range(0, len(members), CHUNK_ROWS):
            chosen = members[start : start + CHUNK_ROWS]
            # A short chunk repeats its first row: the shape of the computation stays the same.
            padded = np.concatenate([chosen, np.repeat(chosen[:1], CHUNK_ROWS - len(chosen))])
            slots = torch.from_numpy(inputs.store.slot[rows.program[padded]])
            standardised = network.standardise(torch.from_numpy(questions[padded]))
            latent = network.encode(
                leaves[slots], positions[slots], mask[slots], standardised, torch.from_numpy(logs[padded])
            )
            p, q, hidden = network.decode_seen(latent, standardised, torch.from_numpy(known[padded]))
            if seen is not None:
                seen(chosen, hidden)
            point[chosen] = p[: len(chosen)].double().numpy() + reference[chosen]
            levels[chosen] = q[: len(chosen)].double().numpy() + reference[chosen, None]
    return point, levels
