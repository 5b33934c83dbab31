"""Ratios of kernels between two devices: predicted where the operator is known, by roofline where it is not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cdmpp.devices.links import link_of_name
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.programs.collectives import COLLECTIVES, traffic_factor
from cdmpp.programs.operators import OperatorSpec, make_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.simulate.replay.links import Collective, Link, collective_s
from cdmpp.simulate.traces.nodes import WorkNode
from cdmpp.simulate.traces.records import Arguments, CollectiveCall
from cdmpp.simulate.traces.shapes import operators_of

#: How a node's new time was found. "kept": its measured time.
Method = Literal["predicted", "roofline", "link", "scaled", "kept"]
#: Kernels that multiply matrices, by their names.
_PRODUCT = re.compile(r"gemm|gemv|cutlass|nvjet|cublas|conv|wgrad|dgrad|fprop|flash|fmha|attention|mma", re.IGNORECASE)
_HALF = re.compile(r"half|bf16|bfloat16|fp16|f16|_h_|hgemm|hh[sh]_|bz_|16816|1688", re.IGNORECASE)
#: Copies that stay on a device.
_ON_DEVICE = re.compile(r"DtoD|device -> device|memset", re.IGNORECASE)
_COLLECTIVE_DTYPES = ("float16", "bfloat16", "float32", "int8")


@dataclass
class Ratios:
    """New over measured time of nodes, and how each was found.

    Attributes
    ----------
    ratio : dict of int to float
        By position of the node; nodes that are not there keep their time.
    method : dict of int to Method
    reasons : Counter of str
        Why nodes were not predicted, by number of nodes.
    domains : list of Prediction
        Predictions behind the ratios.
    """

    ratio: dict[int, float] = field(default_factory=dict)
    method: dict[int, Method] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    predictions: list[Prediction] = field(default_factory=list)

    def set(self, position: int, ratio: float, method: Method, reason: str = "") -> None:
        """Take a ratio."""
        self.ratio[position], self.method[position] = ratio, method
        if reason:
            self.reasons[reason] += 1


def device_ratios(
    nodes: Sequence[WorkNode], predictor: Predictor, old: DeviceSpec, new: DeviceSpec, *, host: bool
) -> Ratios:
    """Ratios of all kernels, copies and collectives for another device.

    Parameters
    ----------
    nodes : sequence of WorkNode
    predictor : Predictor
    old, new : DeviceSpec
    host : bool
        The trace is of a host alone: its operators take the place of kernels.

    Returns
    -------
    Ratios
        A kernel whose operator and shapes are recorded has the ratio of the predictions of all that its operator runs.
        Others have the ratio of the matrix peaks or of the memory bandwidths. Copies to and from the host keep their
        time, and so do threads.
    """
    found = Ratios()
    specs: dict[int, tuple[OperatorSpec, ...]] = {}
    for i, node in enumerate(nodes):
        if node.role in ("kernel", "op"):
            operators, reason = _operators(node)
            if operators:
                specs[i] = operators
            else:
                found.set(i, roofline_ratio(node, old, new), "roofline", reason)
        elif node.role == "copy":
            inside = bool(_ON_DEVICE.search(node.label))
            ratio = old.mem_bandwidth_bytes_per_s / new.mem_bandwidth_bytes_per_s if inside else 1.0
            found.set(i, ratio, "roofline" if inside else "kept")
    latencies = _predict(predictor, [s for group in specs.values() for s in group], (old, new), found)
    for i, operators in specs.items():
        sums = [sum(latencies.get((spec, device.name), float("nan")) for spec in operators) for device in (old, new)]
        if sums[0] > 0 and sums[1] > 0:
            found.set(i, sums[1] / sums[0], "predicted")
        else:
            found.set(i, roofline_ratio(nodes[i], old, new), "roofline", "its operator has no prediction")
    if not host:
        _collectives(found, nodes, predictor, (old, new), (None, None), None)
    return found


def link_ratios(
    nodes: Sequence[WorkNode], predictor: Predictor, device: DeviceSpec, *, link: str | None, ranks: int | None
) -> Ratios:
    """Ratios of the collectives over another link, or with another number of ranks. Bytes of a rank stay.

    Raises
    ------
    FieldError
        The graph has no collective.
    """
    found = Ratios()
    if not any(node.role == "comm" for node in nodes):
        raise FieldError(
            "the trace has no collective to change", path="link" if ranks is None else "ranks", hint="leave it out"
        )
    _collectives(found, nodes, predictor, (device, device), (None, link), ranks)
    return found


def formula_ratios(nodes: Sequence[WorkNode], *, link: str | None, ranks: int | None) -> Ratios:
    """Ratios of the collectives where the device is not known: by the formulas of :mod:`cdmpp.simulate.replay.links`.

    With a link, the new time is that of a ring over its bandwidth. Without, the time grows with the bytes that each
    rank sends.

    Raises
    ------
    FieldError
        The graph has no collective, or the link is not known.
    """
    found = Ratios()
    if not any(node.role == "comm" for node in nodes):
        raise FieldError(
            "the trace has no collective to change", path="link" if ranks is None else "ranks", hint="leave it out"
        )
    ring = None if link is None else Link(beta_s_per_byte=1.0 / link_of_name(link).bandwidth_bytes_per_s)
    for i, node in enumerate(nodes):
        call = node.call
        if node.role != "comm":
            continue
        if call is None or call.kind not in COLLECTIVES or not call.ranks or call.ranks < 2 or not call.bytes:
            found.set(
                i, 1.0, "kept", f"{call.kind if call else node.label}: its size or number of ranks is not recorded"
            )
            continue
        new_ranks = ranks if ranks is not None and call.kind != "send_recv" else call.ranks
        if ring is None:
            found.set(i, traffic_factor(call.kind, new_ranks) / traffic_factor(call.kind, call.ranks), "link")
        elif node.duration_s > 0:
            op: Collective = "send" if call.kind == "send_recv" else call.kind  # type: ignore[assignment]
            found.set(i, collective_s(op, new_ranks, call.bytes, ring) / node.duration_s, "link")
    return found


def roofline_ratio(node: WorkNode, old: DeviceSpec, new: DeviceSpec) -> float:
    """Ratio of the peaks for kernels that multiply matrices, of the bandwidths for others, by the kernel's name."""
    name = node.label if node.role == "kernel" else ""
    if _PRODUCT.search(name):
        dtype = "float16" if _HALF.search(name) else "float32"
        return old.peak(dtype, True) / new.peak(dtype, True)
    return old.mem_bandwidth_bytes_per_s / new.mem_bandwidth_bytes_per_s


def _operators(node: WorkNode) -> tuple[tuple[OperatorSpec, ...], str]:
    operation = node.operation
    if operation is None:
        return (), "no operator in the trace launched it"
    if not isinstance(operation.detail, Arguments):
        return (), "no recorded shapes (record_shapes=True)"
    operators, reason = operators_of(operation.name, operation.detail)
    return operators, f"{operation.name}: {reason}" if reason else f"{operation.name}: computes nothing" * (
        not operators
    )


def _predict(
    predictor: Predictor, specs: Sequence[OperatorSpec], devices: Sequence[DeviceSpec], found: Ratios
) -> Mapping[tuple[OperatorSpec, str], float]:
    """Seconds of each operator on each device; operators without a prediction are left out."""
    distinct = list(dict.fromkeys(specs))
    queries = [Query(TensorProgram.from_operator(spec), device) for spec in distinct for device in devices]
    answers = predictor.predict_queries(queries) if queries else []
    keys = [(spec, device.name) for spec in distinct for device in devices]
    latencies: dict[tuple[OperatorSpec, str], float] = {}
    for key, answer in zip(keys, answers, strict=True):
        if answer.latency_s is not None:
            latencies[key] = answer.latency_s
            found.predictions.append(answer)
    return latencies


def _collectives(
    found: Ratios,
    nodes: Sequence[WorkNode],
    predictor: Predictor,
    devices: tuple[DeviceSpec, DeviceSpec],
    links: tuple[str | None, str | None],
    ranks: int | None,
) -> None:
    pairs: dict[int, tuple[OperatorSpec, OperatorSpec]] = {}
    for i, node in enumerate(nodes):
        if node.role != "comm":
            continue
        call, reason = node.call, ""
        if call is None or call.kind not in COLLECTIVES:
            reason = f"{call.kind if call else node.label}: no model of this collective"
        elif call.bytes is None or not call.ranks or call.ranks < 2:
            reason = f"{call.kind}: its size or number of ranks is not recorded"
        else:
            try:
                new_ranks = ranks if call.kind != "send_recv" else None
                pairs[i] = (_collective(call, links[0], None), _collective(call, links[1], new_ranks))
                continue
            except CdmppError as error:
                reason = f"{call.kind}: {error.message}"
        found.set(i, 1.0, "kept", reason)
    for side, device in enumerate(devices):
        specs = list(dict.fromkeys(pair[side] for pair in pairs.values()))
        latencies = _predict(predictor, specs, (device,), found)
        for i, pair in pairs.items():
            seconds = latencies.get((pair[side], device.name))
            if seconds is None:
                found.set(i, 1.0, "kept", f"{pair[side].operator}: no prediction on {device.name}")
            elif side == 0:
                found.ratio[i] = seconds
            elif found.method.get(i) != "kept":
                found.set(i, seconds / found.ratio[i], "predicted")


def _collective(call: CollectiveCall, link: str | None, ranks: int | None) -> OperatorSpec:
    fields: dict[str, object] = {
        "operator": call.kind,
        "bytes": max(int(call.bytes or 0), 1),
        "ranks": ranks or call.ranks,
        "dtype": call.dtype if call.dtype in _COLLECTIVE_DTYPES else "float32",
    }
    if link is not None:
        fields["link"] = link
    return make_operator(fields)
