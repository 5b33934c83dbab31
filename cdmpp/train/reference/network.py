"""The network of CDMPP's published implementation, its inputs and its label.

A plain ``TransformerEncoder`` over 164-wide leaves with torch's defaults, a flatten layer, a device branch, a decoder;
dimensions of its released hyper-parameter file. Inputs are PerStoreFeature of programs and eight numbers of a device.
The label is the Box-Cox transform of the latency, fitted on training rows.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cdmpp.devices.limits import unit_limits
from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.walk import build_ast
from cdmpp.model.nn.positions import encode_positions
from cdmpp.programs.frontends.per_store import extract
from cdmpp.programs.tvm_json import load
from cdmpp.utils.cache import cache_dir

Array = np.ndarray[Any, np.dtype[Any]]

LEAF_WIDTH, DEVICE_WIDTH, LATENT = 164, 8, 69
#: Leaves that the flatten layer reads, the length of the published padded mode.
LEAVES = 16


def _block(inputs: int, outputs: int, *, activation: bool = True) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)]
    return [*layers, nn.ReLU()] if activation else layers


class ReferenceNetwork(nn.Module):
    """Leaves and devices to a transformed latency. The flatten layer reads ``leaves`` leaves, zeros in place of missing
    ones, and none after the last. The other options are of the encoder."""

    def __init__(self, leaves: int = LEAVES, layers: int = 11, feed_forward: int = 2048, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(LEAF_WIDTH, 4, feed_forward, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=layers)
        self._flat = LEAF_WIDTH * leaves
        hidden = [*_block(716, 985), *_block(985, 985), *_block(985, 985), *_block(985, LATENT)]
        self.flatten = nn.Sequential(*_block(self._flat, 716, activation=False), *hidden)
        self.device = nn.Sequential(
            *_block(DEVICE_WIDTH, 128), *_block(128, 128), *_block(128, 128), *_block(128, LATENT)
        )
        # One normalisation serves both latents.
        self.norm = nn.BatchNorm1d(LATENT, affine=False)
        self.decoder = nn.Sequential(*_block(LATENT, 930), *_block(930, 930), *_block(930, 930), nn.Linear(930, 1))

    def latent(self, leaves: Sequence[Tensor], device: Tensor) -> Tensor:
        """The decoder's input (rows, 69), which the domain regularisers compare.

        ``leaves``, each (rows, leaves, 164), are programs of one leaf count each; no leaf is padded in the encoder.
        ``device``, (rows, 8), is of all rows, in the order of ``leaves``.
        """
        tokens = [(self.encoder(group) if group.shape[1] else group).flatten(1) for group in leaves]
        flat = torch.cat([nn.functional.pad(t, (0, self._flat - t.shape[1])) for t in tokens])
        out: Tensor = self.norm(self.flatten(flat)) + self.norm(self.device(device))
        return out

    def output(self, latent: Tensor) -> Tensor:
        """Transformed latency (rows,) of :meth:`latent`."""
        return torch.nan_to_num(self.decoder(latent)).squeeze(1)


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
class BoxCoxLabel:
    """Standardised Box-Cox transform of the latency in seconds."""

    exponent: float  # lambda of the transform; 0 is the logarithm
    mean: float  # of the transformed training latencies
    spread: float  # their standard deviation
    # Log of the shortest and longest training latency; :meth:`decode` clips to them with a margin of 1, because a
    # transformed value may have no inverse.
    lowest: float
    highest: float

    @classmethod
    def fit(cls, log_latency: Array, rng: np.random.Generator, exponent: float | None = None) -> BoxCoxLabel:
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
    """:func:`cdmpp.programs.frontends.per_store.extract`, cached on disk, one file per set of programs; the default
    folder is next to the evaluation's feature cache."""
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


def store_positions(texts: Sequence[str]) -> list[Array]:
    """Pre-order positions (stores,) of the rows of :func:`per_store_features` in the compact AST.

    TVM merges the stores of a buffer into one row and leaves constants out. The rows are in the order of the buffers'
    first stores; each has the position of the last store, whose features it has.
    """
    positions = []
    for text in texts:
        last: dict[int, int] = {}
        for leaf in build_ast(*load(text)).leaves:
            if leaf.reads or any(leaf.counts) or leaf.store.also_read:
                last[id(leaf.store.buffer)] = leaf.position
        positions.append(np.array(list(last.values()), dtype=np.int64))
    return positions


#: Level-1 cache in KiB and, of a CPU, level-2 cache in MiB of one core, by a part of the architecture's name.
_CACHES = {
    "sm_37": (16, 0.0),
    "sm_60": (24, 0.0),
    "sm_61": (48, 0.0),
    "sm_70": (128, 0.0),
    "sm_75": (64, 0.0),
    "sm_80": (192, 0.0),
    "gfx9": (16, 0.0),
    "Zen 3": (32, 0.5),
    "with AMX": (48, 2.0),
}


def device_row(device: DeviceSpec) -> list[float]:
    """The eight numbers: 1, clock, memory, shared memory or last cache of a CPU, L2, L1, bandwidth, fp32 rate.

    Scaled by the constants of the original's table; sizes are logarithms of whole units. Missing sizes are 0.
    """

    def size(value: float | None, unit: float, scale: float) -> float:
        whole = 0 if value is None else int(value / unit)
        return math.log2(whole) / math.log2(scale) if whole > 1 else 0.0

    l1_kib, l2_mib = next((sizes for name, sizes in _CACHES.items() if name in device.arch), (0, 0.0))
    cpu = device.kind == "cpu"
    return [
        1.0,
        device.clock_hz / 1e6 / 2000,
        size(device.sheet_memory_bytes, 1e9, 64),
        size(device.l2_bytes if cpu else unit_limits(device).shared_bytes, 2**10, 256),
        size(l2_mib if cpu else device.l2_bytes, 1 if cpu else 2**20, 64),
        size(l1_kib, 1, 256),
        size(device.mem_bandwidth_bytes_per_s, 1e9, 2048),
        device.peak_flops_fp32 / 1e12 / 12,
    ]


@dataclass(frozen=True)
class ReferencePrograms:
    """Programs by key in tensors of one leaf count each, normalised and with their positions."""

    leaves: dict[int, torch.Tensor]  # leaf count to (programs, leaf count, 164)
    count: Array  # (programs,): leaf count of each key
    slot: Array  # (programs,): its place in ``leaves``

    @staticmethod
    def of(features: Sequence[Array], positions: Sequence[Array], first_key: int, train: Array) -> ReferencePrograms:
        """Programs ``first_key ..``; the features' ranges are those of the keys ``train``."""
        rows = np.concatenate([features[key - first_key] for key in np.unique(train).tolist()])
        low, spread = rows.min(axis=0), np.ptp(rows, axis=0)
        scale = np.where(spread > 0, 1 / np.maximum(spread, 1e-12), 0.0)
        count, slot = (np.zeros(first_key + len(features), dtype=np.int64) for _ in range(2))
        count[first_key:] = [len(f) for f in features]
        leaves = {}
        for size in np.unique(count[first_key:]).tolist():
            members = first_key + np.flatnonzero(count[first_key:] == size)
            slot[members] = np.arange(len(members))
            stacked = np.stack([features[key - first_key] for key in members.tolist()])
            order = np.stack([positions[key - first_key] for key in members.tolist()])
            place = encode_positions("published", order, LEAF_WIDTH)
            leaves[size] = torch.from_numpy(((stacked - low) * scale).astype(np.float32) + place)
        return ReferencePrograms(leaves, count, slot)


def device_rows(devices: Sequence[DeviceSpec]) -> torch.Tensor:
    """:func:`device_row` of several devices, (devices, 8)."""
    rows = torch.tensor([device_row(d) for d in devices], dtype=torch.float32)
    return rows.reshape(len(devices), DEVICE_WIDTH)
