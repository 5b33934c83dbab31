"""Batches of rows through the torch network, for training. Predictions: :mod:`cdmpp.model.inference.engine`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cdmpp.model.nn.config import LEVELS
from cdmpp.model.nn.network import LatencyNetwork, PaddedRows
from cdmpp.model.nn.rows import ProgramStore, QueryRows, RowInputs

Array = np.ndarray[Any, np.dtype[Any]]
#: Leaves (padding counted) in one forward pass of :func:`predict_rows`, and leaf pairs of its attention.
MAX_LEAVES, MAX_PAIRS = 65_536, 1 << 21


class NetworkInputs(RowInputs):
    """Network inputs of rows, computed batch by batch from encoded programs.

    The leaves of all programs are on the device ``on``, where the network must be; a batch moves their indices.
    """

    def __init__(self, store: ProgramStore, device_matrix: Array, on: str = "cpu") -> None:
        super().__init__(store, device_matrix)
        self.on = torch.device(on)
        self.leaves = {size: torch.from_numpy(bucket.leaves).to(self.on) for size, bucket in store.buckets.items()}

    def encode(
        self, network: LatencyNetwork, rows: QueryRows, *, multiple: int = 1, device: Array | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, Array]:
        """Latents, inputs and references of rows in :meth:`ProgramStore.order`.

        Latents: (rows, .). Inputs: (rows, INPUT_WIDTH), standardised. References: float64, (rows,), log seconds.
        ``multiple``: see :meth:`cdmpp.model.nn.network.LatencyNetwork.encode_parts`. ``device``: (rows, .), replaces
        the figures of the rows' devices.
        """
        query_inputs, logs, reference = self.queries(rows, device)
        standard = network.standardise(torch.from_numpy(query_inputs).to(self.on))
        sizes = self.store.bucket[rows.program]
        parts, figures = [], self.device_matrix[rows.device] if device is None else device
        for at in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(sizes)) + 1):
            size, slots = int(sizes[at[0]]), self.store.slot[rows.program[at]]
            bucket = self.store.buckets[size]
            leaves = self.leaves[size][torch.from_numpy(slots).to(self.on), :, : network.config.stored_width]
            if network.config.schedule:
                launches = torch.from_numpy(self.launches(rows.take(at), figures[at])).to(self.on)
                leaves = torch.cat((leaves, launches), dim=2)
            real = bucket.mask[slots]
            mask = None if real.all() else torch.from_numpy(real).to(self.on)
            parts.append(PaddedRows(leaves, torch.from_numpy(bucket.positions[slots]), mask))
        device_logs = torch.from_numpy(logs).to(self.on)
        return network.encode_parts(parts, standard, device_logs, multiple=multiple), standard, reference


@torch.inference_mode()
def predict_rows(
    network: LatencyNetwork,
    inputs: NetworkInputs,
    rows: QueryRows,
    *,
    known: bool = True,
    embedding: Array | None = None,
    batch: int = 8192,
) -> tuple[Array, Array]:
    """Log latency, (rows,), and log quantiles, (rows, len(LEVELS)), of rows in their order.

    The network is in evaluation mode. ``known``: False replaces all devices by the embedding of an unseen device.
    ``embedding``: per row of the device matrix, the device's index in the network's embedding (0: not trained on);
    default: the matrix holds the training devices in their order. ``batch``: maximum number of rows of a forward pass;
    fewer for long programs.
    """
    if embedding is None:
        embedding = np.arange(1, len(inputs.device_matrix) + 1)
    if not known:
        embedding = np.zeros_like(embedding)
    buckets = inputs.store.bucket[rows.program]
    order = inputs.store.order(rows.program)
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
        p, q = network.decode(latent, standardised, device)
        point[chosen] = p.double().numpy() + reference
        levels[chosen] = q.double().numpy() + reference[:, None]
        start += count
    return point, levels
