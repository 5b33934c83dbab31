"""What a training step computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdmpp.nn.batch import Inputs
from cdmpp.nn.encoder import Part
from cdmpp.nn.network import LatencyNetwork
from cdmpp.training.dataset import Rows

Array = np.ndarray[Any, np.dtype[Any]]


def latents(
    network: LatencyNetwork, inputs: Inputs, rows: Rows, *, multiple: int = 1
) -> tuple[Tensor, Tensor, Array]:
    """Encoder's latents of rows, which must be sorted by bucket; ``multiple`` as in
    :meth:`cdmpp.nn.network.LatencyNetwork.encode_parts`.

    Returns
    -------
    latent : (rows, .)
    questions : (rows, INPUT_WIDTH), standardised
    reference : float64, (rows,), log(reference seconds)
    """
    asked, logs, reference = inputs.questions(rows)
    standard = network.standardise(torch.from_numpy(asked))
    sizes = inputs.store.bucket[rows.program]
    parts = []
    for chunk in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(sizes)) + 1):
        leaves, positions, mask = inputs.tensors[int(sizes[chunk[0]])]
        slots = torch.from_numpy(inputs.store.slot[rows.program[chunk]])
        real = mask[slots]
        parts.append(Part(leaves[slots], positions[slots], None if bool(real.all()) else real))
    latent = network.encode_parts(parts, standard, torch.from_numpy(logs), multiple=multiple)
    return latent, standard, reference
