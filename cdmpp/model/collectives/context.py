"""Contexts of collectives: everything that decides a latency except the number of bytes.

Rows of measurement tables become contexts and bytes (:func:`collective_rows`). :class:`Reasons` says why a context is
not a measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cdmpp.devices.links import link_of_name
from cdmpp.devices.paths import devices_together, link_of_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.programs.collectives import LIBRARIES, Collective, collective_path, is_collective

if TYPE_CHECKING:
    from cdmpp.data.table import MeasurementTable

Array = np.ndarray[Any, np.dtype[Any]]

#: A library that is not stated.
UNSTATED = ""


class CollectiveContext(NamedTuple):
    """One curve of latency over bytes.

    ``device`` is "" for a device without measurements, ``link`` is "" where the device's own is meant, and
    ``library`` is "" where it is not known. ``device_link`` names the device's own link, ``generation`` its
    architecture ("hopper"). ``one_node`` has the same operation between fewer ranks, on one node where it has one;
    training contexts have none.
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
    device_link: str
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


STORED_FIELDS = len(CollectiveContext._fields) - 1


def context_of(
    spec: Collective, device: DeviceSpec, protocol: str, known_as: str, framework: str = ""
) -> CollectiveContext:
    """Context of one query.

    ``protocol``, ``framework``: mode, and library if it is one, of a specification that states none. ``known_as``: name
    under which the model has measurements of the device, or "".
    """
    fields = spec.model_dump()
    if spec.library is None and framework in LIBRARIES:
        fields["library"] = framework
    context = context_of_fields(fields, device, protocol, known_as)
    return context._replace(one_node=tuple(_of_fewer_ranks(context, fields, device, protocol)))


def _of_fewer_ranks(
    context: CollectiveContext, fields: Mapping[str, Any], device: DeviceSpec, protocol: str
) -> Iterator[CollectiveContext]:
    """The same operation between fewer ranks on the link, and of one that crosses nodes by itself on one node."""
    inside = link_of_device(device) if fields["link"] is None else link_of_name(fields["link"])
    network = inside.kind == "network"
    within = network or not context.crosses
    peers_at_once = context.ranks - 1 if within else int(min(context.ranks, devices_together(device, inside)))
    for ranks in sorted(
        {*range(2, min(peers_at_once, 8) + 1)} | {2**exponent for exponent in range(4, peers_at_once.bit_length())}
    ):
        per_node = fields["ranks_per_node"] if network else ranks
        fewer = {**fields, "ranks": ranks, "ranks_per_node": per_node, "span": None}
        yield context_of_fields(fewer, device, protocol, context.device)


def context_of_fields(fields: Mapping[str, Any], device: DeviceSpec, protocol: str, known_as: str) -> CollectiveContext:
    """Context of one query from the fields of its specification (without ``bytes``)."""
    operator, ranks, per_node, link, span = (
        fields[name] for name in ("operator", "ranks", "ranks_per_node", "link", "span")
    )
    path = collective_path(operator, ranks, per_node, link, device, span)
    return CollectiveContext(
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


@dataclass(frozen=True)
class Reasons:
    """What of a query training did not have; empty fields say nothing."""

    # Name, and bytes per second of the link: no measurements of the device, or of it with this link, so that the
    # link's specification decides.
    device: tuple[str, float] | None = None
    link: tuple[str, float] | None = None
    # library and mode: no measurements of it in this mode, or for ``operator`` on this device
    stack: tuple[str, str] | None = None
    operator: str = ""
    ranks: tuple[int, int, str] | None = None  # ranks, most measured ones, and where these were measured
    kind: str = ""  # no measurements of this kind of link
    libraries: tuple[str, ...] = ()  # libraries that a query without one may mean
    size: bool = False  # the message is smaller or larger than the measured ones

    @property
    def any(self) -> bool:
        """Whether there is a reason."""
        return self != Reasons()


def describe(reasons: Reasons) -> str:
    """The reasons as a sentence."""
    texts = []
    if reasons.device:
        name, bandwidth = reasons.device
        texts.append(f"no collective was measured on this device: the figures follow {name}, {bandwidth / 1e9:g} GB/s")
    if reasons.link:
        name, bandwidth = reasons.link
        texts.append(f"the device was not measured with {name}: the figures follow {bandwidth / 1e9:g} GB/s")
    if reasons.stack:
        library, mode = reasons.stack
        what = f" for {reasons.operator} on this device" if reasons.operator else ""
        texts.append(f"{library} was not measured in mode {mode}{what}: the figures follow other modes and libraries")
    if reasons.ranks:
        ranks, max_ranks, where = reasons.ranks
        texts.append(f"{ranks} ranks: at most {max_ranks} were measured {where}")
    if reasons.kind:
        texts.append(f"no link of kind {reasons.kind} was measured")
    if reasons.libraries:
        texts.append(f"no library is stated: the mean of {', '.join(reasons.libraries)}, and the interval covers them")
    if reasons.size:
        texts.append("the message is outside the measured sizes")
    return "; ".join(texts)


@dataclass(frozen=True)
class CollectiveRows:
    """Collectives of a table."""

    index: Array  # (n,) int: rows of the table
    contexts: list[CollectiveContext]
    context: Array  # (n,) int: index into ``contexts``
    bytes: Array  # (n,) float


def collective_rows(
    table: MeasurementTable,
    rows: Array,
    known_as: Callable[[DeviceSpec], str],
    specs: dict[str, DeviceSpec] | None = None,
) -> CollectiveRows:
    """The collectives among some rows of a table, all of which are collectives of known devices.

    ``known_as``: :meth:`cdmpp.model.collectives.model.CollectiveModel.known_as`. ``specs``: specifications by device
    name that replace the table's.
    """
    names = table.device.names
    devices = {
        code: (specs or {}).get(names[code]) or table.device_spec(names[code])
        for code in np.unique(table.device.codes[rows]).tolist()
    }
    known = {code: known_as(device) for code, device in devices.items()}
    protocols = table.protocol.names
    numbers: dict[CollectiveContext, int] = {}
    context, bytes_ = np.zeros(len(table), dtype=np.int64), np.zeros(len(table))
    wanted = np.zeros(len(table), dtype=np.bool_)
    wanted[rows] = True
    for block in table.specs:
        if not is_collective(block.operator):
            continue
        index = block.row_index
        columns = np.stack([table.device.codes[index], table.protocol.codes[index], block.sizes["ranks"]], axis=1)
        distinct, inverse = np.unique(columns, axis=0, return_inverse=True)
        bytes_[index] = block.sizes["bytes"]
        for number, (device, protocol, ranks) in enumerate(distinct.tolist()):
            members = index[inverse.reshape(-1) == number]
            if not wanted[members].any():
                continue
            fields = {"operator": block.operator, "dtype": block.dtype, **block.flags, "ranks": ranks}
            key = context_of_fields(fields, devices[device], protocols[protocol], known[device])
            context[members] = numbers.setdefault(key, len(numbers))
    return CollectiveRows(rows, list(numbers), context[rows], bytes_[rows])
