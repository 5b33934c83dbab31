"""The arrays of a trained network by name, without torch.

:mod:`cdmpp.model.inference.engine` predicts from them with ONNX Runtime. Training and inspection of layers use
:attr:`Weights.network`, which needs torch.

:func:`transferred` makes weights for a network with more input columns and other devices. Columns and devices are
matched by name. A new column has weights of 0, so the outputs do not change. A new device starts as "not trained on".
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import MissingDependencyError, install_hint
from cdmpp.features.schedule import SCHEDULE_COLUMNS
from cdmpp.features.schema import COLUMNS
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.inputs import DEVICE_LOGS, QUERY_COLUMNS, SUMMARY_COLUMNS
from cdmpp.model.nn.launch_inputs import LAUNCH_INPUTS
from cdmpp.model.nn.layers import shapes

if TYPE_CHECKING:
    from cdmpp.model.nn.network import LatencyNetwork

Array = np.ndarray[Any, np.dtype[Any]]

#: Columns of the projection of the last hidden layer.
VIEW_COLUMNS = 32
#: Arrays that are stored and not trained.
_FIXED = ("leaf_mean", "leaf_scale", "input_mean", "input_scale")


class Weights:
    """Arrays of a network by name. Safe to share between threads; do not write to the arrays.

    ``devices``: number of training devices. ``arrays``: float32 state of the network. Raises ValueError where an array
    is missing, superfluous or of another shape than the configuration asks for.
    """

    def __init__(self, config: NetworkConfig, devices: int, arrays: Mapping[str, Array]) -> None:
        wanted = shapes(config, devices)
        for name in (*wanted, *arrays):
            if name not in arrays or name not in wanted:
                raise ValueError(f"the weights {'lack' if name in wanted else 'have a superfluous'} {name}")
            if arrays[name].shape != wanted[name]:
                raise ValueError(f"{name} has the shape {arrays[name].shape}, not {wanted[name]}")
        self.config, self.devices = config, devices
        self.arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in arrays.items()}
        self._lock = threading.Lock()
        self._network: LatencyNetwork | None = None

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(array.size for name, array in self.arrays.items() if not name.endswith(_FIXED))

    @property
    def network(self) -> LatencyNetwork:
        """The network in torch, in evaluation mode; made at first use."""
        with self._lock:
            if self._network is None:
                self._network = _torch_network(self)
            return self._network

    def standardise(self, inputs: Array) -> Array:
        """Inputs in units of the training set's standard deviation, clipped to ±6, as in the network."""
        mean, scale = self.arrays["input_mean"], self.arrays["input_scale"]
        return np.asarray(((inputs - mean) * scale).clip(-6.0, 6.0))

    def view(self) -> Array:
        """Fixed random projection of the last hidden layer, scaled by the layer's final norm.

        It keeps distances well enough and needs neither data nor storage.
        """
        norm = f"head.{self.config.head_layers}"
        square = self.arrays[f"{norm}.weight"] ** 2 + self.arrays[f"{norm}.bias"] ** 2
        width = self.config.head_width
        scale = np.float32(np.sqrt(square.mean()) * np.sqrt(width))
        return np.asarray(_projection(width) / scale, dtype=np.float32)


@cache
def _projection(width: int) -> Array:
    # RandomState guarantees its numbers across versions, so a stored adapter stays valid.
    drawn = np.random.RandomState(0).standard_normal((width, VIEW_COLUMNS))
    return drawn.astype(np.float32)


def _torch_network(weights: Weights) -> LatencyNetwork:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(
            "the network itself needs torch: training and its layers",
            hint=f"{install_hint('train')}; predictions go without it",
        ) from None
    from cdmpp.model.nn.network import LatencyNetwork

    network = LatencyNetwork(weights.config, weights.devices)
    network.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.arrays.items()})
    return network.eval()


#: Names of the input columns: ``leaf`` and ``inputs`` (of :func:`cdmpp.model.nn.inputs.query_inputs`).
Columns = Mapping[str, Sequence[str]]


def network_columns(config: NetworkConfig) -> dict[str, list[str]]:
    """Names of the columns that this version's networks read, as the manifest of a model has them."""
    leaf = [*COLUMNS, *SCHEDULE_COLUMNS][: config.stored_width]
    launch = [f"launch_{name}" for name in LAUNCH_INPUTS] if config.schedule else []
    return {"leaf": leaf + launch, "inputs": [*SUMMARY_COLUMNS, *QUERY_COLUMNS]}


def transferred(
    arrays: Mapping[str, Array],
    config: NetworkConfig,
    columns: Columns,
    devices: Sequence[str],
    new_devices: Sequence[str],
    fitted: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """State of a network with this version's columns and ``new_devices``, from ``arrays``, the state of a trained one.

    ``config``: sizes of both networks. ``columns``: columns of the trained network, from its manifest. ``devices``: of
    the trained network; "" for one that was held out. ``fitted``: ``leaf_mean``, ``leaf_scale``, ``input_mean``,
    ``input_scale`` of the new training data. A column that is new or was constant takes them, the others keep theirs.
    Default: mean 0, scale 1 for new columns.

    Raises ValueError where the trained network reads a column that this version does not compute, or its arrays have
    other shapes.
    """
    out = {name: np.array(value) for name, value in arrays.items()}
    wanted = network_columns(config)
    logs = [f"device_{name}" for name in DEVICE_LOGS]
    latent, embedding = _head_columns(arrays, config, len(columns["inputs"]))
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
    leaf = ([*columns["leaf"], *logs], [*wanted["leaf"], *logs], [*spread["leaf"], *(True for _ in logs)])
    for name, order_old, order_new, used in (
        ("leaf_in.weight", *leaf),
        ("leaf_hidden.in.weight", *leaf),
        ("condition.weight", columns["inputs"], wanted["inputs"], spread["inputs"]),
        ("leaf_times.call.weight", columns["inputs"], wanted["inputs"], spread["inputs"]),
        (
            "head_in.weight",
            [*latent, *columns["inputs"], *embedding],
            [*latent, *wanted["inputs"], *embedding],
            [*(True for _ in latent), *spread["inputs"], *(True for _ in embedding)],
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
