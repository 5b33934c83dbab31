"""Request and plan of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from cdmpp.errors import FieldError
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.request import (
    MAX_COUNT,
    Interval,
    Name,
    Plan,
    PriceRequest,
    Request,
    Row,
    Seed,
    WholeNumber,
)
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp.simulate.replay import forms
from cdmpp.simulate.replay.build import CheckedNodes, PriceOptions, check_nodes
from cdmpp.simulate.replay.engine import Replayer
from cdmpp.simulate.replay.graph import Order
from cdmpp.simulate.replay.records import NodeList, NodeRows, NodeTimeline, paused_collector
from cdmpp.utils.units import format_latency

_MOST_ROWS = 15


class MakespanInterval(Interval):
    """Interval of the makespan, from the intervals of the predictions."""

    lower_s: float = Field(description="The lowest quantile, or the makespan where that is lower.")
    upper_s: float = Field(description="The highest quantile, or the makespan where that is higher.")
    quantiles: dict[str, float] = Field(description="Level to seconds, of the sampled makespans.")
    mean_s: float
    samples: int = Field(description="0: nothing was predicted, the makespan is certain.")


class PathNode(Row):
    """A node of the critical path."""

    id: str
    device: str = Field(description="For a collective, its first rank.")
    stream: str
    class_: str = Field(alias="class")
    start_s: float
    end_s: float
    share: float = Field(description="Share of the makespan.")
    program: str | None = Field(description="Its program; of several programs the longest one.")


class PathShare(Row):
    """Share of the critical path of one program, or of all nodes of a class without programs."""

    program: str | None = Field(description="null: given durations, transfers and gaps, by class.")
    device: str | None = Field(description="Device of the prediction.")
    class_: str = Field(alias="class")
    nodes: int
    runs: int = Field(description="Runs of the program; without a program, number of nodes or gaps.")
    seconds: float
    share: float = Field(description="Share of the makespan.")

    @property
    def name(self) -> str:
        """Program and device, or the class."""
        return f"{self.program} on {self.device}" if self.program else f"({self.class_})"


class StreamRow(Row):
    """A stream; busy and idle time add up to the makespan."""

    device: str
    stream: str
    busy_s: float
    idle_s: float
    nodes: int


class DeviceRow(Row):
    """A device of the graph."""

    device: str
    exposed_comm_s: float = Field(description="Seconds in which it transfers and does not compute.")


def _not_given(value: object) -> bool:
    return value is None


class WhatIf(Row):
    """An override, with the selectors that it has, and the makespan with it."""

    node: str | None = Field(None, exclude_if=_not_given)
    device: str | None = Field(None, exclude_if=_not_given)
    stream: str | int | None = Field(None, exclude_if=_not_given)
    class_: str | None = Field(None, alias="class", exclude_if=_not_given)
    ratio: float
    delay_s: float
    nodes: int = Field(description="Number of matching nodes.")
    makespan_s: float
    saving_s: float = Field(description="Makespan less this one; negative: it becomes longer.")

    def cells(self) -> tuple[str, ...]:
        """Cells of the table of what-ifs."""
        given = {"node": self.node, "device": self.device, "stream": self.stream, "class": self.class_}
        selected = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        sign = "+" if self.delay_s > 0 else "-"
        delay = f" {sign} {format_latency(abs(self.delay_s))}" if self.delay_s else ""
        saving = ("-" if self.saving_s < 0 else "") + format_latency(abs(self.saving_s))
        return f"{selected}: x {self.ratio:g}{delay}", str(self.nodes), format_latency(self.makespan_s), saving


class Trace(Row):
    """Chrome trace events, times in µs."""

    trace_events: list[dict[str, Any]] = Field(alias="traceEvents")
    display_time_unit: Literal["ms"] = Field("ms", alias="displayTimeUnit")


class ReplayPlan(Plan):
    """Times of all nodes, the critical path, and the interval of the makespan."""

    bounded = "orders of the nodes"

    makespan_s: float
    lower_bound_s: float = Field(description="The longest path, or the time of the busiest stream.")
    interval: MakespanInterval | None = Field(description="null: samples is 0, and programs were predicted.")
    critical_path: list[PathNode] = Field(description="Each node starts when the one before allows it.")
    by_program: list[PathShare] = Field(description="The critical path by program, largest first; shares sum to 1.")
    streams: list[StreamRow]
    devices: list[DeviceRow]
    exposed_comm_s: float = Field(description="Seconds in which something is transferred and no device computes.")
    what_if: list[WhatIf] = Field(description="In the order of overrides.")
    timeline: NodeTimeline = Field(description="In the order of nodes.")
    missing: list[forms.MissingForm] = Field(description="Operators of the model that are not included.")
    remarks: list[str] = Field(description="Transfers outside of the measured range.")
    trace: Trace | None

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        if not isinstance(self.timeline, NodeRows):
            return super().to_json()
        # Apart: to serialize a long list row by row takes longer than to replay it.
        with paused_collector():
            rows = self.timeline.dicts()
        return {**self.model_copy(update={"timeline": None}).to_json(), "timeline": rows}

    def headline(self) -> str:
        """The makespan, with its sampled interval."""
        sampled = self.interval if self.interval is not None and self.interval.samples else None
        ends = f" [{format_latency(sampled.lower_s)} – {format_latency(sampled.upper_s)}]" if sampled else ""
        return f"makespan {format_latency(self.makespan_s)}{ends}"

    def simple_plans(self) -> dict[str, float]:
        """None: the baselines bound the makespan, and the replay chooses nothing."""
        return {}

    def tables(self) -> list[Table]:
        """The critical path by program, the streams and the what-ifs."""
        path = [(s.name, f"{s.runs} x", format_latency(s.seconds), f"{100 * s.share:.1f} %") for s in self.by_program]
        streams = [
            (f"{s.device} {s.stream}", str(s.nodes), format_latency(s.busy_s), format_latency(s.idle_s))
            for s in self.streams
        ]
        classes = self.timeline.column("class_") if isinstance(self.timeline, NodeRows) else []
        transfers = "comm" in classes or self.exposed_comm_s
        what_if = [row.cells() for row in self.what_if]
        return [
            Table.lines(
                f"one after the other {format_latency(self.baselines['serial'])}, "
                f"longest path {format_latency(self.baselines['longest_path'])}"
            ),
            *_shortened(("critical path", "runs", "time", "share"), path),
            *_shortened(("stream", "nodes", "busy", "idle"), streams),
            *(_shortened(("what if", "nodes", "makespan", "saving"), what_if) if what_if else ()),
            Table.lines(
                f"communication that nothing hides: {format_latency(self.exposed_comm_s)}" if transfers else "",
                *(f"not included: {lost.operator} ({lost.count} x): {lost.reason}" for lost in self.missing),
                *self.remarks,
            ),
        ]


def _shortened(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[Table]:
    """A table of the first rows, with their number where there are more."""
    more = f"... and {len(rows) - _MOST_ROWS} more (--json has all)" if len(rows) > _MOST_ROWS else ""
    return [Table(header, rows[:_MOST_ROWS], right=(1, 2, 3)), Table.lines(more)]


class ReplayRequest(Request[ReplayPlan]):
    """A graph of nodes on devices and streams to replay (dPRO)."""

    nodes: NodeList
    devices: dict[Name, Name | forms.DeviceEntry] = Field(
        description="Devices of the nodes whose names are not those of known devices.", default_factory=dict
    )
    links: dict[Name, forms.LinkForm] = Field(default_factory=dict)
    order: Order = Field(
        "ready",
        description='"ready": a stream runs the node that is ready first, ties by id. "listed": a stream runs its '
        "nodes in the order of the list, as a GPU stream.",
    )
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None
    overrides: list[forms.OverrideForm] = Field(description="What-ifs, each applied alone.", default_factory=list)
    quantiles: list[Annotated[float, Field(gt=0, lt=1)]] = Field(
        [0.1, 0.9], min_length=1, max_length=32, description="Quantile levels of the interval."
    )
    samples: Annotated[int, Field(ge=0, le=MAX_COUNT), WholeNumber] | None = Field(
        None, description="Samples of the interval; default: 256, in large graphs fewer, at least 16."
    )
    seed: Seed = 0
    correlation: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Correlation of the errors of different programs on one device. 1: all errors have one sign, "
        "as in whole networks; 0: they partly cancel. Equal programs always have equal errors.",
    )
    timeline: bool = Field(True, description="List start and end of each node.")
    trace: bool = Field(False, description="Add Chrome trace events.")
    missing: list[forms.MissingForm] = Field(
        description="Operators of a model that are not in this graph; copied to the plan.", default_factory=list
    )

    _prices: list[Prediction] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        with paused_collector():
            return handler(value)

    @cached_property
    def checked(self) -> CheckedNodes:
        """The nodes, checked, and their programs to price. Raises FieldError: a node, device or link is wrong."""
        devices = {
            name: forms.DeviceEntry(device=entry) if isinstance(entry, str) else entry
            for name, entry in self.devices.items()
        }
        return check_nodes(self.nodes, devices, self.links, PriceOptions(self.backend, self.protocol, self.framework))

    @cached_property
    def replayer(self) -> Replayer:
        """The checked graph; predicted nodes take no time in it.

        Raises FieldError: a dependency is unknown, or there is a cycle.
        """
        return Replayer(self.checked.graph(self.order))

    def sizes(self) -> dict[str, int]:
        """Nodes; nodes, edges and held streams times the replays of the graph; the same for a trace."""
        size = self.replayer.arrays.size
        predicted = bool(self.checked.price_requests)
        replays = (self.samples or 0 if predicted else 0) + len(self.overrides)
        return {"nodes": len(self.nodes), "work": replays * size, "events": size if self.trace else 0}

    def check(self) -> None:
        """Raise FieldError where the graph is wrong, or an override matches nothing."""
        with paused_collector():
            _ = self.replayer
        self.matches()

    def given_costs(self) -> list[str]:
        """Paths of the costs that this request gives as numbers: of its nodes first, which are plain records."""
        fields = [name for name in ("duration_s", "gap_s") if any(getattr(node, name) for node in self.nodes)]
        return [*(f"nodes.*.{name}" for name in fields), *super().given_costs()]

    def price_requests(self) -> list[PriceRequest]:
        """Each combination of program and device of the nodes once."""
        self.check()
        return self.checked.price_requests

    def with_prices(self, prices: Sequence[Prediction]) -> Self:
        """A copy that keeps the prices."""
        filled = self.model_copy()
        filled._prices = list(prices)
        return filled

    @property
    def prices(self) -> list[Prediction]:
        """One for each of :meth:`price_requests`; after :meth:`with_prices`."""
        return self._prices

    def matches(self) -> list[list[int]]:
        """Positions of the nodes that each override matches.

        Raises FieldError: an override has no selector, or matches nothing.
        """
        if not self.overrides:
            return []
        having: dict[tuple[str, str], set[int]] = {}
        for i, node in enumerate(self.nodes):
            keys = [("node", node.id), ("class", self.checked.classes[i])]
            for device, stream in self.checked.held[i]:
                keys += [("device", device), ("stream", stream)]
            for key in keys:
                having.setdefault(key, set()).add(i)
        matches = []
        for k, override in enumerate(self.overrides):
            selectors = override.selectors()
            if not selectors:
                raise FieldError(
                    "an override selects nothing", path=f"overrides.{k}", hint="give node, device, stream or class"
                )
            matched = set.intersection(*(having.get(selector, set()) for selector in selectors.items()))
            if not matched:
                unknown = [name for name, value in selectors.items() if (name, value) not in having]
                given = ", ".join(f"{name} {value!r}" for name, value in selectors.items())
                listed = unknown[0] if unknown else next(iter(selectors))
                values = sorted(value for name, value in having if name == listed)
                raise FieldError(
                    f"no node has {given}",
                    path=f"overrides.{k}" + (f".{unknown[0]}" if unknown else ""),
                    hint=f"{listed} is one of: " + ", ".join(values[:20]) + (", ..." if values[20:] else ""),
                )
            matches.append(sorted(matched))
        return matches
