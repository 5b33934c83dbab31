"""The arrays of a trained network by name, without torch.

:mod:`cdmpp.model.inference.engine` predicts from them with ONNX Runtime. Training, tuning and inspection of layers use
:attr:`Weights.network`, which needs torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import MissingDependencyError, install_hint
from cdmpp.model.nn.config import LEVELS, NetworkConfig, member_prefixes
from cdmpp.model.nn.constants import ADD, OVERLAP
from cdmpp.model.nn.inputs import DEVICE_LOGS, INPUT_WIDTH

if TYPE_CHECKING:
    from cdmpp.model.nn.network import LatencyNetwork

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]

#: Weights tuned on one device, by name: its vector ("device"), the last norm and the output layer.
Tuned = dict[str, Array]

#: Columns of the projection of the last hidden layer.
VIEW_COLUMNS = 32
#: Arrays that are stored and not trained.
_FIXED = ("leaf_mean", "leaf_scale", "input_mean", "input_scale")


class Weights:
    """Arrays of a network by name. Safe to share between threads; do not write to the arrays.

    Parameters
    ----------
    config : NetworkConfig
    devices : int
        Number of training devices.
    arrays : mapping of str to float32 array
        State of the network.

    Raises
    ------
    ValueError
        An array is missing, superfluous or of another shape than the configuration asks for.
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
        """The network in torch, in evaluation mode; made at first use.

        Raises
        ------
        MissingDependencyError
            torch is not installed.
        """
        with self._lock:
            if self._network is None:
                self._network = _torch_network(self)
            return self._network

    def standardise(self, inputs: Array) -> Array:
        """Inputs in units of the training set's standard deviation, clipped to ±6, as in the network."""
        mean, scale = self.arrays["input_mean"], self.arrays["input_scale"]
        return np.asarray(((inputs - mean) * scale).clip(-6.0, 6.0))

    def tuned(self, tuned: Tuned) -> Weights:
        """A copy with tuned arrays; the tuned device has index 0 in the embedding.

        Raises
        ------
        ValueError
            An array is missing, or of another network's shape.
        """
        arrays = dict(self.arrays)
        for short, name in tuned_names(self.config).items():
            if short not in tuned:
                raise ValueError(f"tuned weights lack {short}")
            if short == "device":
                if tuned[short].shape != arrays[name].shape[1:]:
                    raise ValueError(f"tuned device has the shape {tuned[short].shape}")
                arrays[name] = np.concatenate([tuned[short][None], arrays[name][1:]])
            else:
                arrays[name] = tuned[short]
        return Weights(self.config, self.devices, arrays)

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


def tuned_names(config: NetworkConfig) -> dict[str, str]:
    """Names of the weights that are tuned, by their short names. Of "device" only row 0 is."""
    norm = f"head.{config.head_layers}"
    return {
        "device": "device.weight",
        "norm_weight": f"{norm}.weight",
        "norm_bias": f"{norm}.bias",
        "out_weight": "out.weight",
        "out_bias": "out.bias",
    }


def shapes(config: NetworkConfig, devices: int) -> dict[str, Shape]:
    """Shape of every array of a network."""
    member = _member_shapes(config, devices)
    return {prefix + name: shape for prefix in member_prefixes(config) for name, shape in member.items()}


def _member_shapes(config: NetworkConfig, devices: int) -> dict[str, Shape]:
    width, head, leaf = config.width, config.head_width, config.leaf_width
    out: dict[str, Shape] = {
        "leaf_mean": (leaf,),
        "leaf_scale": (leaf,),
        "input_mean": (INPUT_WIDTH,),
        "input_scale": (INPUT_WIDTH,),
        "device.weight": (devices + 1, config.device_width),
    }

    def linear(name: str, inputs: int, outputs: int) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str, columns: int) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = (columns,), (columns,)

    linear("leaf_in", leaf + len(DEVICE_LOGS), width)
    linear("condition", INPUT_WIDTH, width)
    for layer in (f"layers.{i}" for i in range(config.layers)):
        norm(f"{layer}.norm_attention", width)
        linear(f"{layer}.qkv", width, 3 * width)
        linear(f"{layer}.out", width, width)
        norm(f"{layer}.norm_feed", width)
        linear(f"{layer}.feed.0", width, config.feed_forward)
        linear(f"{layer}.feed.2", config.feed_forward, width)
    norm("pool_norm", width)
    linear("pool_score", width, config.heads)
    if config.schedule:
        norm("leaf_times.norm", width)
        linear("leaf_times.hidden", width, width)
        linear("leaf_times.costs", width, len(OVERLAP) + len(ADD) + 1)
        linear("leaf_times.call", INPUT_WIDTH, 1)
        linear("timed", head, 1)
    latent = 2 * width + (2 if config.schedule else 0)
    linear("head_in", latent + INPUT_WIDTH + config.device_width, head)
    for layer in (f"head.{i}" for i in range(config.head_layers)):
        norm(f"{layer}.norm", head)
        linear(f"{layer}.up", head, head)
        linear(f"{layer}.down", head, head)
    norm(f"head.{config.head_layers}", head)
    linear("out", head, (4 if config.head == "structured" else 1) + len(LEVELS))
    return out


def _torch_network(weights: Weights) -> LatencyNetwork:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(
            "the network itself needs torch: training, tuning and its layers",
            hint=f"{install_hint('train')}; predictions go without it",
        ) from None
    from cdmpp.model.nn.network import LatencyNetwork

    network = LatencyNetwork(weights.config, weights.devices)
    network.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.arrays.items()})
    return network.eval()
