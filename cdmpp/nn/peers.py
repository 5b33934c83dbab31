"""What the known devices say of an unseen one.

The network extrapolates along device ratios from some thirty devices, which is its weakest side: on devices
left out of training most of its error is one bias per device and operator. A known device that was trained
on the same kind of query has a second opinion: its own predicted efficiency (log of latency over *its*
reference), carried over to the unseen device's reference. The mean opinion of all such peers, mixed with the
network's own, beats both on devices left out (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.nn.domain import Context, Domain
from cdmpp.nn.rows import QueryRows

Array = np.ndarray[Any, np.dtype[Any]]
Rows = TypeVar("Rows", bound=QueryRows)

#: Weight of the peers' mean beside the network's own answer (docs/accuracy.md).
SHARE = 0.7

#: Distance, in factors of two, at which a peer's opinion counts 0.6 times as much as a like one's.
LIKENESS = 1.0

#: Trained devices: index in the network's embedding, and specification.
Trained = tuple[int, DeviceSpec]


class Peers:
    """Trained devices that can speak for an unseen one, per kind of query.

    Parameters
    ----------
    devices : sequence of (index, DeviceSpec)
        Trained devices with their index in the network's embedding.
    domain : Domain
        Which device was trained on which kind of query.
    """

    def __init__(self, devices: Sequence[Trained], domain: Domain) -> None:
        self._devices, self._domain = list(devices), domain
        self._found: dict[tuple[str, ...], tuple[Trained, ...]] = {}

    def of(self, kind: str, vendor: str, operator: str, dtype: str, protocol: str, backend: str) -> tuple[Trained, ...]:
        """Peers of a device of this kind ("gpu", "cpu") and maker for this query.

        Where training had none of the maker's, other makers' of the kind; none where it had none at all.
        """
        key = (kind, vendor, operator, dtype, protocol, backend)
        if key not in self._found:
            asked = (operator, dtype, protocol, backend)
            found = [
                (index, device)
                for index, device in self._devices
                if device.kind == kind and Context(device.name, *asked).keys()[0] in self._domain.contexts
            ]
            same = [(index, device) for index, device in found if device.vendor == vendor]
            self._found[key] = tuple(same or found)
        return self._found[key]


def weights(device: DeviceSpec, dtype: str, peers: Sequence[DeviceSpec]) -> Array:
    """Weight of each peer's opinion, (peers,), of sum 1.

    By likeness of one unit in one cycle: how many operations of this type, how many bytes from memory. That
    tells an inference card from a training board, and generations from each other, whatever the size of the
    device. Near twins, of one architecture, count once.
    """
    names = [peer.arch for peer in peers]
    own = _of_a_unit(device, dtype)
    far = np.array([((_of_a_unit(peer, dtype) - own) ** 2).sum() for peer in peers])
    # The least of all distances is taken off: of peers that are all far away the nearest still speak.
    each = np.exp(-0.5 * (far - far.min()) / LIKENESS**2) / np.array([names.count(name) for name in names])
    return np.asarray(each / each.sum())


def _of_a_unit(device: DeviceSpec, dtype: str) -> Array:
    cycles = device.compute_units * device.clock_hz
    rates = (device.peak(dtype, matrix=True), device.mem_bandwidth_bytes_per_s)
    return np.log2(np.array(rates) / cycles)


def shift(own: Array, peers: Array, weight: Array) -> Array:
    """What is added to an unseen device's log latencies.

    Parameters
    ----------
    own : (rows,)
        log(latency / reference) as the network gives it for the device itself.
    peers : (rows, peers)
        The same for each peer, over the peer's reference.
    weight : (peers,)
        Their :func:`weights`.
    """
    # Row by row: a matrix product's last digits depend on how many rows there are.
    return np.asarray(SHARE * ((peers * weight).sum(axis=1) - own))


def as_peers(rows: Rows, peers: Sequence[int]) -> Rows:
    """Each row once for every peer, one row's peers next to each other.

    Parameters
    ----------
    peers : sequence of int
        The peers' rows of the device matrix.
    """
    many = rows.take(np.repeat(np.arange(len(rows)), len(peers)))
    device = np.tile(np.asarray(peers, dtype=np.int32), len(rows))
    return replace(many, device=device)  # type: ignore[type-var]


def ask_peers(
    rows: QueryRows,
    point: Array,
    levels: Array,
    peers: Sequence[int],
    weight: Array,
    efficiency: Callable[[QueryRows], Array],
    own: Array,
) -> tuple[Array, Array]:
    """Mix the peers' opinion into predictions of rows that share device kind and kind of query.

    Parameters
    ----------
    point, levels
        Log predictions of ``rows`` with their devices hidden.
    peers : sequence of int
        The peers' rows of the device matrix.
    weight : (peers,)
        Their :func:`weights`.
    efficiency : callable
        log(latency / reference) of rows, as the network gives it.
    own : (rows,)
        The same of ``rows`` themselves.
    """
    if not len(peers) or not len(rows):
        return point, levels
    by = shift(own, efficiency(as_peers(rows, peers)).reshape(len(rows), len(peers)), weight)
    return point + by, levels + by[:, None]
