"""Contexts of collectives: everything that decides a latency except the number of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log2
from typing import Any, NamedTuple

from cdmpp.devices.links import link_of_name
from cdmpp.devices.paths import devices_together, link_of_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.programs.collectives import LIBRARIES, Collective, collective_path

#: A library that is not stated.
UNSTATED = ""


class Context(NamedTuple):
    """One curve of latency over bytes.

    ``device`` is "" for a device without measurements, ``link`` is "" where the device's own is meant, and
    ``library`` is "" where it is not known. ``own`` names the device's own link, ``generation`` its
    architecture ("hopper"). ``one_node`` has the same operation between fewer ranks on one node, for a query that
    crosses nodes; training contexts have none.
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
    one_node: tuple[Any, ...] = ()

    @property
    def stored(self) -> tuple[Any, ...]:
        """The fields that files have: all but ``one_node``."""
        return self[:STORED_FIELDS]

    @property
    def called(self) -> bool:
        """The latency holds calls of a framework from the host; benchmark programs overlap theirs."""
        return self.mode == "eager" and self.library not in ("nccl", "rccl", "oneccl", "gloo")

    @property
    def place(self) -> tuple[str, str, bool]:
        """Device, link and whether nodes are crossed."""
        return self.device, self.link, self.crosses


STORED_FIELDS = len(Context._fields) - 1


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
    context = context_of_fields(fields, device, protocol, known_as)
    return context._replace(one_node=tuple(_on_one_node(context, fields, device, protocol)))


def _on_one_node(context: Context, fields: Mapping[str, Any], device: DeviceSpec, protocol: str) -> Iterator[Context]:
    """The same operation between 2, 4, 8, ... ranks on one node, where the context crosses nodes by itself."""
    inside = link_of_device(device) if fields["link"] is None else link_of_name(fields["link"])
    if not context.crosses or inside.kind == "network":
        return
    together = devices_together(device, inside)
    for exponent in range(1, int(log2(min(context.ranks, together))) + 1):
        alone = {**fields, "ranks": 2**exponent, "ranks_per_node": None, "span": None}
        yield context_of_fields(alone, device, protocol, context.device)


def context_of_fields(fields: Mapping[str, Any], device: DeviceSpec, protocol: str, known_as: str) -> Context:
    """Context of one query from the fields of its specification (without ``bytes``)."""
    operator, ranks, per_node, link, span = (
        fields[name] for name in ("operator", "ranks", "ranks_per_node", "link", "span")
    )
    path = collective_path(operator, ranks, per_node, link, device, span)
    return Context(
        operator,
        ranks,
        path.per_node,
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
