"""Correction of predictions for unseen devices by the known devices (peers).

The network extrapolates along device ratios from some fifty devices. On devices left out of training, most of
its error is one bias per device and operator. For a known device that was trained on the same kind of query, the
network predicts a latency. It is carried over to the unseen device by the ratio of the two devices' references
(:func:`carried_reference`). The mean over all peers, mixed with the network's own prediction, has a lower error on
left-out devices than either alone (docs/decisions/peers.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.encode import TIR
from cdmpp.model.domain.score import Domain, parse_contexts
from cdmpp.model.nn.config import LEVELS
from cdmpp.model.nn.inputs import BANDWIDTH, CACHE, CLOCK, SUMMARY_COLUMNS, UNITS, reference_terms
from cdmpp.model.nn.rows import QueryRows, RowInputs, concatenate
from cdmpp.programs.elements import base_type
from cdmpp.programs.operators import operator_family
from cdmpp.programs.query_options import implementation_of

Array = np.ndarray[Any, np.dtype[Any]]


class PeerRule(NamedTuple):
    """How peers correct one kind of program."""

    # Importance of each column of :func:`_likeness_figures` in the distance between devices, per factor of two.
    scales: tuple[float, ...]
    same_architecture: float  # factor on the weight of peers of the unseen device's architecture
    share: float  # weight of the peers' mean; the network's own prediction has the rest
    own_reach: float  # largest log ratio by which the network's own prediction moves the peers' mean
    # Share of the nominal reference, against that with measured rates, in what a peer's latency is relative to. A
    # class of boards keeps its sustained share of the data sheet in part: RTX 3090 and RTX 4090 reach nearly all of
    # their peak, and an unseen board has no measured rates.
    nominal: float


#: Chosen on 14,000 rows of 17 tables of library kernels, each device left out, alone and with its architecture.
LIBRARY_RULE = PeerRule((0.7, 0.5, 0.8, 0.6, 0.8, 0.5), 5.0, 0.8, 0.15, 0.5)
#: Layers of experts: the data sheet alone, chosen on either half of the architectures.
EXPERTS_RULE = LIBRARY_RULE._replace(nominal=1.0)
#: Programs given as TIR (each GPU of five left out), and devices that are no GPU.
PLAIN_RULE = PeerRule((1.0, 1.0, 0.0, 0.0, 0.0, 0.0), 1.0, 0.7, np.inf, 0.0)

#: A peer of less weight does not count: each peer costs a row of the network. On devices left out (10,500 rows of seven
#: sources, without Hopper GPUs and the MI100) the error is 25.7 % with every peer and with those above 0.05.
MIN_WEIGHT = 0.05

#: Bytes of the L2 cache of a device whose specification does not state them.
UNSTATED_CACHE = 4e6
#: Log of the time of a fused pass, per factor of two by which its bytes are less than the L2 cache, up to so many.
FITS, FITS_REACH = 0.2, 4.0
#: Log of the time of attention and experts, per factor of two in bytes from memory per unit and cycle beyond the usual.
UNUSED, USUAL_BYTES = {"attention": 0.25, "moe": 0.1}, 8.0
_UNUSED = {SUMMARY_COLUMNS.index(f"family_{family}"): share for family, share in UNUSED.items()}
_LOW, _MEDIAN, _HIGH = (LEVELS.index(level) for level in (0.1, 0.5, 0.9))
_VECTOR = SUMMARY_COLUMNS.index("family_vector")
_BYTES = SUMMARY_COLUMNS.index("bytes")

#: Half an 80 % interval of a library kernel on an unseen GPU, in logs, is the root of the sum of three squares: of the
#: network's own half times the first, of the peers' standard deviation times the second, and of the last, by vendor.
OWN_HALF, PEERS_SPREAD = 0.4, 1.4
LEAST_HALF, OTHER_HALF = {"NVIDIA": 0.2}, 0.35
#: Where the answer differs from the network's own prediction by more than this log ratio, the interval has both.
APART = float(np.log(1.5))

#: Trained devices: index in the network's embedding, and specification.
Trained = tuple[int, DeviceSpec]


class Peers:
    """Peers of an unseen device, by kind of query.

    ``devices``: trained devices with their index in the network's embedding. ``domain``: contexts of the training set,
    i.e. which device was trained on which kind of query.
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
            implementation = implementation_of(context.operator, context.framework)
            self._trained.setdefault((*context[1:5], implementation), set()).add(context.device)

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


def rule_of(device: DeviceSpec, operator: str) -> PeerRule:
    """The rule for an operator ("tir" for a program given as TIR) on a device."""
    if operator == TIR or device.kind != "gpu":
        return PLAIN_RULE
    return EXPERTS_RULE if operator_family(operator) == "moe" else LIBRARY_RULE


@lru_cache(maxsize=4096)
def weights(device: DeviceSpec, operator: str, dtype: str, peers: tuple[DeviceSpec, ...]) -> Array:
    """Weight of each peer, (peers,), with sum 1; 0 where it is less than :data:`MIN_WEIGHT`.

    Weights follow the similarity of the devices' figures, and of their architecture. Peers of one architecture share
    one weight.
    """
    names, rule = [peer.arch for peer in peers], rule_of(device, operator)
    scales, of_device = np.array(rule.scales), _likeness_figures(device, dtype)
    gaps = np.nan_to_num(np.stack([_likeness_figures(peer, dtype) for peer in peers]) - of_device)
    far = ((scales * gaps) ** 2).sum(axis=1)
    # The smallest distance is subtracted, so that the nearest of several distant peers still count.
    weight = np.exp(-0.5 * (far - far.min())) / np.array([names.count(name) for name in names])
    weight *= np.where(np.array(names) == device.arch, rule.same_architecture, 1.0)
    weight /= weight.sum()
    # The largest of many weights could be less.
    weight[weight < min(MIN_WEIGHT, weight.max())] = 0.0
    weight /= weight.sum()
    weight.flags.writeable = False  # every caller has the same array
    return np.asarray(weight)


@lru_cache(maxsize=8192)
def _likeness_figures(device: DeviceSpec, dtype: str) -> Array:
    """log2 of: operations of the type and bytes from memory per unit and cycle, operations per byte, units, watts per
    operation, and L2 bytes; NaN where the specification does not state them.

    They separate inference cards from training boards, and generations from each other.
    """
    peak, bandwidth = device.peak(base_type(dtype), matrix=True), device.mem_bandwidth_bytes_per_s
    cycles, watts, cache = device.compute_units * device.clock_hz, device.tdp_w or np.nan, device.l2_bytes or np.nan
    figures = (peak / cycles, bandwidth / cycles, peak / bandwidth, device.compute_units, watts / peak, cache)
    return np.asarray(np.log2(np.array(figures)))


def carried_reference(reference: Array, sheets: RowInputs, rows: QueryRows, rule: PeerRule) -> Array:
    """log seconds that a latency is relative to when it is carried from one device to another, (rows,).

    It is a mean of the references with measured and with nominal rates, with two terms for programs of library kernels:
    a fused pass over memory whose bytes fit into the L2 cache takes less than the memory needs, and attention and
    experts use less of a memory that is fast for the device's units.

    ``reference``: (rows,), log(reference seconds) with measured rates where known. ``sheets``: the same devices with
    the rates of their data sheets, or with measured ones to compare those alone.
    """
    if not rule.nominal:
        return reference
    summary, device = sheets.store.summary[rows.program], sheets.device_matrix[rows.device]
    terms = reference_terms(summary, device, rows.protocol)
    cache = np.where(np.isfinite(device[:, CACHE]), device[:, CACHE], UNSTATED_CACHE)
    fits = np.clip(np.log2(cache) - summary[:, _BYTES], 0.0, FITS_REACH)
    per_unit = np.log2(device[:, BANDWIDTH] / (device[:, UNITS] * device[:, CLOCK] * USUAL_BYTES))
    unused = sum(summary[:, column] * share for column, share in _UNUSED.items())
    moved = np.minimum(terms.memory / terms.reference, 1.0) * (unused * per_unit - FITS * fits * summary[:, _VECTOR])
    return np.asarray(rule.nominal * np.log(terms.reference) + (1.0 - rule.nominal) * reference + moved)


def shift(unseen: Array, peers: Array, weight: Array, rule: PeerRule) -> Array:
    """Correction that is added to an unseen device's log latencies, (rows,).

    ``unseen``: (rows,), log latency that the network predicts for the device itself, less its
    :func:`carried_reference`. ``peers``: (rows, peers), the same of each peer, with the peer's reference. ``weight``:
    (peers,), their :func:`weights`.
    """
    # Row by row: the last digits of a matrix product depend on the number of rows.
    by_peers = (peers * weight).sum(axis=1) - unseen
    return np.asarray(by_peers - np.clip((1.0 - rule.share) * by_peers, -rule.own_reach, rule.own_reach))


def carried_shift(
    logs: Array, reference: Array, sheets: RowInputs, parts: Sequence[QueryRows], weight: Array, rule: PeerRule
) -> tuple[Array, Array]:
    """:func:`shift` of rows, (rows,), and the standard deviation of what their peers say, (rows,).

    ``logs``, ``reference``: (rows + rows * peers,), log latency that the network predicts, and log reference seconds:
    of the device itself, then on the peers. ``sheets``: as of :func:`carried_reference`. ``parts``: the rows, and
    :func:`as_peers` of them.
    """
    relative, rows = logs - carried_reference(reference, sheets, concatenate(parts), rule), len(parts[0])
    peers = relative[rows:].reshape(rows, -1)
    apart = peers - (peers * weight).sum(axis=1, keepdims=True)
    return shift(relative[:rows], peers, weight, rule), np.sqrt((apart**2 * weight).sum(axis=1))


def interval_factor(
    device: DeviceSpec, operator: str, levels: Array, shifted: tuple[Array, Array], factor: Array
) -> Array:
    """Factor on the intervals of an unseen device's predictions, (rows,).

    ``levels``: (rows, len(LEVELS)), log quantiles. ``shifted``: :func:`carried_shift` of the rows; the first is minus
    the log distance of the network's own prediction. ``factor``: (rows,), follows from the coverage of training.
    """
    if operator == TIR or device.kind != "gpu":
        return factor
    by, spread = shifted
    low, middle, high = levels[:, _LOW], levels[:, _MEDIAN], levels[:, _HIGH]
    around = np.hypot(PEERS_SPREAD * spread, LEAST_HALF.get(device.vendor, OTHER_HALF))
    factor = np.hypot(OWN_HALF * factor, around / np.maximum((high - low) / 2, 1e-3))
    half = np.maximum(np.where(by > 0, middle - low, high - middle), 1e-3)
    return np.where(np.abs(by) > APART, np.maximum(factor, np.abs(by) / half), factor)


def as_peers(rows: QueryRows, peers: Sequence[int] | Array) -> QueryRows:
    """Each row repeated for every peer (rows of the device matrix), the peers of one row next to each other."""
    repeated = rows.take(np.repeat(np.arange(len(rows)), len(peers)))
    return replace(repeated, device=np.tile(np.asarray(peers, dtype=np.int32), len(rows)))
