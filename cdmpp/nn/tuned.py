"""A few of the network's weights, tuned on one device: its vector, the last norm and the output layer.

Everything before the head stays as trained, so a device costs some tens of kilobytes. Tuning needs torch;
what was tuned is used without (:meth:`cdmpp.nn.weights.Weights.tuned`).
"""

from __future__ import annotations

import torch

from cdmpp.nn.network import LatencyNetwork
from cdmpp.nn.weights import Tuned, tuned_names


def tunable(network: LatencyNetwork) -> dict[str, torch.Tensor]:
    """The weights that are tuned. Of the embedding only row 0 is: it takes the device's vector."""
    parameters = dict(network.named_parameters())
    return {short: parameters[name] for short, name in tuned_names(network.config).items()}


def read_tuned(network: LatencyNetwork) -> Tuned:
    """What :meth:`Weights.tuned` takes, of a network that was tuned."""
    return {name: (p[0] if name == "device" else p).detach().numpy().copy() for name, p in tunable(network).items()}
