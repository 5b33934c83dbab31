"""Parts of the RL request: pools of units, decoding, and KV-cache limits."""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from cdmpp.plan.base.batch_curve import BatchCurve
from cdmpp.plan.rl.sizes import Stage
from cdmpp.plan.rl.training_schema import TrainingForm
from cdmpp.predict.requests.pricing import Cost, CostField
from cdmpp.predict.requests.request import Closed, Count, DeviceForm, Name, PositiveBytes, PositiveSeconds, Seconds


class DecodeLine(Closed):
    """Seconds of one decoding step: ``a_s + b_s * batch``."""

    a_s: PositiveSeconds
    b_s: Seconds = 0.0

    def points(self) -> tuple[np.ndarray, list[Cost]]:
        """Batch sizes and costs at both ends of the line, beyond the largest batch of any request."""
        sizes = np.array([1.0, 2.0**14])
        return sizes, [Cost.given(self.a_s + self.b_s * size) for size in sizes.tolist()]


DecodeForm = DecodeLine | BatchCurve


class KvForm(Closed):
    """Limits of the batch of one instance: KV-cache memory and number of samples."""

    bytes_per_token: Annotated[
        PositiveBytes | None,
        Field(description="Keys and values of one token. Default: those of the language model of `decode`."),
    ] = None
    memory_bytes: Annotated[
        PositiveBytes | None,
        Field(description="KV-cache memory of one instance. Default: what the weights leave of its devices, if known."),
    ] = None
    max_batch: Count = 256

    @model_validator(mode="after")
    def _both(self) -> Self:
        if self.memory_bytes is not None and self.bytes_per_token is None:
            raise ValueError("memory_bytes needs bytes_per_token")
        return self


class PoolForm(Closed):
    """Equal units at one site: each is a generation instance or a data-parallel training unit.

    Costs that a pool does not have are those of the request.
    """

    name: Name
    units: Count
    price_per_hour: Annotated[float, Field(ge=0, le=1e9, description="Of one unit.")] = 0.0
    site: Annotated[str, Field(max_length=200)] = ""
    stages: Annotated[list[Stage], Field(min_length=1, max_length=2, json_schema_extra={"uniqueItems": True})] = Field(
        default=["generation", "training"]
    )
    device: Annotated[DeviceForm | None, Field(description="For decode programs that name none.")] = None
    decode: Annotated[DecodeForm | None, Field(description="Replaces the request's.")] = None
    prefill: Annotated[CostField | None, Field(description="Replaces the request's.")] = None
    inference: Annotated[CostField | None, Field(description="Replaces the request's.")] = None
    training: Annotated[TrainingForm | None, Field(description="Replaces the request's.")] = None
    memory_bytes: Annotated[PositiveBytes | None, Field(description="Replaces the request's.")] = None

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.stages)) != len(self.stages):
            raise ValueError("a stage is named twice")
        return self
