"""The network of CDMPP's published implementation, rebuilt for comparison (13.77 M parameters).

A plain ``TransformerEncoder`` over 164-wide leaves with torch's defaults, a flatten layer for one leaf
count, a device branch, a decoder; dimensions of its released hyper-parameter file. Nothing of its code is
used; the parameter count per part says that the dimensions are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAF_WIDTH, DEVICE_WIDTH, LATENT = 164, 8, 69
LEAVES = 5
#: Parameters per part at five leaves: encoder, flatten, device, decoder.
PARAMETERS = {"encoder": 8_611_372, "flatten": 3_312_015, "device": 43_983, "decoder": 1_803_271}


def _block(inputs: int, outputs: int, *, activation: bool = True) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)]
    return [*layers, nn.ReLU()] if activation else layers


class ReferenceNetwork(nn.Module):
    """Leaves (rows, 5, 164) and device (rows, 8) to a transformed latency (rows,)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(LEAF_WIDTH, nhead=4, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=11)
        self.flatten = nn.Sequential(
            *_block(LEAF_WIDTH * LEAVES, 716, activation=False), *_block(716, 985), *_block(985, 985),
            *_block(985, 985), *_block(985, LATENT),
        )  # fmt: skip
        self.device = nn.Sequential(
            *_block(DEVICE_WIDTH, 128), *_block(128, 128), *_block(128, 128), *_block(128, LATENT)
        )
        # One normalisation serves both latents.
        self.norm = nn.BatchNorm1d(LATENT, affine=False)
        self.decoder = nn.Sequential(
            *_block(LATENT, 930), *_block(930, 930), *_block(930, 930), nn.Linear(930, 1)
        )
        found = {name: sum(p.numel() for p in getattr(self, name).parameters()) for name in PARAMETERS}
        if found != PARAMETERS:
            raise AssertionError(f"not the published dimensions: {found}, wanted {PARAMETERS}")

    def forward(self, leaves: Tensor, device: Tensor) -> Tensor:
        """As published: encoder, flatten, add the device's latent, decode."""
        latent = self.norm(self.flatten(self.encoder(leaves).flatten(1)))
        out: Tensor = torch.nan_to_num(self.decoder(latent + self.norm(self.device(device)))).squeeze(1)
        return out


def reference_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """1000 * MSE + MAPE in the transformed label, as published."""
    relative = ((predicted - target).abs() / target.abs().clamp_min(1e-6)).mean()
    return 1000 * nn.functional.mse_loss(predicted, target) + relative
