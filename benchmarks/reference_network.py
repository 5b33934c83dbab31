"""The original's network, faithfully, for one leaf count: the yardstick of ``benchmarks.network``.

CDMPP as published: a post-norm transformer encoder of 11 layers and 4 heads on the 164 raw features of each
leaf, flattened per leaf count, a device branch that is added, and a decoder of batch-normalised layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEATURES, DEVICE_FEATURES = 164, 8
#: Trainable parameters at five leaves.
PARAMETERS_AT_5 = 13.77e6


def _dense(*widths: int) -> nn.Sequential:
    """Linear, batch norm, ReLU per layer."""
    layers: list[nn.Module] = []
    for a, b in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
    return nn.Sequential(*layers)


class ReferenceNetwork(nn.Module):
    """(programs, leaves, 164) and (programs, 8) to (programs,)."""

    def __init__(self, leaves: int = 5) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(FEATURES, 4, 2048, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 11, enable_nested_tensor=False)
        self.flatten = nn.Sequential(
            nn.Flatten(), nn.Linear(FEATURES * leaves, 716), nn.BatchNorm1d(716), _dense(716, 985, 985, 985, 69)
        )
        self.device = nn.Sequential(
            nn.Linear(DEVICE_FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
            nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 69),
        )  # fmt: skip
        self.norm = nn.BatchNorm1d(69, affine=False)
        self.decoder = nn.Sequential(_dense(69, 930, 930, 930), nn.Linear(930, 1))

    def forward(self, leaves: Tensor, device: Tensor) -> Tensor:
        """Normalised latency."""
        fused = self.norm(self.flatten(self.encoder(leaves))) + self.norm(self.device(device))
        return torch.nan_to_num(self.decoder(fused)).squeeze(1)
