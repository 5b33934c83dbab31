"""The network of CDMPP's published implementation (13.77 M parameters at five leaves), its inputs and its label.

A plain ``TransformerEncoder`` over 164-wide leaves with torch's defaults, a flatten layer per leaf count, a
device branch, a decoder; dimensions of its released hyper-parameter file. The parameter counts per part match.
Inputs are PerStoreFeature of programs and eight numbers of a device. The label is the Box-Cox transform of the latency,
fitted on training rows.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cdmpp.devices.spec import DeviceSpec
from cdmpp.model.nn.positions import encode_positions
from cdmpp.programs.frontends.per_store import extract
from cdmpp.utils.cache import cache_dir

Array = np.ndarray[Any, np.dtype[Any]]

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
        parameters = {name: sum(p.numel() for p in getattr(self, name).parameters()) for name in PARAMETERS}
        if counts == [LEAVES] and parameters != PARAMETERS:
            raise AssertionError(f"not the published dimensions: {parameters}, wanted {PARAMETERS}")

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


#: Rows that the transform is fitted on, at most.
FIT_ROWS = 100_000


@dataclass(frozen=True)
class BoxCox:
    """Standardised Box-Cox transform of the latency in seconds.

    Attributes
    ----------
    exponent : float
        Lambda of the transform; 0 is the logarithm.
    mean, spread : float
        Mean and standard deviation of the transformed training latencies.
    lowest, highest : float
        Log of the shortest and longest training latency; :meth:`decode` clips to them with a margin of 1, because
        a transformed value may have no inverse.
    """

    exponent: float
    mean: float
    spread: float
    lowest: float
    highest: float

    @classmethod
    def fit(cls, log_latency: Array, rng: np.random.Generator, exponent: float | None = None) -> BoxCox:
        """Fit on a seeded sample of the log latencies of training rows; ``exponent`` by maximum likelihood."""
        sample = rng.choice(log_latency, min(len(log_latency), FIT_ROWS), replace=False)
        if exponent is None:
            from scipy.stats import boxcox_normmax

            exponent = float(boxcox_normmax(np.exp(sample), method="mle"))
        values = _transform(sample, exponent)
        spread = float(max(values.std(), 1e-9))
        return cls(exponent, float(values.mean()), spread, float(log_latency.min()), float(log_latency.max()))

    def encode(self, log_latency: Array) -> Array:
        """Labels of log latencies."""
        return np.asarray((_transform(log_latency, self.exponent) - self.mean) / self.spread)

    def decode(self, label: Array) -> Array:
        """Log latencies of labels."""
        values = label * self.spread + self.mean
        if self.exponent:
            with np.errstate(invalid="ignore", divide="ignore"):
                inside = values * self.exponent + 1
                values = np.log(np.maximum(inside, 1e-300)) / self.exponent
        return np.asarray(np.clip(values, self.lowest - 1, self.highest + 1))


def _transform(log_latency: Array, exponent: float) -> Array:
    return np.expm1(log_latency * exponent) / exponent if exponent else log_latency


def per_store_features(texts: Sequence[str], folder: Path | None = None, *, gpu: bool = False) -> list[Array]:
    """:func:`cdmpp.programs.frontends.per_store.extract`, cached on disk, one file per set of programs.

    Parameters
    ----------
    texts : sequence of str
    folder : Path, optional
        Cache folder; default: next to the evaluation's feature cache.
    gpu : bool
    """
    names = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    digest = hashlib.sha256("".join([*names, "gpu" * gpu]).encode()).hexdigest()[:24]
    path = (folder or cache_dir() / "per-store") / f"{digest}.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as kept:
            return np.split(kept["rows"], np.cumsum(kept["counts"])[:-1])
    features = extract(texts, gpu=gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.stem}.{os.getpid()}.part.npz")
    np.savez_compressed(aside, rows=np.concatenate(features), counts=[len(f) for f in features])
    aside.replace(path)
    return features


def device_row(device: DeviceSpec) -> list[float]:
    """The eight numbers: 1, clock, memory, shared memory or L3, L2, L1, bandwidth, fp32 rate.

    Scaled by the constants of the original's table; sizes are logarithms of whole units. Figures that our
    specifications lack (shared memory, L1) are 0, like missing values in the original.
    """

    def size(value: float | None, unit: float, scale: float) -> float:
        whole = 0 if value is None else int(value / unit)
        return math.log2(whole) / math.log2(scale) if whole > 1 else 0.0

    return [
        1.0,
        device.clock_hz / 1e6 / 2000,
        size(device.sheet_memory_bytes, 1e9, 64),
        0.0,
        size(device.l2_bytes, 2**20, 64),
        0.0,
        size(device.mem_bandwidth_bytes_per_s, 1e9, 2048),
        device.peak_flops_fp32 / 1e12 / 12,
    ]


@dataclass(frozen=True)
class ReferencePrograms:
    """Programs by key in tensors of one leaf count each, normalised and with their positions.

    Attributes
    ----------
    leaves : dict of leaf count to (programs, leaf count, 164)
    count, slot : (programs,) int
        Leaf count of each key (0: it has no features) and its place in ``leaves``.
    """

    leaves: dict[int, torch.Tensor]
    count: Array
    slot: Array

    @staticmethod
    def of(features: Sequence[Array], first_key: int, train: Array) -> ReferencePrograms:
        """Programs ``first_key ..``; the features' ranges are those of the keys ``train``."""
        keys = np.unique(train)
        rows = np.concatenate([features[key - first_key] for key in keys.tolist()])
        low, spread = rows.min(axis=0), np.ptp(rows, axis=0)
        scale = np.where(spread > 0, 1 / np.maximum(spread, 1e-12), 0.0)
        count, slot = (np.zeros(first_key + len(features), dtype=np.int64) for _ in range(2))
        count[first_key:] = [len(f) for f in features]
        leaves = {}
        for size in np.unique(count[first_key:]).tolist():
            members = np.flatnonzero(count == size)
            if size == 0:
                continue
            slot[members] = np.arange(len(members))
            stacked = np.stack([features[key - first_key] for key in members.tolist()])
            place = torch.from_numpy(encode_positions("published", np.arange(size), LEAF_WIDTH))
            leaves[size] = torch.from_numpy(((stacked - low) * scale).astype(np.float32)) + place
        return ReferencePrograms(leaves, count, slot)


def device_rows(devices: Sequence[DeviceSpec]) -> torch.Tensor:
    """:func:`device_row` of several devices, (devices, 8)."""
    rows = torch.tensor([device_row(d) for d in devices], dtype=torch.float32)
    return rows.reshape(len(devices), DEVICE_WIDTH)
