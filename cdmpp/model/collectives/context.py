"""Contexts of collectives: everything that decides a latency except the number of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cdmpp.devices.links import link_of_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.programs.collectives import LIBRARIES, Collective, collective_path

#: A library that is not stated.
UNSTATED = ""


class Context(NamedTuple):
    """One curve of latency over bytes.

    ``device`` is "" for a device without measurements, ``link`` is "" where the device's own is meant, and
    ``library`` is "" where it is not known. ``own`` names the device's own link, ``generation`` its
    architecture ("hopper").
    """

    operator: str
    ranks: int
    per_node: int
    library: str
    mode: str
    narrow: bool
    device: str
    link: str
    kind: str
    bandwidth: float
    crosses: bool
    own: str
    generation: str

    @property
    def called(self) -> bool:
        """The latency holds calls of a framework from the host; benchmark programs overlap theirs."""
        return self.mode == "eager" and self.library not in ("nccl", "rccl", "oneccl", "gloo")

    @property
    def place(self) -> tuple[str, str, bool]:
        """Device, link and whether nodes are crossed."""
        return self.device, self.link, self.crosses


def context_of(spec: Collective, device: DeviceSpec, protocol: str, known_as: str, framework: str = "") -> Context:
    """Context of one query.

    Parameters
    ----------
    spec : Collective
    device : DeviceSpec
    protocol : str
        Mode of a specification that states none.
    known_as : str
        Name under which the model has measurements of the device, or "".
    framework : str
        Library of a specification that states none, if it is one.
    """
    fields = spec.model_dump()
    if spec.library is None and framework in LIBRARIES:
        fields["library"] = framework
    return context_of_fields(fields, device, protocol, known_as)


def context_of_fields(fields: Mapping[str, Any], device: DeviceSpec, protocol: str, known_as: str) -> Context:
    """Context of one query from the fields of its specification (without ``bytes``)."""
    operator, ranks, per_node, link = (fields[name] for name in ("operator", "ranks", "ranks_per_node", "link"))
    path = collective_path(operator, ranks, per_node, link, device)
    return Context(
        operator,
        ranks,
        (per_node or 0) if path.crosses else 0,
        fields["library"] or UNSTATED,
        fields["mode"] or protocol,
        fields["dtype"] == "int8",
        known_as,
        link or "",
        path.kind,
        path.bandwidth_bytes_per_s,
        path.crosses,
        link_of_device(device).name,
        device.arch.partition(" ")[0].casefold(),
    )
