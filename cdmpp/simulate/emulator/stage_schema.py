"""Stages and orders of a simulate request."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from cdmpp.predict.requests.pricing import PredictedCost
from cdmpp.predict.requests.request import (
    MAX_COUNT,
    Bytes,
    Closed,
    DeviceForm,
    Seconds,
    WholeNumber,
    at_most_one,
    exactly_one,
)
from cdmpp.simulate.emulator.orders import Pass, PassKind
from cdmpp.simulate.emulator.stages import Memory

StageNumber = Annotated[int, Field(ge=0, lt=MAX_COUNT), WholeNumber]
MicroBatch = Annotated[int, Field(ge=0, lt=MAX_COUNT), WholeNumber]


class PassForm(Closed):
    """Costs of one micro-batch in one stage: each pass in seconds or by programs."""

    forward_s: Seconds | None = None
    forward: Annotated[PredictedCost | None, Field(description="Predicted, instead of forward_s.")] = None
    backward_s: Annotated[Seconds | None, Field(description="Whole backward pass, weight gradients included.")] = None
    backward: Annotated[PredictedCost | None, Field(description="Predicted, instead of backward_s.")] = None
    weight_s: Annotated[
        Seconds | None,
        Field(
            description="Weight gradients, a part of the backward pass: a separate pass (W) where the schedule "
            "delays it. Default, without `weight`: half of the backward pass."
        ),
    ] = None
    weight: Annotated[PredictedCost | None, Field(description="Predicted, instead of weight_s.")] = None
    activation_bytes: Annotated[Bytes, Field(description="Kept from the forward pass for the backward pass.")] = 0.0
    boundary_bytes: Annotated[
        Bytes, Field(description="Input of the stage, which is kept where activations are recomputed.")
    ] = 0.0

    @model_validator(mode="after")
    def _costs(self) -> Self:
        exactly_one(self, "forward_s", "forward")
        exactly_one(self, "backward_s", "backward")
        return at_most_one(self, "weight_s", "weight")


class StageForm(PassForm):
    """A stage of the pipeline."""

    weight_bytes: Annotated[
        Bytes, Field(description="Weights, gradients and optimizer states, which are kept all the time.")
    ] = 0.0
    memory: Annotated[
        Memory,
        Field(
            description="Activations between forward and backward pass: kept; dropped except for the input of the "
            "stage, and recomputed before the backward pass; or copied to the host and back."
        ),
    ] = "keep"
    classes: Annotated[
        list[PassForm],
        Field(
            default_factory=list,
            description="Costs of micro-batches of class 1, 2, ...; class 0 has the costs of the stage itself.",
        ),
    ]

    @property
    def devices(self) -> list[DeviceForm]:
        """Devices that price the stage."""
        forms = (form for passes in (self, *self.classes) for form in (passes.forward, passes.backward, passes.weight))
        return [form.device for form in forms if form is not None]

    def passes(self, number: int) -> list[tuple[str, PassForm]]:
        """Paths and costs of all classes of stage ``number``."""
        path = f"stages.{number}"
        return [(path, self), *((f"{path}.classes.{c}", form) for c, form in enumerate(self.classes))]


class PassStep(Closed):
    """One pass in an order."""

    stage: StageNumber
    kind: Annotated[
        PassKind,
        Field(alias="pass", description="Forward; backward; weight gradients, where they are a separate pass."),
    ]
    micro_batch: MicroBatch


class OrderForm(Closed):
    """The passes of each rank, in order. Where there is a W, its B computes only the gradients of the inputs."""

    order: Annotated[list[list[PassStep]], Field(min_length=1)]

    def passes(self) -> list[list[Pass]]:
        """The passes of each rank."""
        return [[Pass(step.kind, step.stage, step.micro_batch) for step in row] for row in self.order]
