"""The request for a replay: nodes with costs that are given or predicted, links, what-ifs, an interval."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, Field, ModelWrapValidatorHandler, model_validator

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.request import Name, PriceRequest, Seed, WholeNumber
from cdmpp.compose.request import OldRequest as Request
from cdmpp.errors import FieldError
from cdmpp.prediction import Prediction
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp.replay import forms, report
from cdmpp.replay.answers import ReplayAnswer
from cdmpp.replay.build import Plan, Priced, Settings, plan_nodes, put_prices
from cdmpp.replay.collector import paused_collector
from cdmpp.replay.engine import Replayer
from cdmpp.replay.graph import Floats, Order
from cdmpp.replay.interval import sample_makespans, spread_of
from cdmpp.replay.trace import trace_events

#: The size of a graph is its nodes, edges and held streams together. Samples where the request leaves it
#: open: as many as keep samples x size below this, within limits.
_AUTO_WORK, _AUTO_LEAST, _AUTO_MOST = 6_000_000, 16, 256
#: Samples and what-ifs, times size, that one request may ask for: several seconds.
MAX_WORK = 60_000_000
#: Events of a trace.
MAX_EVENTS = 500_000


class ReplayRequest(Request):
    """A graph of nodes on devices and streams, to be replayed (dPRO)."""

    nodes: Annotated[list[forms.NodeForm], Field(min_length=1, max_length=forms.MAX_NODES)]
    devices: Annotated[
        dict[Name, Name | forms.DeviceEntry],
        Field(
            max_length=forms.MAX_DEVICES,
            description="What the nodes' devices are, where their names are not known devices'.",
            default_factory=dict,
        ),
    ]
    links: Annotated[dict[Name, forms.LinkForm], Field(max_length=forms.MAX_LINKS, default_factory=dict)]
    order: Annotated[
        Order,
        Field(
            description='"ready": a stream runs what is ready first, ties by id. "listed": in the order of '
            "nodes, as a GPU stream runs what was put into it."
        ),
    ] = "ready"
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None
    overrides: Annotated[
        list[forms.OverrideForm],
        Field(max_length=forms.MAX_WHAT_IFS, description="What-ifs, each answered by itself.", default_factory=list),
    ]
    quantiles: Annotated[
        list[Annotated[float, Field(gt=0, lt=1)]],
        Field(min_length=1, max_length=32, description="Levels of the interval."),
    ] = [0.1, 0.9]  # noqa: RUF012
    samples: Annotated[
        Annotated[int, Field(ge=0, le=forms.MAX_SAMPLES), WholeNumber] | None,
        Field(description="Of the interval; default: 256, in large graphs fewer, 16 at least."),
    ] = None
    seed: Seed = 0
    correlation: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Of the errors of different programs on one device. 1: all are off the same way, as "
            "whole networks show; 0: they partly cancel. Equal programs always go together.",
        ),
    ] = 1.0
    timeline: Annotated[bool, Field(description="List when each node runs.")] = True
    trace: Annotated[bool, Field(description="Add Chrome trace events.")] = False
    missing: Annotated[
        list[forms.MissingForm],
        Field(
            max_length=1000,
            description="What a model has beyond this graph; comes back in the answer.",
            default_factory=list,
        ),
    ]

    answer_model: ClassVar[type[BaseModel]] = ReplayAnswer

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        with paused_collector():
            return handler(value)

    @cached_property
    def _plan(self) -> Plan:
        devices = {
            name: forms.DeviceEntry(device=entry) if isinstance(entry, str) else entry
            for name, entry in self.devices.items()
        }
        settings = Settings(self.backend, self.protocol, self.framework)
        return plan_nodes(self.nodes, devices, self.links, settings)

    @cached_property
    def _replayer(self) -> Replayer:
        """The graph, checked; what is to be predicted takes no time in it."""
        return Replayer(self._plan.graph(self.order))

    def price_requests(self) -> list[PriceRequest]:
        """Distinct programs of the nodes, each once.

        Raises
        ------
        FieldError
            Whatever is wrong with the graph.
        """
        with paused_collector():
            asked = self._plan.asked
            _ = self._replayer
        size = self._replayer.arrays.size
        replays = (self.samples or 0 if asked else 0) + len(self.overrides)
        if replays * size > MAX_WORK:
            raise FieldError(
                f"{replays} replays of {size} nodes, edges and held streams are too much work",
                path="samples" if asked and self.samples else "overrides",
                hint=f"samples and overrides, times that size: at most {MAX_WORK:,}",
            )
        if self.trace and size > MAX_EVENTS:
            raise FieldError(
                f"a trace of {size} nodes, edges and held streams is too large",
                path="trace",
                hint=f"at most {MAX_EVENTS:,}; the timeline has the same times",
            )
        self._matches()
        return asked

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """Replay, then again for each what-if and sample."""
        with paused_collector():
            return self._solve(prices)

    def _solve(self, prices: Sequence[Prediction]) -> dict[str, Any]:
        plan = self._plan
        priced = put_prices(plan, prices)
        durations = priced.durations()
        replayer = self._replayer.with_durations(durations)
        found = replayer.run()
        programs = report.programs_of(plan, priced, prices)
        answer = report.describe(plan, priced, prices, replayer, found, programs)
        answer["interval"] = self._interval(plan, prices, priced, replayer, found.makespan_s)
        answer["what_if"] = self._what_ifs(replayer, durations, found.makespan_s)
        answer["timeline"] = report.timeline(plan, found) if self.timeline else None
        answer["missing"] = [forms.as_json(one) for one in self.missing]
        answer["trace"] = trace_events(found, programs) if self.trace else None
        return answer

    def _samples(self, predicted: bool) -> int:
        if not predicted:
            return 0
        if self.samples is not None:
            return self.samples
        return min(max(_AUTO_WORK // self._replayer.arrays.size, _AUTO_LEAST), _AUTO_MOST)

    def _interval(
        self, plan: Plan, prices: Sequence[Prediction], priced: Priced, replayer: Replayer, makespan: float
    ) -> dict[str, Any] | None:
        samples = self._samples(bool(plan.asked))
        if plan.asked and not samples:
            return None
        levels = sorted(set(self.quantiles))
        if samples:
            spread = spread_of(plan.asked, prices)
            factors = spread.factors(samples, self.seed, self.correlation)
            found = sample_makespans(replayer, priced, factors)
        else:
            found = np.array([makespan])
        values = np.quantile(found, levels).tolist()
        return {
            "lower_s": min(values[0], makespan),
            "upper_s": max(values[-1], makespan),
            "quantiles": {f"{level:g}": value for level, value in zip(levels, values, strict=True)},
            "mean_s": float(found.mean()),
            "samples": samples,
        }

    def _matches(self) -> list[list[int]]:
        """Positions of the nodes that each override matches.

        Raises
        ------
        FieldError
            An override without selectors, or that matches nothing.
        """
        if not self.overrides:
            return []
        having: dict[tuple[str, str], set[int]] = {}
        for i, node in enumerate(self.nodes):
            keys = [("node", node.id), ("class", self._plan.classes[i])]
            for device, stream in self._plan.held[i]:
                keys += [("device", device), ("stream", stream)]
            for key in keys:
                having.setdefault(key, set()).add(i)
        found = []
        for k, override in enumerate(self.overrides):
            selectors = override.selectors()
            if not selectors:
                raise FieldError(
                    "an override selects nothing", path=f"overrides.{k}", hint="give node, device, stream or class"
                )
            sets = [having.get(selector, set()) for selector in selectors.items()]
            matched = set.intersection(*sets)
            if not matched:
                empty = [name for name, one in zip(selectors, sets, strict=True) if not one]
                said = ", ".join(f"{name} {value!r}" for name, value in selectors.items())
                asked = empty[0] if empty else next(iter(selectors))
                there = sorted(value for name, value in having if name == asked)
                raise FieldError(
                    f"no node has {said}",
                    path=f"overrides.{k}" + (f".{empty[0]}" if empty else ""),
                    hint=f"of {asked} there is: " + ", ".join(there[:20]) + (", ..." if there[20:] else ""),
                )
            found.append(sorted(matched))
        return found

    def _what_ifs(self, replayer: Replayer, durations: Floats, makespan: float) -> list[dict[str, Any]]:
        answers = []
        for override, matched in zip(self.overrides, self._matches(), strict=True):
            changed = durations.copy()
            changed[matched] = override.ratio * np.maximum(changed[matched] + override.delay_s, 0.0)
            then = float(replayer.makespans(changed[None])[0])
            answers.append(
                {
                    **forms.as_json(override),
                    "ratio": override.ratio,
                    "delay_s": override.delay_s,
                    "nodes": len(matched),
                    "makespan_s": then,
                    "saving_s": makespan - then,
                }
            )
        return answers
