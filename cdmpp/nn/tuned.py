"""The weights that are tuned on one device: device vector, last norm and output layer.

All other weights stay as trained, so a tuned device takes some tens of kilobytes. Tuning needs torch; tuned weights
are used without it (:meth:`cdmpp.nn.weights.Weights.tuned`).
"""

from __future__ import annotations

import torch

from cdmpp.nn.network import LatencyNetwork
from cdmpp.nn.weights import Tuned, tuned_names


def tunable(network: LatencyNetwork) -> dict[str, torch.Tensor]:
    """The tuned parameters by short name. Of the embedding only row 0 is tuned, which holds the device's vector."""
    parameters = dict(network.named_parameters())
    return {short: parameters[name] for short, name in tuned_names(network.config).items()}


def read_tuned(network: LatencyNetwork) -> Tuned:
    """Arrays of a tuned network for :meth:`Weights.tuned`."""
    return {name: (p[0] if name == "device" else p).detach().numpy().copy() for name, p in tunable(network).items()}
