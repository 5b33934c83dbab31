"""Weights of a trained network for a network with more input columns and other devices.

Columns and devices are matched by name. A new column has weights of 0, so the outputs do not change. A new device
starts as "not trained on".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cdmpp.features.schedule import SCHEDULE_COLUMNS
from cdmpp.features.schema import COLUMNS
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.inputs import DEVICE_LOGS, QUESTION_COLUMNS, SUMMARY_COLUMNS

Array = np.ndarray[Any, np.dtype[Any]]
#: Names of the input columns: ``leaf`` and ``inputs`` (of :func:`cdmpp.model.nn.inputs.query_inputs`).
Columns = Mapping[str, Sequence[str]]


def network_columns(config: NetworkConfig) -> dict[str, list[str]]:
    """Names of the columns that this version's networks read, as the manifest of a model has them."""
    return {"leaf": [*COLUMNS, *SCHEDULE_COLUMNS][: config.leaf_width], "inputs": [*SUMMARY_COLUMNS, *QUESTION_COLUMNS]}


def transferred(
    arrays: Mapping[str, Array],
    config: NetworkConfig,
    columns: Columns,
    devices: Sequence[str],
    new_devices: Sequence[str],
    fitted: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """State of a network with this version's columns and ``new_devices``.

    Parameters
    ----------
    arrays : mapping of str to array
        State of the trained network.
    config : NetworkConfig
        Sizes of both networks.
    columns : mapping
        Columns of the trained network, from its manifest.
    devices : sequence of str
        Devices of the trained network; "" for one that was held out.
    new_devices : sequence of str
    fitted : mapping, optional
        ``leaf_mean``, ``leaf_scale``, ``input_mean``, ``input_scale`` of the new training data. A column that is new
        or was constant takes them, the others keep theirs. Default: mean 0, scale 1 for new columns.

    Raises
    ------
    ValueError
        The trained network reads a column that this version does not compute, or its arrays have other shapes.
    """
    out = {name: np.array(value) for name, value in arrays.items()}
    wanted = network_columns(config)
    logs = [f"device_{name}" for name in DEVICE_LOGS]
    latent, own = _head_columns(arrays, config, len(columns["inputs"]))
    for axis in ("leaf", "inputs"):
        lost = [name for name in columns[axis] if name not in wanted[axis]]
        if lost:
            raise ValueError(f"the network reads columns that this version does not compute: {', '.join(lost[:5])}")
    spread: dict[str, Array] = {}
    for what, axis in (("leaf", "leaf"), ("input", "inputs")):
        known = {name: i for i, name in enumerate(columns[axis])}
        position = np.array([known.get(name, -1) for name in wanted[axis]])
        # A column without spread in the old data has scale 0: its weights were never trained.
        used = (position >= 0) & (arrays[f"{what}_scale"][position] != 0)
        for suffix, default in (("mean", 0.0), ("scale", 1.0)):
            name = f"{what}_{suffix}"
            old = np.where(position >= 0, arrays[name][position], default)
            out[name] = (old if fitted is None else np.where(used, old, fitted[name])).astype(np.float32)
        spread[axis] = used
    for name, order_old, order_new, used in (
        (
            "leaf_in.weight",
            [*columns["leaf"], *logs],
            [*wanted["leaf"], *logs],
            [*spread["leaf"], *(True for _ in logs)],
        ),
        ("condition.weight", columns["inputs"], wanted["inputs"], spread["inputs"]),
        ("leaf_times.call.weight", columns["inputs"], wanted["inputs"], spread["inputs"]),
        (
            "head_in.weight",
            [*latent, *columns["inputs"], *own],
            [*latent, *wanted["inputs"], *own],
            [*(True for _ in latent), *spread["inputs"], *(True for _ in own)],
        ),
    ):
        if name in arrays:
            out[name] = _placed(name, arrays[name], order_old, order_new, np.asarray(used))
    rows = {name: i + 1 for i, name in enumerate(devices) if name}
    out["device.weight"] = arrays["device.weight"][[0, *(rows.get(name, 0) for name in new_devices)]].copy()
    return out


def _head_columns(arrays: Mapping[str, Array], config: NetworkConfig, inputs: int) -> tuple[list[str], list[str]]:
    """Names for the columns of the head's input before and behind the query's."""
    before = arrays["head_in.weight"].shape[1] - inputs - config.device_width
    return [f"latent_{i}" for i in range(before)], [f"embedding_{i}" for i in range(config.device_width)]


def _placed(name: str, weight: Array, old: Sequence[str], new: Sequence[str], used: Array) -> Array:
    if weight.shape[1] != len(old):
        raise ValueError(f"{name} has {weight.shape[1]} columns, not {len(old)}")
    known = {column: i for i, column in enumerate(old)}
    out = np.zeros((len(weight), len(new)), dtype=np.float32)
    for i, column in enumerate(new):
        if column in known and used[i]:
            out[:, i] = weight[:, known[column]]
    return out
