"""Correction of predictions for unseen devices by the known devices (peers).

The network extrapolates along device ratios from some thirty devices. On devices left out of training, most of
its error is one bias per device and operator. For a known device that was trained on the same kind of query, the
network predicts an efficiency (log of latency over the device's reference). This efficiency is applied to the
unseen device's reference. The mean over all peers, mixed with the network's own prediction, has a lower error on
left-out devices than either alone (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.encode import TIR
from cdmpp.model.domain.score import Domain, parse_contexts
from cdmpp.model.nn.rows import QueryRows
from cdmpp.programs.elements import base_type
from cdmpp.programs.query_options import implementation_of

Array = np.ndarray[Any, np.dtype[Any]]

#: Weight of the peers' mean; the network's own prediction has the rest (docs/accuracy.md).
SHARE = 0.7

#: Distance, in factors of two, at which a peer's weight falls to 0.6.
LIKENESS = 1.0

#: A peer of less weight does not count: each peer costs a row of the network. On devices left out (10,500 rows of seven
#: sources, without Hopper GPUs and the MI100) the error is 25.7 % with every peer and with those above 0.05.
MIN_WEIGHT = 0.05

#: Trained devices: index in the network's embedding, and specification.
Trained = tuple[int, DeviceSpec]


class Peers:
    """Peers of an unseen device, by kind of query.

    Parameters
    ----------
    devices : sequence of (index, DeviceSpec)
        Trained devices with their index in the network's embedding.
    domain : Domain
        Contexts of the training set: which device was trained on which kind of query.
    """

    def __init__(self, devices: Sequence[Trained], domain: Domain) -> None:
        self._devices = list(devices)
        self._by_query: dict[tuple[str, ...], tuple[Trained, ...]] = {}
        # Devices of each (operator, dtype, protocol, backend), of any implementation ("") and of each.
        self._trained: dict[tuple[str, ...], set[str]] = {}
        trained, launched = parse_contexts(domain.contexts)
        for context in trained:
            self._trained.setdefault((*context[1:5], ""), set()).add(context.device)
        for context in launched or trained:
            meant = implementation_of(context.operator, context.framework)
            self._trained.setdefault((*context[1:5], meant), set()).add(context.device)

    def of(
        self, kind: str, vendor: str, operator: str, dtype: str, protocol: str, backend: str, implementation: str = ""
    ) -> tuple[Trained, ...]:
        """Peers of a device of this kind ("gpu", "cpu") and vendor for this kind of query.

        Trained devices of the same vendor, or of other vendors where there are none; empty where no device of
        the kind was trained on such queries in this implementation ("": in any).
        """
        key = (kind, vendor, operator, dtype, protocol, backend, implementation)
        if key not in self._by_query:
            trained = self._trained.get(key[2:], set())
            peers = [
                (index, device) for index, device in self._devices if device.kind == kind and device.name in trained
            ]
            same = [(index, device) for index, device in peers if device.vendor == vendor]
            self._by_query[key] = tuple(same or peers)
        return self._by_query[key]


def corrects(kind: str, operator: str) -> bool:
    """Whether peers correct predictions for an unseen device of this kind ("gpu", "cpu").

    They do not correct TIR on a CPU: its latency is computed from counts of vector instructions, whose width differs
    between configurations of one CPU. For the configurations of Zen 3, each left out, the error is 31 % (AVX2) and
    28 % (SSE4.2) without the correction and 43 % and 82 % with it (docs/accuracy.md).
    """
    return kind != "cpu" or operator != TIR


def weights(device: DeviceSpec, dtype: str, peers: Sequence[DeviceSpec]) -> Array:
    """Weight of each peer, (peers,), with sum 1; 0 where it is less than :data:`MIN_WEIGHT`.

    Weights follow the similarity per compute unit and cycle: operations of this dtype, and bytes from memory.
    These separate inference cards from training boards, and generations from each other, at any device size.
    Peers of one architecture share one weight.
    """
    names = [peer.arch for peer in peers]
    device_rates = _per_unit(device, dtype)
    far = np.array([((_per_unit(peer, dtype) - device_rates) ** 2).sum() for peer in peers])
    # The smallest distance is subtracted, so that the nearest of several distant peers still count.
    weight = np.exp(-0.5 * (far - far.min()) / LIKENESS**2) / np.array([names.count(name) for name in names])
    weight /= weight.sum()
    # The largest of many weights could be less.
    weight[weight < min(MIN_WEIGHT, weight.max())] = 0.0
    return np.asarray(weight / weight.sum())


def _per_unit(device: DeviceSpec, dtype: str) -> Array:
    cycles = device.compute_units * device.clock_hz
    rates = (device.peak(base_type(dtype), matrix=True), device.mem_bandwidth_bytes_per_s)
    return np.log2(np.array(rates) / cycles)


def shift(unseen: Array, peers: Array, weight: Array) -> Array:
    """Correction that is added to an unseen device's log latencies, (rows,).

    Parameters
    ----------
    unseen : (rows,)
        log(latency / reference) predicted for the device itself.
    peers : (rows, peers)
        log(latency / reference) predicted for each peer, with the peer's reference.
    weight : (peers,)
        Their :func:`weights`.
    """
    # Row by row: the last digits of a matrix product depend on the number of rows.
    return np.asarray(SHARE * ((peers * weight).sum(axis=1) - unseen))


def as_peers(rows: QueryRows, peers: Sequence[int] | Array) -> QueryRows:
    """Each row repeated for every peer, the peers of one row next to each other.

    Parameters
    ----------
    rows : QueryRows
    peers : (peers,) int
        Rows of the device matrix.
    """
    repeated = rows.take(np.repeat(np.arange(len(rows)), len(peers)))
    return replace(repeated, device=np.tile(np.asarray(peers, dtype=np.int32), len(rows)))


def ask_peers(
    rows: QueryRows,
    point: Array,
    levels: Array,
    peers: Sequence[int],
    weight: Array,
    efficiency: Callable[[QueryRows], Array],
    unseen: Array,
) -> tuple[Array, Array]:
    """Correct predictions of rows that share device kind and kind of query by their peers.

    Parameters
    ----------
    point, levels
        Log predictions of ``rows`` with hidden devices.
    peers : sequence of int
        Rows of the device matrix.
    weight : (peers,)
        Their :func:`weights`.
    efficiency : callable
        Function from rows to predicted log(latency / reference).
    unseen : (rows,)
        Predicted log(latency / reference) of ``rows``.
    """
    if not len(peers) or not len(rows):
        return point, levels
    by = shift(unseen, efficiency(as_peers(rows, peers)).reshape(len(rows), len(peers)), weight)
    return point + by, levels + by[:, None]
