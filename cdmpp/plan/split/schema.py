"""Request and plan of the stage split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from cdmpp.errors import FieldError
from cdmpp.llm.forms import LanguageModelForm
from cdmpp.plan.split.search import Goal
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.pricing import Cost, PredictedCost, collect, fill
from cdmpp.predict.requests.request import (
    Budget,
    Bytes,
    Closed,
    Count,
    DeviceForm,
    MaxSteps,
    Name,
    Plan,
    PositiveBytes,
    PriceRequest,
    Request,
    Row,
    Seconds,
    Work,
    exactly_one,
    instead_of,
)
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp.utils.units import format_latency, format_si

#: Seconds on any device, or by the name of the device.
GivenSeconds = Seconds | Annotated[dict[Name, Seconds], Field(min_length=1)]
PassName = Literal["forward", "backward"]
PASSES: tuple[PassName, ...] = ("forward", "backward")
DeviceValue = str | dict[str, Any]


class LanguageModelCurve(Closed):
    """A language model's step or pass over one micro-batch."""

    batch: Count = Field(1, description="Sequences of a micro-batch.")
    llm: LanguageModelForm


class LayerPrograms(Closed):
    """Programs that run one after the other, on the device of the layer's stage; or a layer of a language model."""

    programs: list[Work] | None = Field(None, min_length=1)
    curve: LanguageModelCurve | None = Field(
        None, description="Instead of programs: a pass of a language model's layer."
    )
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        return exactly_one(self, "programs", "curve")

    def price_requests(self, path: str, device: DeviceForm) -> list[PriceRequest]:
        """Programs on a device."""
        if self.curve is not None:
            curve = self.curve
            return curve.llm.price_requests([curve.batch], f"{path}.curve.llm", device, self.framework)
        return [
            PriceRequest(f"{path}.programs.{i}", work.program, device, self.backend, self.protocol, self.framework)
            for i, work in enumerate(self.programs or ())
        ]

    def cost(self, prices: Iterator[Prediction], device: DeviceForm | None) -> Cost:
        """The cost on a device; takes as many prices as :meth:`price_requests` lists programs."""
        if self.curve is not None:
            return self.curve.llm.priced([self.curve.batch], prices, self.framework, device)[0]
        works = self.programs or []
        return Cost.of([work.count for work in works], [next(prices) for _ in works])


class SplitLayerForm(Closed):
    """A layer, or several equal ones in a row. The cost of each pass is given in seconds or by programs."""

    name: str = Field("", max_length=200)
    count: Count = 1
    forward_s: GivenSeconds | None = Field(
        None, description="For one micro-batch: a number, or one for each device by name."
    )
    forward: LayerPrograms | None = Field(None, description="Predicted, instead of forward_s.")
    backward_s: GivenSeconds | None = Field(None, description="Whole backward pass.")
    backward: LayerPrograms | None = Field(None, description="Predicted, instead of backward_s.")
    activation_bytes: Bytes = Field(0.0, description="For one micro-batch, between its forward and its backward pass.")
    boundary_bytes: Bytes = Field(
        0.0, description="Input of the layer for one micro-batch, which a stage keeps where it recomputes."
    )
    weight_bytes: Bytes = Field(0.0, description="Weights, gradients and optimizer states.")
    transfer_s: Seconds = Field(0.0, description="Sending the output to another rank, and its gradient back.")
    transfer: PredictedCost | None = Field(None, description="Predicted, instead of transfer_s: such as a send_recv.")

    @model_validator(mode="after")
    def _costs(self) -> Self:
        instead_of(self, "transfer", "transfer_s")
        return exactly_one(exactly_one(self, "forward_s", "forward"), "backward_s", "backward")

    def programs(self, name: PassName) -> LayerPrograms | None:
        """Programs of a pass, where its cost is predicted."""
        return self.forward if name == "forward" else self.backward


class RankForm(Closed):
    """A device of the pipeline."""

    device: DeviceForm | None = Field(None, description="For predictions, and for costs by device; null: any.")
    memory_bytes: PositiveBytes | None = Field(
        None, description="Memory limit; null: that of the device, where it is published."
    )


class StagePlan(Row):
    """One stage."""

    stage: int
    rank: int = Field(description="Index in the request.")
    device: str | None
    first_layer: int
    last_layer: int
    layers: list[str] = Field(description="Names of the first and the last layer.")
    forward_s: float
    backward_s: float
    peak_bytes: float = Field(description="Under 1F1B.")


class SplitPlan(Plan):
    """Baselines, bound and gap refer to ``value_s``: the slowest stage or the step, depending on the goal."""

    objective_field = "value_s"

    bounded = "splits and orders"

    goal: Goal
    value_s: float
    lower_bound_s: float = Field(
        description="Lower bound of all contiguous splits that fit under 1F1B. With goal step also of all orders "
        "of whole passes, which may be shorter than 1F1B."
    )
    complete: bool = Field(description="No contiguous split has a smaller objective (goal step: under 1F1B).")
    divisible_bound_s: float = Field(description="Lower bound of the slowest stage, if layers could be cut anywhere.")
    stages: list[StagePlan]
    boundaries: list[int] = Field(description="First layer of every stage but the first.")
    slowest_s: float = Field(description="The longest stage or transfer.")
    step_s: float = Field(description="A 1F1B step of this split, emulated.")
    bubble: float
    fwd_costs: dict[str, float] = Field(
        description="Stage index to seconds of one micro-batch, for other schedule simulators."
    )
    bwd_costs: dict[str, float]
    steps: int = Field(description="Simulated splits.")
    cache: dict[str, int]
    too_large: list[str] = Field(
        default_factory=list,
        description="Baselines that do not fit into the memory.",
        exclude_if=lambda names: not names,
    )

    def simple_plans(self) -> dict[str, float]:
        """The baselines that fit into the memory."""
        return {name: seconds for name, seconds in self.baselines.items() if name not in self.too_large}

    @property
    def interval_figure(self) -> str:
        """The slowest stage or the step."""
        return f"{self.goal}_s"

    @property
    def choice(self) -> Any:
        """Layers and ranks of the stages, where all splits were compared."""
        return (self.boundaries, [stage.rank for stage in self.stages]) if self.complete else None

    def headline(self) -> str:
        """The objective and the step."""
        objective = "slowest stage" if self.goal == "slowest" else "1F1B step"
        proven = ", the shortest of all contiguous splits" if self.complete else ""
        step = f"a step takes {format_latency(self.step_s)}, {100 * self.bubble:.1f} % bubble"
        return f"{objective}: {format_latency(self.value_s)}{proven}; {step}"

    def tables(self) -> list[Table]:
        """The stages, the baselines."""
        columns: dict[str, Callable[[StagePlan], str]] = {
            "stage": lambda stage: str(stage.stage),
            "rank": lambda stage: str(stage.rank),
            "device": lambda stage: stage.device or "",
            "layers": lambda stage: f"{stage.first_layer} to {stage.last_layer}",
            "forward": lambda stage: format_latency(stage.forward_s),
            "backward": lambda stage: format_latency(stage.backward_s),
            "peak memory": lambda stage: format_si(stage.peak_bytes, "B"),
        }
        return [
            Table.of(self.stages, columns, right=(4, 5, 6)),
            self.baseline_table(),
            Table.lines(*self.explanation[1:]),
        ]


class SplitRequest(Request[SplitPlan]):
    """Which layers form which stage of a pipeline: contiguous, at least one layer on each rank."""

    layers: list[SplitLayerForm] = Field(min_length=1, description="In the order of the forward pass.")
    ranks: Count | Annotated[list[RankForm], Field(min_length=1)] = Field(
        description="Number of equal ranks; or each rank, in the order of the pipeline."
    )
    micro_batches: Count
    goal: Goal = Field(
        "slowest", description="Objective: the slowest stage (the rate of a long run), or a whole 1F1B step."
    )
    any_order: bool = Field(False, description="Whether the order of the ranks may change.")
    memory: Literal["keep", "recompute"] = Field(
        "keep",
        description="Activations between forward and backward pass: kept; or dropped except for the input of the "
        "stage, and recomputed before the backward pass, which is longer by the forward pass.",
    )
    budget_s: Budget = 1.0
    max_steps: MaxSteps = None

    #: Predicted cost on each device of :attr:`devices`, by layer and pass.
    _predicted: dict[tuple[int, PassName], list[Cost]] = PrivateAttr(default_factory=dict)

    def sizes(self) -> dict[str, int]:
        """Layers, ranks, micro-batches, devices, and cells of the dynamic programming."""
        layers, ranks = sum(layer.count for layer in self.layers), self.ranks
        kinds: dict[str, int] = {}
        for form in [] if isinstance(ranks, int) else ranks:
            kinds[repr(form)] = kinds.get(repr(form), 0) + 1
        count = ranks if isinstance(ranks, int) else len(ranks)
        states = math.prod(1 + n for n in kinds.values() or [count]) * max(len(kinds), 1) if self.any_order else count
        return {
            "layers": layers,
            "ranks": count,
            "micro_batches": self.micro_batches,
            "devices": len(self.devices) if kinds else 1,
            "cells": (layers + 1) ** 2 * states,
        }

    def price_requests(self) -> list[PriceRequest]:
        """The programs of all layers on every kind of device, device after device within a pass; then the transfers."""
        passes = [
            request
            for number, name, programs in self._predicted_passes()
            for device in self._devices_for(f"layers.{number}.{name}")
            for request in programs.price_requests(f"layers.{number}.{name}", device)
        ]
        return passes + collect(self)

    def with_prices(self, prices: Sequence[Prediction]) -> Self:
        """A copy with the predicted cost of each pass on each kind of device, and of each transfer."""
        transfers = len(collect(self))
        filled = fill(self, prices[len(prices) - transfers :])
        if filled is self:
            filled = self.model_copy()
        remaining = iter(prices[: len(prices) - transfers])
        filled._predicted = {
            (number, name): [programs.cost(remaining, device) for device in self.devices]
            for number, name, programs in self._predicted_passes()
        }
        return filled

    @property
    def rank_forms(self) -> list[RankForm]:
        """Each rank."""
        return [RankForm()] * self.ranks if isinstance(self.ranks, int) else self.ranks

    @property
    def devices(self) -> list[DeviceValue | None]:
        """The different devices of the ranks, in the order of their first occurrence."""
        devices: list[DeviceValue | None] = []
        for form in self.rank_forms:
            if form.device not in devices:
                devices.append(form.device)
        return devices

    def costs(self, number: int, name: PassName) -> list[Cost]:
        """Cost of one pass of a layer on each of :attr:`devices`; after :meth:`with_prices`.

        Raises FieldError: seconds are given by device, and a device is missing.
        """
        if (number, name) in self._predicted:
            return self._predicted[number, name]
        layer = self.layers[number]
        given = layer.forward_s if name == "forward" else layer.backward_s
        assert given is not None
        if not isinstance(given, dict):
            return [Cost.given(given)] * len(self.devices)
        for device in self.devices:
            if not isinstance(device, str) or device not in given:
                raise FieldError.at(
                    f"layers.{number}.{name}_s",
                    f"no value for {device_name(device)}",
                    hint="it has: " + ", ".join(given) + "; each rank needs one of these as its device",
                )
        return [Cost.given(given[str(device)]) for device in self.devices]

    def _predicted_passes(self) -> Iterator[tuple[int, PassName, LayerPrograms]]:
        """Layer, pass and programs of each predicted cost."""
        for number, layer in enumerate(self.layers):
            for name in PASSES:
                programs = layer.programs(name)
                if programs is not None:
                    yield number, name, programs

    def _devices_for(self, path: str) -> list[DeviceValue]:
        for r, form in enumerate(self.rank_forms):
            if form.device is None:
                where = f"ranks.{r}.device" if isinstance(self.ranks, list) else "ranks"
                raise FieldError.at(
                    where,
                    f"{path} must be predicted, and there is no device to predict it for",
                    hint='give the ranks as a list: [{"device": "t4"}, ...]',
                )
        return [device for device in self.devices if device is not None]


def device_name(device: DeviceValue | None) -> str:
    """The name of a device for messages."""
    if device is None:
        return "any device"
    return device if isinstance(device, str) else str(device.get("name", "an unnamed device"))
