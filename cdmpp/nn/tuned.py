"""A few of the network's weights, tuned on one device: its vector, the last norm and the output layer.

Everything before the head stays as trained, so a device costs some tens of kilobytes.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from cdmpp.nn.network import LatencyNetwork

Array = np.ndarray[Any, np.dtype[Any]]
#: Tensors of :func:`tunable`, by name.
Tuned = dict[str, Array]


def tunable(network: LatencyNetwork) -> dict[str, torch.Tensor]:
    """The weights that are tuned. Of the embedding only row 0 is: it takes the device's vector."""
    norm = network.head[-1]
    assert isinstance(norm, torch.nn.LayerNorm)
    return {
        "device": network.device.weight,
        "norm_weight": norm.weight,
        "norm_bias": norm.bias,
        "out_weight": network.out.weight,
        "out_bias": network.out.bias,
    }


def tuned_network(network: LatencyNetwork, tuned: Tuned) -> LatencyNetwork:
    """A copy of a network with tuned weights; the device that they are for is device 0 of the copy.

    Raises
    ------
    ValueError
        A tensor is missing, or of another network's shape.
    """
    changed = copy.deepcopy(network).eval()
    with torch.no_grad():
        for name, parameter in tunable(changed).items():
            if name not in tuned:
                raise ValueError(f"tuned weights lack {name}")
            target = parameter[0] if name == "device" else parameter
            if tuple(target.shape) != tuned[name].shape:
                raise ValueError(f"tuned {name} has the shape {tuned[name].shape}, not {tuple(target.shape)}")
            target.copy_(torch.from_numpy(tuned[name]))
    return changed


def read_tuned(network: LatencyNetwork) -> Tuned:
    """What :func:`tuned_network` takes, of a network that was tuned."""
    return {
        name: (p[0] if name == "device" else p).detach().numpy().copy()
        for name, p in tunable(network).items()
    }
