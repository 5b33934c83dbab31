"""The link and the nodes of a group of devices."""

from __future__ import annotations

from dataclasses import dataclass

from cdmpp.devices.links import LINKS, LinkKind, LinkSpec, canonical_link, link_of_name, network_bandwidth
from cdmpp.devices.spec import DeviceSpec

#: Links of devices, by the start of the canonical name; the longest that fits counts.
_OWN = {
    device: link
    for link, devices in {
        "nvlink1": ("p100-sxm",),
        "nvlink2": ("v100-sxm",),
        "nvlink3": ("a100-sxm", "a100-vidur"),
        "nvlink3-400": ("a800",),
        "nvlink4": ("h100-sxm", "h100-vidur", "h200", "h20", "gh200"),
        "nvlink4-400": ("h800",),
        "nvlink5": ("b200", "b300", "gb200", "gb300"),
        "nvlink-pairs": ("h100-nvl", "h200-nvl"),
        "xgmi2": ("mi250",),
        "xgmi3": ("mi300", "mi325x", "gfx942"),
        "xgmi4": ("mi35", "gfx950"),
        "pcie5-x8": ("arc-pro-b60",),
        "pcie5-x16": ("rtx-pro-", "rtx-50", "h100-pcie"),
    }.items()
    for device in devices
}
#: Devices of one node, where a device states no other number.
RANKS_PER_NODE = 8
_OLD = ("kepler", "maxwell", "pascal", "volta", "turing", "gcn")
_NEW = ("hopper", "blackwell", "cdna3", "cdna4")


def known_link(device: DeviceSpec) -> LinkSpec | None:
    """The link that a device states, or that its name implies; None: not known."""
    link_of_device = getattr(device, "link", None)
    if link_of_device:
        name = canonical_link(link_of_device)
        if name is not None:
            return link_of_name(name)
    starts = [start for start in _OWN if device.name.startswith(start)]
    if starts:
        return LINKS[_OWN[max(starts, key=len)]]
    return LINKS["shared-memory"] if device.kind == "cpu" else None


def link_of_device(device: DeviceSpec) -> LinkSpec:
    """The link that a device has where a query states none: the known one, else its PCIe slot."""
    return known_link(device) or LINKS[_slot(device)]


def host_link(device: DeviceSpec) -> LinkSpec:
    """The link of a device to its host's memory: the PCIe slot that its generation is made for."""
    return LINKS[_slot(device)]


def _slot(device: DeviceSpec) -> str:
    """The PCIe slot that a device's generation is made for."""
    arch = device.arch.casefold()
    if any(word in arch for word in _OLD):
        return "pcie3-x16"
    return "pcie5-x16" if any(word in arch for word in _NEW) else "pcie4-x16"


def network_of_device(device: DeviceSpec) -> LinkSpec:
    """A device's share of the network adapters: its own figure, else as nodes commonly have it, 100 or 400 Gb/s.

    400 from Hopper on. The measured nodes of A100 and A40 reach 4 to 9 GB/s, those of H100 36 GB/s.
    """
    if device.network_bytes_per_s is not None:
        return LinkSpec("network", "network", device.network_bytes_per_s)
    new = device.kind != "cpu" and any(word in device.arch.casefold() for word in _NEW)
    return LINKS["infiniband-ndr" if new else "ethernet-100g"]


def with_network(device: DeviceSpec, network: float | str | None) -> DeviceSpec:
    """A device whose nodes have this network (:func:`cdmpp.devices.links.network_bandwidth`); None: the device.

    Raises FieldError: the network is not known.
    """
    if network is None:
        return device
    return device.model_copy(update={"network_bytes_per_s": network_bandwidth(network)})


@dataclass(frozen=True)
class Path:
    """The part of the connections that limits an operation."""

    kind: LinkKind
    #: Rate at which one rank can send in one direction; between nodes, of all adapters of a node where the algorithm
    #: uses them together.
    bandwidth_bytes_per_s: float
    #: The ranks are on several nodes.
    crosses: bool
    #: Where they cross: ranks on each node, or in each NVLink domain of several nodes; 0 where that is not known.
    per_node: int = 0


def devices_together(device: DeviceSpec, inside: LinkSpec) -> float:
    """Devices that reach each other over ``inside``, without the network between nodes.

    A switched link connects the device's whole NVLink domain, any other link one node. Processes of one machine
    (shared memory) have no limit.
    """
    if inside.kind == "host":
        return float("inf")
    node = device.ranks_per_node or RANKS_PER_NODE
    return max(node, device.nvlink_domain or 0) if inside.kind == "switched" else node


def path_of(
    ranks: int,
    per_node: int | None,
    link: str | None,
    device: DeviceSpec,
    *,
    shared: bool = True,
    span: int | None = None,
) -> Path:
    """The nodes and the link of any group of ranks: collectives, language models and plans all use this function.

    ``per_node``: ranks of the group on each node. None: as many as a node of the device holds. A group inside one
    NVLink domain does not use the network, whatever this number is. ``link``: canonical name; None for the device's
    own. ``shared``: every byte crosses between nodes once (rings, trees), so that the adapters of a node work together;
    False for transfers and all-to-all, where each rank has its own adapter. ``span``: number of consecutive devices
    over which the ranks are evenly spread; default: ``ranks``.
    """
    inside = link_of_device(device) if link is None else link_of_name(link)
    rate = inside.bandwidth_bytes_per_s
    if inside.kind == "network":
        return Path("network", rate, True, per_node or 0)
    together, span = devices_together(device, inside), max(span or ranks, ranks)
    in_domain = inside.kind == "switched" and device.nvlink_domain is not None
    if per_node is None or in_domain:
        per_node = ranks if span <= together else max(1, int(ranks * together // span))
    if per_node < ranks:
        network = network_of_device(device).bandwidth_bytes_per_s
        return Path("network", min(rate, network * per_node if shared else network), True, per_node)
    if inside.kind == "pairs":
        slot = LINKS[_slot(device)].bandwidth_bytes_per_s
        if ranks > 2:
            return Path("pcie", slot, False)
        # Pairs of workstation Ampere boards reach 5 GB/s in the tables, so their bridge was not used. They are a kind
        # of their own: other boards on PCIe have nothing to learn from them.
        if inside.name == "nvlink-pairs" and "sm_86" in device.arch:
            return Path("pairs", slot, False)
        return Path("switched", rate, False)
    return Path(inside.kind, rate, False)
