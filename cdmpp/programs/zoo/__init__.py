"""Networks with random weights in plain torch: what the measured tensor programs are made from."""

from __future__ import annotations

from cdmpp.programs.zoo.registry import (
    ZooNetwork,
    describe_network,
    make_network,
    network_names,
    network_parameters,
    parse_network,
)

__all__ = ["ZooNetwork", "describe_network", "make_network", "network_names", "network_parameters", "parse_network"]
