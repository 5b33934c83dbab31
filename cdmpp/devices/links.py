"""Links between accelerators: bandwidth, latency class, and the names that people and tables use.

``bandwidth_bytes_per_s`` is the rate of one device in one direction, as collective libraries count it: NVLink 4 has
450 GB/s, not the 900 GB/s of both directions that data sheets print.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from cdmpp.errors import FieldError

#: ``switched``: every device reaches every other at full rate. ``pairs``: bridges between two devices; other traffic
#: crosses PCIe. ``network``: between nodes. ``host``: processes of one machine through shared memory.
LinkKind = Literal["switched", "pairs", "pcie", "network", "host"]
KINDS: tuple[LinkKind, ...] = ("switched", "pairs", "pcie", "network", "host")


@dataclass(frozen=True)
class LinkSpec:
    """One kind of connection between ranks."""

    #: Canonical name.
    name: str
    kind: LinkKind
    #: One direction of one device.
    bandwidth_bytes_per_s: float
    #: The switch can add the ranks' values (NVLink SHARP), so that an all-reduce sends every byte once.
    in_switch_reduction: bool = False


_GB = 1e9
#: Figures of one direction from the vendors' data sheets, but for those of aiconfigurator's system files (pcie5-x8:
#: 28.4 GB/s; the others agree with the data sheets). A torus of TPUs (ICI) counts as a switch: its rings use all links.
LINKS: dict[str, LinkSpec] = {
    link.name: link
    for link in (
        LinkSpec("nvlink1", "switched", 80 * _GB),
        LinkSpec("nvlink2", "switched", 150 * _GB),
        LinkSpec("nvlink3", "switched", 300 * _GB),
        LinkSpec("nvlink3-400", "switched", 200 * _GB),
        LinkSpec("nvlink4", "switched", 450 * _GB, True),
        LinkSpec("nvlink4-400", "switched", 200 * _GB, True),
        LinkSpec("nvlink5", "switched", 900 * _GB, True),
        LinkSpec("nvlink-pairs", "pairs", 300 * _GB),
        LinkSpec("nvlink3-bridge", "pairs", 56.25 * _GB),
        LinkSpec("xgmi2", "switched", 150 * _GB),
        LinkSpec("xgmi3", "switched", 448 * _GB),
        LinkSpec("xgmi4", "switched", 537.6 * _GB),
        LinkSpec("ici-v6e", "switched", 400 * _GB),
        LinkSpec("pcie3-x8", "pcie", 8 * _GB),
        LinkSpec("pcie3-x16", "pcie", 16 * _GB),
        LinkSpec("pcie4-x8", "pcie", 16 * _GB),
        LinkSpec("pcie4-x16", "pcie", 32 * _GB),
        LinkSpec("pcie5-x8", "pcie", 28.4 * _GB),
        LinkSpec("pcie5-x16", "pcie", 64 * _GB),
        LinkSpec("pcie6-x16", "pcie", 128 * _GB),
        LinkSpec("ethernet-10g", "network", 1.25 * _GB),
        LinkSpec("ethernet-25g", "network", 3.125 * _GB),
        LinkSpec("ethernet-100g", "network", 12.5 * _GB),
        LinkSpec("ethernet-200g", "network", 25 * _GB),
        LinkSpec("ethernet-400g", "network", 50 * _GB),
        LinkSpec("infiniband-edr", "network", 12.5 * _GB),
        LinkSpec("infiniband-hdr", "network", 25 * _GB),
        LinkSpec("infiniband-ndr", "network", 50 * _GB),
        LinkSpec("infiniband-xdr", "network", 100 * _GB),
        LinkSpec("shared-memory", "host", 10 * _GB),
    )
}
#: Other spellings than the names of :data:`LINKS`, in the form of :func:`_plain`; the longest that a text starts with
#: counts.
_ALIASES = {
    "nvlinkinpairs": "nvlink-pairs",
    "nvlinkpairs": "nvlink-pairs",
    "xgmi": "xgmi3",
    "infinityfabric": "xgmi3",
    "pcie3": "pcie3-x16",
    "pcie4": "pcie4-x16",
    "pcie5": "pcie5-x16",
    "pcie6": "pcie6-x16",
    "infiniband": "infiniband-hdr",
    "hdr": "infiniband-hdr",
    "ndr": "infiniband-ndr",
    "ethernet": "ethernet-100g",
    "sharedmemory": "shared-memory",
    "gloo": "shared-memory",
}
#: Texts that state nothing: the device's own link.
_UNSTATED = {"", "none", "notstated", "unknown", "default"}
#: A table's guess by a node's name that its own figures contradict (A800: 155 GB/s between 8 ranks).
_DOUBTFUL = "notconfirmed"
#: What may follow a name: lanes, what connects the devices, and the bandwidth that the name implies.
_REST = re.compile(r"(x16|nvswitch|dgxnode|sxm|slowerbetweenpairs|\d{2,4}gb(ps|s))*")
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BANDWIDTH = re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?)\s*([kmgt]?)(b|bytes?|bits?)\s*(?:/|p|per)\s*s(?:ec(?:ond)?)?", re.I)
BANDWIDTH_RANGE = (1e6, 1e14)

LINK_HINT = "a name such as nvlink4, pcie4-x16, infiniband-ndr, or a bandwidth of one direction such as 64GB/s"

#: JSON schema of a link in its canonical spelling; other spellings are accepted too.
LINK_SCHEMA = {"anyOf": [{"enum": sorted(LINKS)}, {"type": "string", "pattern": "^[1-9][0-9]{0,3}GB/s$"}]}


def _plain(text: str) -> str:
    return "".join(re.findall(r"[a-z0-9]+", text.casefold()))


def canonical_link(value: Any) -> str | None:
    """Canonical name of a link, ``"64GB/s"`` for a bandwidth, None for the device's own link.

    ``value``: a name, a text of a public table ("NVLink5 900 GB/s"), or a bandwidth (bytes per second, or with its
    unit: "64GB/s", "512Gbit/s").
    Raises ValueError: it is none of these; the message says what is allowed.
    """
    if value is None or (isinstance(value, str) and value in LINKS):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"link {value!r} is not known: pass {LINK_HINT}")
    if not isinstance(value, str):
        return _of_bandwidth(value, value)
    plain = _plain(re.sub(r"\.0\b|gen", "", value, flags=re.I))  # PCIe 5.0, PCIe Gen5
    if plain in _UNSTATED or _DOUBTFUL in plain:
        return None
    named = {_plain(name): name for name in LINKS}
    if plain in named:
        return named[plain]
    known = {**_ALIASES, **named}
    fitting = [text for text in known if plain.startswith(text) and _REST.fullmatch(plain, len(text))]
    if fitting:
        return known[max(fitting, key=len)]
    match = _BANDWIDTH.fullmatch(value.strip())
    if match:
        number, prefix, unit = match.groups()
        if unit == "b":
            rate = f"{number}{prefix.upper()}"
            raise ValueError(f"link {value[:60]!r} may be bits or bytes: write {rate}B/s or {rate}bit/s")
        bits = 8.0 if unit.casefold().startswith("bit") else 1.0
        return _of_bandwidth(float(number) * _PREFIX[prefix.lower()] / bits, value)
    raise ValueError(f"link {value[:60]!r} is not known: pass {LINK_HINT}")


def _of_bandwidth(bytes_per_s: float, given: Any) -> str:
    low, high = BANDWIDTH_RANGE
    if not low <= bytes_per_s <= high:
        raise ValueError(f"link {given!r} is no bandwidth between {low:g} and {high:g} bytes per second")
    return f"{bytes_per_s / _GB:g}GB/s"


@lru_cache(maxsize=1024)
def link_of_name(name: str) -> LinkSpec:
    """The link of a canonical name or of a bandwidth as :func:`canonical_link` writes it.

    A bandwidth alone does not say what carries it: below 10 GB/s it is taken for a network, below 100 GB/s for PCIe,
    else for a switch.
    """
    if name in LINKS:
        return LINKS[name]
    bandwidth = float(name.removesuffix("GB/s")) * _GB
    kind: LinkKind = "network" if bandwidth < 10 * _GB else "pcie" if bandwidth < 100 * _GB else "switched"
    return LinkSpec(name, kind, bandwidth)


#: Bytes per second of a rank's network adapter where a request of training states none: 400 Gbit/s.
ASSUMED_NETWORK = 50e9
#: Names of networks -> Gbit/s of an adapter where the name has no number.
_FABRICS = {"infiniband": 400, "roce": 400, "efa": 400, "ethernet": 100}


def network_bandwidth(network: float | str | None) -> float:
    """Bytes per second of one rank's adapter.

    ``network``: bytes per second; or a name such as "infiniband-400", "roce-200", "efa-400", "infiniband-ndr"; None:
    400 Gbit/s.
    Raises FieldError: the network is not known.
    """
    if network is None:
        return ASSUMED_NETWORK
    if isinstance(network, int | float) and not isinstance(network, bool) and 1e6 <= network <= 1e14:
        return float(network)
    if isinstance(network, str):
        with suppress(ValueError):
            return network_bandwidth(float(network))
        link = LINKS.get(network)
        if link is not None and link.kind == "network":
            return link.bandwidth_bytes_per_s
        name, _, rate = network.lower().partition("-")
        rate = rate.removesuffix("gbps").removesuffix("g")
        if name in _FABRICS and (not rate or (rate.isdecimal() and 1 <= int(rate) <= 3200)):
            return (int(rate) if rate else _FABRICS[name]) * 1e9 / 8
    raise FieldError(
        f"network: {str(network)[:80]!r} is not known",
        path="network",
        hint="bytes per second for each GPU, or infiniband, roce, efa or ethernet with Gbit/s, such as roce-200",
    )
