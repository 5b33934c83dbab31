"""The parts of a request: stages with costs in seconds or to be predicted, and orders of passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from cdmpp.compose.pricing import Cost, PredictedCost
from cdmpp.compose.request import Closed, PriceRequest, Seconds, WholeNumber
from cdmpp.emulator.orders import Pass, PassKind
from cdmpp.emulator.stages import Memory, PassCost, Stage
from cdmpp.errors import FieldError
from cdmpp.prediction import Prediction

#: Stages, micro-batches, their product, and classes of micro-batches of one request: a step of the largest
#: takes well under a second.
MAX_STAGES, MAX_MICRO_BATCHES, MAX_CELLS, MAX_CLASSES = 256, 4096, 16_384, 16

Bytes = Annotated[float, Field(ge=0, le=1e18)]
StageNumber = Annotated[int, Field(ge=0, lt=MAX_STAGES), WholeNumber]
MicroBatch = Annotated[int, Field(ge=0, lt=MAX_MICRO_BATCHES), WholeNumber]
GivenOrPredicted = tuple[float | None, float | PredictedCost | None]


class PassForm(Closed):
    """Costs of one micro-batch in one stage: of each pass exactly one of seconds and programs."""

    forward_s: Seconds | None = None
    forward: Annotated[PredictedCost | None, Field(description="Predicted, instead of forward_s.")] = None
    backward_s: Annotated[Seconds | None, Field(description="Whole backward pass, weight gradients included.")] = None
    backward: Annotated[PredictedCost | None, Field(description="Predicted, instead of backward_s.")] = None
    weight_s: Annotated[
        Seconds | None,
        Field(
            description="The part of the backward pass that is weight gradients: a pass of its own (W) where "
            "the schedule puts it off. null, with no `weight` either: half of the backward pass."
        ),
    ] = None
    weight: Annotated[PredictedCost | None, Field(description="Predicted, instead of weight_s.")] = None
    activation_bytes: Annotated[Bytes, Field(description="What the backward pass needs of the forward pass.")] = 0.0
    boundary_bytes: Annotated[
        Bytes, Field(description="The stage's input: what stays where activations are recomputed.")
    ] = 0.0

    def fields(self, path: str) -> list[tuple[str, float | PredictedCost | None]]:
        """Its three costs with their paths; weight's may be None.

        Raises
        ------
        FieldError
            A cost is given twice, or not at all.
        """
        found: list[tuple[str, float | PredictedCost | None]] = []
        for name in ("forward", "backward", "weight"):
            given, predicted = getattr(self, f"{name}_s"), getattr(self, name)
            if given is not None and predicted is not None:
                raise FieldError(
                    f"{path}.{name}: {name}_s is there as well", path=f"{path}.{name}", hint="give one of the two"
                )
            if given is None and predicted is None and name != "weight":
                raise FieldError(f"{path}.{name}_s: missing", path=f"{path}.{name}_s", hint=f"give {name}_s or {name}")
            found.append((f"{path}.{name}", given if predicted is None else predicted))
        return found


class StageForm(PassForm):
    """A stage of the pipeline."""

    weight_bytes: Annotated[Bytes, Field(description="Weights, gradients and optimizer states: held all the time.")] = (
        0.0
    )
    memory: Annotated[
        Memory,
        Field(
            description="Activations between forward and backward: kept; all but the stage's input dropped, "
            "and the forward pass run again before the backward one; or copied to the host and back."
        ),
    ] = "keep"
    classes: Annotated[
        list[PassForm],
        Field(
            default_factory=list,
            max_length=MAX_CLASSES - 1,
            description="Costs of micro-batches of class 1, 2, ...; the stage's own are those of class 0.",
        ),
    ]


class PassStep(Closed):
    """One pass in an order."""

    stage: StageNumber
    kind: Annotated[
        PassKind, Field(alias="pass", description="Forward; backward; backward for the weights, where it is apart.")
    ]
    micro_batch: MicroBatch


class OrderForm(Closed):
    """What each rank runs, one pass after the other. Where W is there, B is for the inputs alone."""

    order: Annotated[
        list[Annotated[list[PassStep], Field(max_length=3 * MAX_CELLS)]], Field(min_length=1, max_length=MAX_STAGES)
    ]

    def passes(self) -> list[list[Pass]]:
        """For each rank."""
        return [[Pass(one.kind, one.stage, one.micro_batch) for one in row] for row in self.order]


@dataclass(frozen=True)
class Priced:
    """A stage with the costs that its figures come from.

    Attributes
    ----------
    stage : Stage
    lower, upper : Stage
        With the lower and upper bounds of all its predictions.
    forward, backward : Cost
        Of class 0.
    """

    stage: Stage
    lower: Stage
    upper: Stage
    forward: Cost
    backward: Cost


def asked_of_stages(stages: list[StageForm]) -> list[PriceRequest]:
    """The programs of all stages, in the order in which :func:`priced` takes their prices."""
    return [
        one
        for s, stage in enumerate(stages)
        for path, form in _passes(stage, s)
        for where, field in form.fields(path)
        if isinstance(field, PredictedCost)
        for one in field.price_requests(where)
    ]


def priced(stages: list[StageForm], prices: Iterator[Prediction]) -> list[Priced]:
    """The stages with their prices.

    Raises
    ------
    FieldError
        Weight gradients take longer than the whole backward pass.
    """
    found = []
    for s, form in enumerate(stages):
        costs = []
        for path, one in _passes(form, s):
            forward, backward, weight = (
                None if field is None else _cost(field, prices) for _, field in one.fields(path)
            )
            assert forward is not None and backward is not None
            if weight is not None and weight.latency_s > backward.latency_s:
                raise FieldError(
                    f"{path}.weight_s: {weight.latency_s:g} s, more than the whole backward pass of "
                    f"{backward.latency_s:g} s",
                    path=f"{path}.weight_s",
                    hint="backward_s holds the weight gradients as well",
                )
            costs.append((one, forward, backward, weight))
        middle, lower, upper = (_stage(form, costs, figure) for figure in ("latency_s", "lower_s", "upper_s"))
        found.append(Priced(middle, lower, upper, costs[0][1], costs[0][2]))
    return found


def _passes(stage: StageForm, number: int) -> list[tuple[str, PassForm]]:
    path = f"stages.{number}"
    return [(path, stage), *((f"{path}.classes.{c}", form) for c, form in enumerate(stage.classes))]


def _cost(field: float | PredictedCost, prices: Iterator[Prediction]) -> Cost:
    return field.with_prices(prices).cost if isinstance(field, PredictedCost) else Cost.given(field)


def _stage(form: StageForm, costs: list[tuple[PassForm, Cost, Cost, Cost | None]], figure: str) -> Stage:
    passes = []
    for one, forward, backward, weight in costs:
        whole_s = getattr(backward, figure)
        # Bounds of parts do not know of each other: the part stays within the whole.
        weight_s = None if weight is None else min(getattr(weight, figure), whole_s)
        passes.append(PassCost(getattr(forward, figure), whole_s, weight_s, one.activation_bytes, one.boundary_bytes))
    own = passes[0]
    return Stage(
        own.forward_s,
        own.backward_s,
        own.weight_s,
        own.activation_bytes,
        own.boundary_bytes,
        form.weight_bytes,
        form.memory,
        tuple(passes[1:]),
    )
