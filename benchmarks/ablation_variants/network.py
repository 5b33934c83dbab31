"""Variants of the network: other positional encodings, and absolute device numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.encoder import Part
from cdmpp.model.nn.inputs import DEVICE_LOGS, INPUT_WIDTH
from cdmpp.model.nn.network import LatencyNetwork

#: Differences of positions beyond this share one bias.
MAX_DISTANCE = 24

Variant = Literal["no positions", "structural", "absolute"]


class NoPositions(nn.Module):
    """A positional encoding that adds nothing."""

    def forward(self, positions: Tensor) -> Tensor:
        """(rows, leaves) -> (rows, leaves, 1)."""
        return torch.zeros(*positions.shape, 1)


class NoPositionsNetwork(LatencyNetwork):
    """The network without positions of leaves."""

    def __init__(self, config: NetworkConfig, devices: int) -> None:
        super().__init__(config, devices)
        self.encoding = NoPositions()


class StructuralBias(nn.Module):
    """A learned bias of the attention between two leaves, by the clipped difference of their positions.

    The sign of the difference is kept, because order matters. The bias starts at zero: an untrained network
    attends as if it had no positions.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Embedding(2 * MAX_DISTANCE + 1, heads)
        nn.init.zeros_(self.bias.weight)

    def forward(self, positions: Tensor) -> Tensor:
        """(rows, leaves) -> (rows, heads, leaves, leaves), from the attending leaf to the attended one."""
        difference = positions[:, None, :] - positions[:, :, None]
        index = difference.clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE
        out: Tensor = self.bias(index.long()).permute(0, 3, 1, 2)
        return out


class StructuralNetwork(NoPositionsNetwork):
    """The network with positions as an attention bias."""

    def __init__(self, config: NetworkConfig, devices: int) -> None:
        super().__init__(config, devices)
        self.structure = StructuralBias(config.heads)

    def attention_bias(self, part: Part) -> Tensor | None:
        """Bias of a part, with a large negative value for padded leaves."""
        bias: Tensor = self.structure(part.positions.expand(part.shape))
        return bias if part.mask is None else bias.masked_fill(~part.mask[:, None, None, :], -1e4)


class AbsoluteNetwork(LatencyNetwork):
    """The network with the logarithms of the device's numbers beside the ratios."""

    def __init__(self, config: NetworkConfig, devices: int) -> None:
        if config.schedule:
            raise ValueError("the absolute variant was only defined for operators: set network.schedule = false")
        super().__init__(config, devices)
        logs = len(DEVICE_LOGS)
        self.condition = nn.Linear(INPUT_WIDTH + logs, config.width)
        self.head_in = nn.Linear(self.head_in.in_features + logs, config.head_width)

    def encode_parts(self, parts: Sequence[Part], inputs: Tensor, logs: Tensor, *, multiple: int = 1) -> Tensor:
        """See :meth:`LatencyNetwork.encode_parts`."""
        # The logarithms are centred and span about ten powers of two.
        scaled = logs * 0.2
        latent = super().encode_parts(parts, torch.cat((inputs, scaled), dim=-1), logs, multiple=multiple)
        return torch.cat((latent, scaled), dim=-1)


NETWORKS: dict[Variant, type[LatencyNetwork]] = {
    "no positions": NoPositionsNetwork,
    "structural": StructuralNetwork,
    "absolute": AbsoluteNetwork,
}
