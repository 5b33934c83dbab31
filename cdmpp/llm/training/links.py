"""Duration of messages between the ranks of a training job: inside an NVLink domain or a node, and over the network."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cdmpp.devices.links import network_bandwidth
from cdmpp.devices.paths import devices_together, link_of_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.programs.collectives import traffic_factor
from cdmpp.programs.operators import OperatorSpec, make_operator

#: Bandwidth of large messages over that of the adapter. The measured nodes of H100 and A100 reach 0.72 and 0.7.
_EFFICIENCY = 0.72
#: Seconds of a message's start between nodes, and of each hop: a node of a ring, a doubling of the nodes of a tree.
_START_S, _HOP_S = 25e-6, 20e-6
#: Lower and upper bound over the point, between nodes: few systems were measured.
BOUNDS = (0.7, 1.6)


def distinct(places: int, topk: float) -> float:
    """Mean number of places among ``places`` that ``topk`` experts of a token are in."""
    return places * (1 - math.pow(1 - 1 / places, topk))


@dataclass(frozen=True)
class Links:
    """Connections of the ranks."""

    device: DeviceSpec
    domain_ranks: int  # ranks of a node, or of an NVLink domain, which reach each other without the network
    node_ranks: int  # the same of the device's usual node, whatever ``ranks_per_node`` says
    network: float  # bytes per second of a rank's adapter

    @classmethod
    def of(cls, device: DeviceSpec, ranks_per_node: int | None, network: float | str | None) -> Links:
        """Connections of a device; ``ranks_per_node`` does not divide an NVLink domain."""
        if ranks_per_node is not None and (type(ranks_per_node) is not int or not 1 <= ranks_per_node <= 1024):
            raise FieldError.not_allowed("ranks_per_node", ranks_per_node, hint="a whole number from 1 to 1024")
        inside = link_of_device(device)
        domain_ranks = node_ranks = int(min(devices_together(device, inside), 1 << 16))
        if ranks_per_node is not None:
            domain = device.nvlink_domain if inside.kind == "switched" else None
            domain_ranks = max(ranks_per_node, domain or 0)
        return cls(device, domain_ranks, node_ranks, network_bandwidth(network))

    def crosses(self, span: int) -> bool:
        """Whether ranks spread over ``span`` consecutive devices use the network."""
        return span > self.domain_ranks

    def program(self, operator: str, size: float, ranks: int, span: int) -> OperatorSpec:
        """A collective inside a domain, for the predictor."""
        fields = {"operator": operator, "bytes": max(1, round(size)), "ranks": ranks, "ranks_per_node": ranks}
        if span > ranks:
            fields["span"] = span
        return make_operator(fields)

    def network_s(self, operator: str, size: float, ranks: int, span: int) -> float:
        """Seconds of a collective whose ranks are on several nodes.

        Rings and trees send each byte between two nodes once, so that the adapters of a node share it. In an
        all-to-all each rank sends over its own adapter what is for other nodes.
        """
        inside = link_of_device(self.device).bandwidth_bytes_per_s
        per_node = max(1, ranks * self.domain_ranks // max(span, ranks))
        nodes = -(-ranks // per_node)
        # Gathers and scatters pass all nodes one after the other; sums go up and down a tree.
        hops = nodes - 1 if operator in ("all_gather", "reduce_scatter") else math.log2(max(2, nodes))
        start = _START_S + _HOP_S * hops
        if operator == "send_recv":
            return start + size / (_EFFICIENCY * self.network)
        if operator == "all_to_all":
            outside = 1 - per_node / ranks
            return start + max(
                size * outside / (_EFFICIENCY * self.network), size * (per_node - 1) / ranks / (_EFFICIENCY * inside)
            )
        rate = _EFFICIENCY * min(inside, self.network * per_node)
        return start + size * traffic_factor(operator, ranks) / rate

    def exchange_s(self, size: float, topk: float, ranks: int) -> float:
        """Seconds in which tokens of ``size`` bytes reach the experts on ``ranks`` ranks of several nodes.

        A token crosses the network once for each other node of its experts, and is spread inside of it.
        """
        inside = link_of_device(self.device).bandwidth_bytes_per_s
        nodes = max(2, -(-ranks // self.domain_ranks))
        over = size * distinct(nodes, topk) * (nodes - 1) / nodes
        within = size * distinct(ranks, topk)
        start = _START_S + _HOP_S * math.log2(nodes)
        return start + max(over / (_EFFICIENCY * self.network), within / (_EFFICIENCY * inside))
