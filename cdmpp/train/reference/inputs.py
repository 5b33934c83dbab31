"""Inputs of the original network: PerStoreFeature of programs, and eight numbers of a device."""

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

from cdmpp.devices.spec import DeviceSpec
from cdmpp.model.nn.positions import published_encoding
from cdmpp.programs.frontends.per_store import extract
from cdmpp.train.evaluation.cache import cache_dir
from cdmpp.train.reference.network import DEVICE_WIDTH, LEAF_WIDTH

Array = np.ndarray[Any, np.dtype[Any]]


def per_store_features(texts: Sequence[str], folder: Path | None = None) -> list[Array]:
    """:func:`cdmpp.programs.frontends.per_store.extract`, cached on disk, one file per set of programs.

    Parameters
    ----------
    texts : sequence of str
    folder : Path, optional
        Cache folder; default: next to the evaluation's feature cache.
    """
    names = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    digest = hashlib.sha256("".join(names).encode()).hexdigest()[:24]
    path = (folder or cache_dir() / "per-store") / f"{digest}.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as kept:
            return np.split(kept["rows"], np.cumsum(kept["counts"])[:-1])
    found = extract(texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.stem}.{os.getpid()}.part.npz")
    np.savez_compressed(aside, rows=np.concatenate(found), counts=[len(f) for f in found])
    aside.replace(path)
    return found


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
        size(device.memory_bytes, 1e9, 64),
        0.0,
        size(device.l2_bytes, 2**20, 64),
        0.0,
        size(device.mem_bandwidth_bytes_per_s, 1e9, 2048),
        device.peak_flops_fp32 / 1e12 / 12,
    ]


@dataclass(frozen=True)
class Programs:
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
    def of(features: Sequence[Array], first_key: int, train: Array) -> Programs:
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
            place = published_encoding(torch.arange(size), LEAF_WIDTH)
            leaves[size] = torch.from_numpy(((stacked - low) * scale).astype(np.float32)) + place
        return Programs(leaves, count, slot)


def device_rows(devices: Sequence[DeviceSpec]) -> torch.Tensor:
    """:func:`device_row` of several devices, (devices, 8)."""
    rows = torch.tensor([device_row(d) for d in devices], dtype=torch.float32)
    return rows.reshape(len(devices), DEVICE_WIDTH)
