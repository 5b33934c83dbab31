"""The request and the answer of the stage split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.pricing import MAX_PARTS, Cost
from cdmpp.compose.request import (
    Budget,
    Closed,
    DeviceForm,
    Explained,
    MaxSteps,
    Name,
    PriceRequest,
    Seconds,
    WholeNumber,
    Work,
)
from cdmpp.compose.request import OldRequest as Request
from cdmpp.emulator.forms import Bytes
from cdmpp.errors import FieldError
from cdmpp.planning.split.dynamic import MAX_CELLS, cells
from cdmpp.planning.split.report import report
from cdmpp.planning.split.search import Goal
from cdmpp.planning.split.table import Layer, Rank
from cdmpp.prediction import Prediction
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol

MAX_LAYERS, MAX_RANKS, MAX_MICRO_BATCHES, MAX_DEVICES = 512, 64, 512, 16

#: Seconds on any device, or by the name of the device.
GivenSeconds = Seconds | Annotated[dict[Name, Seconds], Field(min_length=1, max_length=MAX_DEVICES)]


class Programs(Closed):
    """Programs that run one after the other, on whatever device the layer is put."""

    programs: Annotated[list[Work], Field(min_length=1, max_length=MAX_PARTS)]
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None


class LayerForm(Closed):
    """A layer, or several equal ones in a row. Of each pass exactly one of seconds and programs."""

    name: Annotated[str, Field(max_length=200)] = ""
    count: Annotated[int, Field(ge=1, le=MAX_LAYERS), WholeNumber] = 1
    forward_s: Annotated[
        GivenSeconds | None, Field(description="Of one micro-batch; a number, or one for each device by name.")
    ] = None
    forward: Annotated[Programs | None, Field(description="Predicted, instead of forward_s.")] = None
    backward_s: Annotated[GivenSeconds | None, Field(description="Whole backward pass.")] = None
    backward: Annotated[Programs | None, Field(description="Predicted, instead of backward_s.")] = None
    activation_bytes: Annotated[
        Bytes, Field(description="Of one micro-batch, between its forward and its backward pass.")
    ] = 0.0
    weight_bytes: Annotated[Bytes, Field(description="Weights, gradients and optimizer states.")] = 0.0
    transfer_s: Annotated[Seconds, Field(description="Of the output to another rank, and of its gradient back.")] = 0.0


class RankForm(Closed):
    """A device of the pipeline."""

    device: Annotated[DeviceForm | None, Field(description="For predictions, and for costs by device; null: any.")] = (
        None
    )
    memory_bytes: Annotated[float | None, Field(gt=0, le=1e18, description="What it may hold; null: anything.")] = None


class SplitRequest(Request):
    """Which layers go into which stage of a pipeline: contiguous, at least one on each rank."""

    layers: Annotated[
        list[LayerForm], Field(min_length=1, max_length=MAX_LAYERS, description="In the order of the pass.")
    ]
    ranks: Annotated[
        Annotated[int, Field(ge=1, le=MAX_RANKS), WholeNumber]
        | Annotated[list[RankForm], Field(min_length=1, max_length=MAX_RANKS)],
        Field(description="How many equal ones; or each, in the order of the pipeline."),
    ]
    micro_batches: Annotated[int, Field(ge=1, le=MAX_MICRO_BATCHES), WholeNumber]
    goal: Annotated[
        Goal, Field(description="What is to be short: the slowest stage (a long run's pace), or a whole 1F1B step.")
    ] = "slowest"
    any_order: Annotated[bool, Field(description="Whether the ranks may change places.")] = False
    budget_s: Budget = 1.0
    max_steps: MaxSteps = None

    answer_model: ClassVar[type[BaseModel]]

    def price_requests(self) -> list[PriceRequest]:
        """The programs of all layers on every kind of device, kind after kind within a pass."""
        return [
            PriceRequest(f"{path}.programs.{i}", work.program, device, one.backend, one.protocol, one.framework)
            for path, one in self._predicted()
            for device in self._devices_for(path)
            for i, work in enumerate(one.programs)
        ]

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """See :class:`SplitAnswer`."""
        layers, parts = self._layers(iter(prices))
        ranks = [Rank(self.kinds.index(form.device), form.memory_bytes or float("inf")) for form in self.rank_forms]
        if len(ranks) > len(layers):
            raise FieldError(
                f"ranks: {len(ranks)}, and {len(layers)} layers", path="ranks", hint="each rank gets a layer at least"
            )
        work = (len(layers) + 1) ** 2 * cells(ranks, self.any_order)
        if work > MAX_CELLS:
            raise FieldError(
                f"any_order: too many ways to arrange {len(ranks)} ranks for {len(layers)} layers",
                path="any_order",
                hint="give the order, or ranks of fewer kinds",
            )
        return report(
            layers,
            ranks,
            [_words(device) for device in self.kinds],
            parts,
            self.micro_batches,
            self.goal,
            self.any_order,
            watch,
            self.max_steps,
        )

    @property
    def rank_forms(self) -> list[RankForm]:
        """Each rank."""
        return [RankForm()] * self.ranks if isinstance(self.ranks, int) else self.ranks

    @property
    def kinds(self) -> list[str | dict[str, Any] | None]:
        """The different devices, in the order in which they occur."""
        found: list[str | dict[str, Any] | None] = []
        for form in self.rank_forms:
            if form.device not in found:
                found.append(form.device)
        return found

    def _predicted(self) -> Iterator[tuple[str, Programs]]:
        """The costs to predict, with their paths; raises where a cost is there twice or not at all."""
        for number, layer in enumerate(self.layers):
            for name in ("forward", "backward"):
                given, programs = getattr(layer, f"{name}_s"), getattr(layer, name)
                path = f"layers.{number}.{name}"
                if (given is None) == (programs is None):
                    raise FieldError(
                        f"{path}_s: " + ("missing" if given is None else f"{name} is there as well"),
                        path=f"{path}_s",
                        hint=f"give either {name}_s or {name}",
                    )
                if programs is not None:
                    yield path, programs

    def _devices_for(self, path: str) -> list[str | dict[str, Any]]:
        for r, form in enumerate(self.rank_forms):
            if form.device is None:
                where = f"ranks.{r}.device" if isinstance(self.ranks, list) else "ranks"
                raise FieldError(
                    f"{where}: {path} has to be predicted, and there is no device to predict it for",
                    path=where,
                    hint='give the ranks as a list: [{"device": "t4"}, ...]',
                )
        return [device for device in self.kinds if device is not None]

    def _layers(self, prices: Iterator[Prediction]) -> tuple[list[Layer], list[list[Cost]]]:
        """The layers, each by itself, and for each what its passes are made of on every kind."""
        layers: list[Layer] = []
        parts: list[list[Cost]] = []
        # One list of each kind's costs for each predicted pass, as they were asked for.
        predicted = {
            path: [
                Cost.of([work.count for work in one.programs], [next(prices) for _ in one.programs])
                for _ in self._devices_for(path)
            ]
            for path, one in self._predicted()
        }
        for number, form in enumerate(self.layers):
            forward, backward = (
                predicted.get(f"layers.{number}.{name}") or self._given(number, name)
                for name in ("forward", "backward")
            )
            layer = Layer(
                tuple(cost.latency_s for cost in forward),
                tuple(cost.latency_s for cost in backward),
                form.activation_bytes,
                form.weight_bytes,
                form.transfer_s,
                form.name or f"layer {number}",
            )
            both = [
                Cost(f.latency_s + b.latency_s, f.lower_s + b.lower_s, f.upper_s + b.upper_s, f.parts + b.parts)
                for f, b in zip(forward, backward, strict=True)
            ]
            layers += [layer] * form.count
            parts += [both] * form.count
            if len(layers) > MAX_LAYERS:
                raise FieldError(
                    f"layers.{number}.count: more than {MAX_LAYERS} layers",
                    path=f"layers.{number}.count",
                    hint="take several layers together",
                )
        return layers, parts

    def _given(self, number: int, name: str) -> list[Cost]:
        given = getattr(self.layers[number], f"{name}_s")
        if not isinstance(given, dict):
            return [Cost.given(given)] * len(self.kinds)
        found = []
        for device in self.kinds:
            if not isinstance(device, str) or device not in given:
                path = f"layers.{number}.{name}_s"
                raise FieldError(
                    f"{path}: there is nothing for {_words(device)}",
                    path=path,
                    hint="it has: " + ", ".join(given) + "; ranks name their device",
                )
            found.append(Cost.given(given[device]))
        return found


def _words(device: str | dict[str, Any] | None) -> str:
    if device is None:
        return "any device"
    return device if isinstance(device, str) else str(device.get("name", "a device of its own"))


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StageAnswer(_Closed):
    """One stage."""

    stage: int
    rank: Annotated[int, Field(description="Its number in the request.")]
    device: str | None
    first_layer: int
    last_layer: int
    layers: Annotated[list[str], Field(description="Names of the first and the last one.")]
    forward_s: float
    backward_s: float
    peak_bytes: Annotated[float, Field(description="Under 1F1B.")]


class SplitAnswer(Explained):
    """Baselines, bound and gap are of ``value_s``: the slowest stage or the step, as the goal says."""

    goal: Goal
    value_s: float
    lower_bound_s: Annotated[
        float, Field(description="What no contiguous split can go below: here the optimum, where gap is 0.")
    ]
    divisible_bound_s: Annotated[
        float, Field(description="What the slowest stage could not go below if layers could be cut anywhere.")
    ]
    stages: list[StageAnswer]
    boundaries: Annotated[list[int], Field(description="First layer of every stage but the first.")]
    slowest_s: Annotated[float, Field(description="The longest stage or transfer.")]
    step_s: Annotated[float, Field(description="A 1F1B step of this split, emulated.")]
    bubble: float
    fwd_costs: Annotated[
        dict[str, float], Field(description="Stage index to seconds of one micro-batch, for other schedule simulators.")
    ]
    bwd_costs: dict[str, float]
    steps: Annotated[int, Field(description="Splits that were simulated.")]
    cache: dict[str, float]


SplitRequest.answer_model = SplitAnswer
