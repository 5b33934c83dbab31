"""What-ifs on a trace: other devices, links and numbers of ranks, faster kernels, operators that are left out.

Ratios of kernels between two devices are predicted where the operator is known, by roofline where it is not.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from cdmpp.devices.links import canonical_link, link_of_name
from cdmpp.devices.loading import resolve_device
from cdmpp.devices.registry import find_known, lookup_board
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError
from cdmpp.model.domain.score import worst
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.programs.collectives import COLLECTIVES, traffic_factor
from cdmpp.programs.operators import OperatorSpec, make_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.simulate.replay.engine import Replayer
from cdmpp.simulate.replay.graph import Floats
from cdmpp.simulate.replay.links import Collective, Link, collective_s
from cdmpp.simulate.traces.nodes import WORKING, TraceGraph, WorkNode
from cdmpp.simulate.traces.records import Arguments, CollectiveCall
from cdmpp.simulate.traces.shapes import operators_of
from cdmpp.utils.units import format_latency

#: How a node's new time was found. "kept": its measured time.
Method = Literal["predicted", "roofline", "link", "scaled", "kept"]
METHODS: tuple[Method, ...] = ("predicted", "roofline", "link", "scaled", "kept")
_MOST_REASONS = 8
#: Kernels that multiply matrices, by their names.
_PRODUCT = re.compile(r"gemm|gemv|cutlass|nvjet|cublas|conv|wgrad|dgrad|fprop|flash|fmha|attention|mma", re.IGNORECASE)
_HALF = re.compile(r"half|bf16|bfloat16|fp16|f16|_h_|hgemm|hh[sh]_|bz_|16816|h1688", re.IGNORECASE)
#: Products of float32 with TF32's bits: NVIDIA's names of the instruction and of cuBLAS' and CUTLASS' kernels.
_TF32 = re.compile(r"tf32|xf32|s1688|tensorop_s", re.IGNORECASE)
#: Copies that stay on a device.
_ON_DEVICE = re.compile(r"DtoD|device -> device|memset", re.IGNORECASE)
_COLLECTIVE_DTYPES = ("float16", "bfloat16", "float32", "int8")


@dataclass(frozen=True)
class Changes:
    """What-ifs; each is replayed alone, and several also together."""

    device: DeviceSpec | str | None = None  # device to run the kernels on
    from_device: DeviceSpec | str | None = None  # device of the trace; default: as the trace names it
    ranks: int | None = None  # number of ranks of each collective
    link: str | None = None  # link of the collectives: a name ("nvlink4") or a bandwidth of one direction ("64GB/s")
    # Regular expression of kernels or operators, and how many times faster their device work is.
    speed_up: Sequence[tuple[str, float]] = ()
    # Regular expressions of operators and kernels that take no time, on the host and on the device.
    remove: Sequence[str] = ()

    @property
    def predicts(self) -> bool:
        """Whether a predictor is needed."""
        return self.device is not None or self.ranks is not None or self.link is not None


@dataclass(frozen=True)
class WhatIfAnswer:
    """A replay with changed durations.

    Attributes
    ----------
    name : str
        The change.
    seconds : float
        Replayed iteration with it.
    saving_s : float
        Replayed iteration without it, less ``seconds``.
    nodes : int
        Nodes with another duration.
    shares : dict of str to float
        Share of the measured time of the affected kind of work, by how its new time was found: "predicted",
        "roofline", "link", "scaled", "kept".
    domain : str or None
        Worst domain of the predictions.
    reasons : dict of str to int
        Why nodes were not predicted, with their number.
    """

    name: str
    seconds: float
    saving_s: float
    nodes: int
    shares: dict[str, float]
    domain: str | None = None
    reasons: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def answer_changes(
    graph: TraceGraph, replayer: Replayer, changes: Changes, predictor: Predictor | None
) -> list[WhatIfAnswer]:
    """Replay each change alone, and all together where there are several.

    Raises FieldError: an expression is invalid or matches nothing, or the trace does not say what it ran on.
    Raises UnknownDeviceError: a device is not known.
    """
    if changes.from_device is not None and not changes.predicts:
        raise FieldError(
            "the device of the trace is given, and nothing that depends on it is asked",
            path="from",
            hint="add --device, --ranks or --link",
        )
    parts = [*_by_model(graph, changes, predictor), *_by_name(graph.nodes, changes)]
    base = graph.durations()
    before_s = graph.longest_s(replayer.run().end_s, base) / graph.count
    answers = [_answer(graph, replayer, base, before_s, name, [ratios]) for name, ratios in parts]
    if len(parts) > 1:
        answers.append(_answer(graph, replayer, base, before_s, "all together", [ratios for _, ratios in parts]))
    return answers


def device_of_trace(graph: TraceGraph, given: DeviceSpec | str | None) -> DeviceSpec:
    """The device that the trace was recorded on.

    Raises FieldError: the trace does not name a known device, or names several.
    """
    if given is not None:
        return resolve_device(given, lookup_board)
    known = {spec.name: spec for name in graph.device_names if (spec := find_known(name)) is not None}
    if len(known) == 1:
        return next(iter(known.values()))
    named = ", ".join(graph.device_names) or "no device"
    raise FieldError(
        f"the trace names {named}: the device that it was recorded on is not known",
        path="from",
        hint="give it with --from: a name (cdmpp devices) or a .json/.toml specification",
    )


def _by_model(graph: TraceGraph, changes: Changes, predictor: Predictor | None) -> list[tuple[str, Ratios]]:
    if not changes.predicts:
        return []
    found: list[tuple[str, Ratios]] = []
    if changes.device is not None:
        if predictor is None:
            raise FieldError("another device must be predicted", path="device", hint="pass a predictor")
        old, new = device_of_trace(graph, changes.from_device), resolve_device(changes.device, lookup_board)
        ratios = device_ratios(graph.nodes, predictor, old, new, host=not graph.on_device)
        found.append((f"device {old.name} -> {new.name}", ratios))
        if ratios.tf32:
            graph.remarks.append(
                "kernels of float32 products that ran as TF32 (by name, or faster than the float32 peak), predicted as "
                f"tfloat32: {ratios.tf32:,}"
            )
    if changes.ranks is not None and changes.ranks < 2:
        raise FieldError(f"ranks is {changes.ranks}", path="ranks", hint="2 or more")
    if changes.ranks is not None or changes.link is not None:
        if not any(node.role == "comm" for node in graph.nodes):
            path = "link" if changes.ranks is None else "ranks"
            raise FieldError("the trace has no collective to change", path=path, hint="leave it out")
        try:
            link = canonical_link(changes.link)
        except ValueError as error:
            raise FieldError(f"link {changes.link!r}: {error}", path="link") from None
        try:
            device = device_of_trace(graph, changes.from_device) if predictor is not None else None
        except FieldError:
            device = None
        for name, ranks, over in ((f"{changes.ranks} ranks", changes.ranks, None), (f"link {link}", None, link)):
            if ranks is None and over is None:
                continue
            if device is not None and predictor is not None:
                _collectives(ratios := Ratios(), graph.nodes, predictor, (device, device), (None, over), ranks)
            else:
                ratios = formula_ratios(graph.nodes, link=over, ranks=ranks)
            found.append((name, ratios))
    return found


def _by_name(nodes: Sequence[WorkNode], changes: Changes) -> list[tuple[str, Ratios]]:
    found: list[tuple[str, Ratios]] = []
    for text, factor in changes.speed_up:
        if not (np.isfinite(factor) and factor > 0):
            raise FieldError(f"speed-up of {text!r} by {factor}", path="speed_up", hint="a factor above 0")
        ratios = Ratios()
        for i in _matching(nodes, text, "speed_up", (*WORKING, "comm")):
            ratios.set(i, 1.0 / factor, "scaled")
        found.append((f"{text} {factor:g} x faster", ratios))
    for text in changes.remove:
        ratios = Ratios()
        for i in _matching(nodes, text, "remove", (*WORKING, "comm", "host", "launch", "sync")):
            ratios.set(i, 0.0, "scaled")
        found.append((f"without {text}", ratios))
    return found


def _matching(nodes: Sequence[WorkNode], text: str, path: str, roles: Sequence[str]) -> list[int]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise FieldError(f"{text!r} is not a regular expression: {error}", path=path) from None
    # The same names come again and again: each is searched once.
    searched: dict[tuple[str, ...], bool] = {}
    matched = []
    for i, node in enumerate(nodes):
        names = (*node.names, node.label)
        if node.role in roles:
            if names not in searched:
                searched[names] = any(pattern.search(name) for name in names)
            if searched[names]:
                matched.append(i)
    if not matched:
        labels = dict.fromkeys(node.label for node in nodes if node.role in (*WORKING, "comm"))
        raise FieldError(
            f"{text!r} matches no kernel and no operator",
            path=path,
            hint="there are: " + ", ".join(name[:60] for name in list(labels)[:12]),
        )
    return matched


def _answer(
    graph: TraceGraph, replayer: Replayer, base: Floats, before_s: float, name: str, parts: Sequence[Ratios]
) -> WhatIfAnswer:
    durations = base.copy()
    method: dict[int, Method] = {}
    for part in parts:
        for i, ratio in part.ratio.items():
            durations[i] *= ratio
            # Several changes of one node: it counts as the least certain.
            method[i] = max(part.method[i], method.get(i, "predicted"), key=METHODS.index)
    if not np.isfinite(durations).all():
        raise FieldError(f"{name}: a duration is not finite", hint="give a smaller factor")
    scale_earlier(graph.nodes, base, durations)
    seconds = graph.longest_s(replayer.run(durations).end_s, durations) / graph.count
    affected_s = float(sum(base[i] for i in method))
    measured_s = {how: float(sum(base[i] for i, each in method.items() if each == how)) for how in METHODS}
    reasons = sum((part.reasons for part in parts), Counter[str]())
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    domains = [prediction.domain for part in parts for prediction in part.predictions]
    return WhatIfAnswer(
        name,
        seconds,
        before_s - seconds,
        sum(bool(durations[i] != base[i]) for i in method),
        {how: s / affected_s for how, s in measured_s.items() if s > 0},
        worst(domain for domain in domains) if domains else None,
        dict(ordered[:_MOST_REASONS]),
    )


def signed(seconds: float) -> str:
    """A saving for a table; a negative one has a sign."""
    return f"{'-' if seconds < 0 else ''}{format_latency(abs(seconds))}"


def scale_earlier(nodes: Sequence[WorkNode], base: Floats, durations: Floats) -> None:
    """Let the work of earlier iterations change as that of these, as in the steady state. Writes to ``durations``."""
    work = [i for i, node in enumerate(nodes) if node.role in ("kernel", "copy")]
    if base[work].sum() > 0:
        durations[[node.role == "earlier" for node in nodes]] *= durations[work].sum() / base[work].sum()


@dataclass
class Ratios:
    """New over measured time of nodes, and how each was found."""

    # By position of the node; nodes that are not there keep their time.
    ratio: dict[int, float] = field(default_factory=dict)
    method: dict[int, Method] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)  # why nodes were not predicted, by number of nodes
    predictions: list[Prediction] = field(default_factory=list)  # predictions behind the ratios
    tf32: int = 0  # kernels of float32 products that ran as TF32

    def set(self, position: int, ratio: float, method: Method, reason: str = "") -> None:
        """Take a ratio."""
        self.ratio[position], self.method[position] = ratio, method
        if reason:
            self.reasons[reason] += 1


def device_ratios(
    nodes: Sequence[WorkNode], predictor: Predictor, old: DeviceSpec, new: DeviceSpec, *, host: bool
) -> Ratios:
    """Ratios of all kernels, copies and collectives for another device.

    A kernel whose operator and shapes are recorded has the ratio of the predictions of all that its operator runs.
    Others have the ratio of the matrix peaks or of the memory bandwidths. Copies to and from the host keep their time,
    and so do threads. ``host``: the trace is of a host alone: its operators take the place of kernels.
    """
    ratios = Ratios()
    specs: dict[int, tuple[OperatorSpec, ...]] = {}
    seconds: Counter[int] = Counter()
    for node in nodes:
        seconds[id(node.operation)] += node.duration_s if _PRODUCT.search(node.label) else 0.0  # type: ignore[assignment]
    for i, node in enumerate(nodes):
        if node.role in ("kernel", "op"):
            operators, reason = operators_of_node(node)
            if operators:
                as_tf32 = node.role == "kernel" and _ran_as_tf32(node, operators, seconds[id(node.operation)], old)
                ratios.tf32 += as_tf32
                specs[i] = tuple(map(_tf32, operators)) if as_tf32 else operators
            else:
                ratios.set(i, roofline_ratio(node, old, new), "roofline", reason)
        elif node.role == "copy":
            inside = bool(_ON_DEVICE.search(node.label))
            ratio = old.mem_bandwidth_bytes_per_s / new.mem_bandwidth_bytes_per_s if inside else 1.0
            ratios.set(i, ratio, "roofline" if inside else "kept")
    latencies: dict[tuple[OperatorSpec, str], float] = {}
    for device in (old, new):
        wanted = [_for_device(spec, device) for group in specs.values() for spec in group]
        latencies |= _predict(predictor, wanted, (device,), ratios)
    for i, operators in specs.items():
        sums = [
            sum(latencies.get((_for_device(spec, device), device.name), float("nan")) for spec in operators)
            for device in (old, new)
        ]
        if sums[0] > 0 and sums[1] > 0:
            ratios.set(i, sums[1] / sums[0], "predicted")
        else:
            ratios.set(i, roofline_ratio(nodes[i], old, new), "roofline", "its operator has no prediction")
    if not host:
        _collectives(ratios, nodes, predictor, (old, new), (None, None), None)
    return ratios


def _ran_as_tf32(node: WorkNode, operators: Sequence[OperatorSpec], seconds: float, device: DeviceSpec) -> bool:
    """Whether float32 products ran as TF32: by the kernel's name, or by a rate above the float32 peak.

    ``seconds``: of the operator's kernels that multiply, on the ``device`` of the trace.
    """
    if device.peak_flops_tf32_matrix is None or not any(_tf32(spec) is not spec for spec in operators):
        return False
    flops = sum(2.0 * math.prod(spec.sizes().values()) for spec in operators if spec.operator in ("linear", "bmm"))
    return bool(_TF32.search(node.label)) or flops > device.peak("float32", True) * seconds > 0


def _tf32(spec: OperatorSpec) -> OperatorSpec:
    is_product = spec.operator in ("linear", "bmm", "conv2d") and spec.dtype == "float32"
    return spec.model_copy(update={"dtype": "tfloat32"}) if is_product else spec


def _for_device(spec: OperatorSpec, device: DeviceSpec) -> OperatorSpec:
    """A product of TF32 runs as float32 on a device without TF32."""
    lacks = spec.dtype == "tfloat32" and device.peak_flops_tf32_matrix is None
    return spec.model_copy(update={"dtype": "float32"}) if lacks else spec


def formula_ratios(nodes: Sequence[WorkNode], *, link: str | None, ranks: int | None) -> Ratios:
    """Ratios of the collectives where the device is not known: by the formulas of :mod:`cdmpp.simulate.replay.links`.

    With a link, the new time is that of a ring over its bandwidth. Without, the time grows with the bytes that each
    rank sends.

    Raises FieldError: the link is not known.
    """
    ratios = Ratios()
    ring = None if link is None else Link(beta_s_per_byte=1.0 / link_of_name(link).bandwidth_bytes_per_s)
    for i, node in enumerate(nodes):
        call = node.call
        if node.role != "comm":
            continue
        if call is None or call.kind not in COLLECTIVES or not call.ranks or call.ranks < 2 or not call.bytes:
            ratios.set(
                i, 1.0, "kept", f"{call.kind if call else node.label}: its size or number of ranks is not recorded"
            )
            continue
        new_ranks = ranks if ranks is not None and call.kind != "send_recv" else call.ranks
        if ring is None:
            ratios.set(i, traffic_factor(call.kind, new_ranks) / traffic_factor(call.kind, call.ranks), "link")
        elif node.duration_s > 0:
            op: Collective = "send" if call.kind == "send_recv" else call.kind  # type: ignore[assignment]
            ratios.set(i, collective_s(op, new_ranks, call.bytes, ring) / node.duration_s, "link")
    return ratios


def roofline_ratio(node: WorkNode, old: DeviceSpec, new: DeviceSpec) -> float:
    """Ratio of the peaks for kernels that multiply matrices, of the bandwidths for others, by the kernel's name."""
    name = node.label if node.role == "kernel" else ""
    if _PRODUCT.search(name):
        dtype = "float16" if _HALF.search(name) else "tfloat32" if _TF32.search(name) else "float32"
        return old.peak(dtype, True) / new.peak(dtype, True)
    return old.mem_bandwidth_bytes_per_s / new.mem_bandwidth_bytes_per_s


def operators_of_node(node: WorkNode) -> tuple[tuple[OperatorSpec, ...], str]:
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
    """Take ratios of the collectives on other devices, over other links or with ``ranks``. Bytes of a rank stay."""
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
