"""What-ifs on a trace: other devices, links and numbers of ranks, faster kernels, operators that are left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cdmpp.devices.links import canonical_link
from cdmpp.devices.loading import resolve_device
from cdmpp.devices.registry import find_known, lookup_board
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.model.domain.score import worst
from cdmpp.predict.interface import Predictor
from cdmpp.simulate.replay.engine import Replayer
from cdmpp.simulate.replay.graph import Floats
from cdmpp.simulate.traces.nodes import WORKING, TraceGraph, WorkNode
from cdmpp.simulate.traces.programs import Method, Ratios, device_ratios, formula_ratios, link_ratios

METHODS: tuple[Method, ...] = ("predicted", "roofline", "link", "scaled", "kept")
_MOST_REASONS = 8


@dataclass(frozen=True)
class Changes:
    """What-ifs; each is replayed alone, and several also together.

    Attributes
    ----------
    device : DeviceSpec or str, optional
        Device to run the kernels on.
    from_device : DeviceSpec or str, optional
        Device of the trace; default: as the trace names it.
    ranks : int, optional
        Number of ranks of each collective.
    link : str, optional
        Link of the collectives: a name ("nvlink4") or a bandwidth of one direction ("64GB/s").
    speed_up : sequence of (str, float)
        Regular expression of kernels or operators, and how many times faster their device work is.
    remove : sequence of str
        Regular expressions of operators and kernels that take no time, on the host and on the device.
    """

    device: DeviceSpec | str | None = None
    from_device: DeviceSpec | str | None = None
    ranks: int | None = None
    link: str | None = None
    speed_up: Sequence[tuple[str, float]] = ()
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

    Raises
    ------
    FieldError
        An expression is invalid or matches nothing, or the trace does not say what it ran on.
    UnknownDeviceError
        A device is not known.
    """
    if changes.from_device is not None and not changes.predicts:
        raise FieldError(
            "the device of the trace is given, and nothing that depends on it is asked",
            path="from",
            hint="add --device, --ranks or --link",
        )
    parts = [*_by_model(graph, changes, predictor), *_by_name(graph.nodes, changes)]
    before_s = graph.longest_s(replayer.run().end_s) / graph.count
    base = graph.durations()
    answers = [_answer(graph, replayer, base, before_s, name, [ratios]) for name, ratios in parts]
    if len(parts) > 1:
        answers.append(_answer(graph, replayer, base, before_s, "all together", [ratios for _, ratios in parts]))
    return answers


def device_of_trace(graph: TraceGraph, given: DeviceSpec | str | None) -> DeviceSpec:
    """The device that the trace was recorded on.

    Raises
    ------
    FieldError
        The trace does not name a known device, or names several.
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
    if changes.ranks is not None and changes.ranks < 2:
        raise FieldError(f"ranks is {changes.ranks}", path="ranks", hint="2 or more")
    if changes.ranks is not None or changes.link is not None:
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
                ratios = link_ratios(graph.nodes, predictor, device, link=over, ranks=ranks)
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
    seconds = graph.longest_s(replayer.run(durations).end_s) / graph.count
    affected_s = sum(base[i] for i in method)
    shares = {
        how: float(sum(base[i] for i, each in method.items() if each == how) / affected_s) if affected_s else 0.0
        for how in METHODS
    }
    reasons: dict[str, int] = {}
    for part in parts:
        for reason, count in part.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    domains = [prediction.domain for part in parts for prediction in part.predictions]
    return WhatIfAnswer(
        name,
        seconds,
        before_s - seconds,
        int((durations != base).sum()),
        {how: share for how, share in shares.items() if share > 0},
        worst(domain for domain in domains) if domains else None,
        dict(ordered[:_MOST_REASONS]),
    )
