"""The network of CDMPP's published implementation (13.77 M parameters at five leaves).

A plain ``TransformerEncoder`` over 164-wide leaves with torch's defaults, a flatten layer per leaf count, a
device branch, a decoder; dimensions of its released hyper-parameter file. The parameter counts per part match.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

LEAF_WIDTH, DEVICE_WIDTH, LATENT = 164, 8, 69
#: Leaf count of the published runs.
LEAVES = 5
#: Parameters per part at five leaves: encoder, flatten, device, decoder.
PARAMETERS = {"encoder": 8_611_372, "flatten": 3_312_015, "device": 43_983, "decoder": 1_803_271}


def _block(inputs: int, outputs: int, *, activation: bool = True) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)]
    return [*layers, nn.ReLU()] if activation else layers


def _flatten(leaves: int) -> nn.Sequential:
    return nn.Sequential(
        *_block(LEAF_WIDTH * leaves, 716, activation=False),
        *_block(716, 985),
        *_block(985, 985),
        *_block(985, 985),
        *_block(985, LATENT),
    )


class ReferenceNetwork(nn.Module):
    """Leaves (rows, N, 164) and device (rows, 8) to a transformed latency (rows,).

    Parameters
    ----------
    leaf_counts : iterable of int
        Values of N; each has a separate flatten layer, all other layers are shared.
    """

    def __init__(self, leaf_counts: Iterable[int] = (LEAVES,)) -> None:
        super().__init__()
        counts = sorted(set(leaf_counts))
        layer = nn.TransformerEncoderLayer(LEAF_WIDTH, nhead=4, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=11)
        self.flatten = nn.ModuleDict({str(count): _flatten(count) for count in counts})
        self.device = nn.Sequential(
            *_block(DEVICE_WIDTH, 128), *_block(128, 128), *_block(128, 128), *_block(128, LATENT)
        )
        # One normalisation serves both latents.
        self.norm = nn.BatchNorm1d(LATENT, affine=False)
        self.decoder = nn.Sequential(*_block(LATENT, 930), *_block(930, 930), *_block(930, 930), nn.Linear(930, 1))
        found = {name: sum(p.numel() for p in getattr(self, name).parameters()) for name in PARAMETERS}
        if counts == [LEAVES] and found != PARAMETERS:
            raise AssertionError(f"not the published dimensions: {found}, wanted {PARAMETERS}")

    def hidden(self, leaves: Tensor, device: Tensor) -> Tensor:
        """The decoder's last hidden layer, (rows, 930), the input of the domain regularisers."""
        flat = self.flatten[str(leaves.shape[1])](self.encoder(leaves).flatten(1))
        out: Tensor = self.decoder[:-1](self.norm(flat) + self.norm(self.device(device)))
        return out

    def output(self, hidden: Tensor) -> Tensor:
        """Transformed latency (rows,) of :meth:`hidden`."""
        return torch.nan_to_num(self.decoder[-1](hidden)).squeeze(1)

    def forward(self, leaves: Tensor, device: Tensor) -> Tensor:
        """Encode, flatten, add the device's latent, and decode, as published."""
        return self.output(self.hidden(leaves, device))


def reference_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """1000 * MSE + MAPE in the transformed label, as published."""
    relative = ((predicted - target).abs() / target.abs().clamp_min(1e-6)).mean()
    return 1000 * nn.functional.mse_loss(predicted, target) + relative


def published_cmd(source: Tensor, target: Tensor, moments: int = 5) -> Tensor:
    """CMD of the original's code: latents are not bounded and moments are not scaled."""
    mean_s, mean_t = source.mean(0), target.mean(0)
    total: Tensor = (mean_s - mean_t).norm()
    for k in range(2, moments + 1):
        gap = ((source - mean_s) ** k).mean(0) - ((target - mean_t) ** k).mean(0)
        total = total + gap.norm()
    return total


def published_mmd(source: Tensor, target: Tensor) -> Tensor:
    """Biased MMD with a sum of RBF kernels of gamma 1, 0.1 and 0.001."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squared = torch.cdist(a, b).square()
        return torch.stack([torch.exp(-gamma * squared) for gamma in (1.0, 0.1, 0.001)]).sum(0).mean()

    return kernel(source, source) + kernel(target, target) - 2 * kernel(source, target)


PUBLISHED_DISCREPANCIES = {"cmd": published_cmd, "mmd": published_mmd}
