"""Part of the RL request: cost of training."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from cdmpp.errors import FieldError
from cdmpp.plan.fused.schema import FusedRequest
from cdmpp.predict.requests.pricing import PredictedCost
from cdmpp.predict.requests.request import Closed, Count, Interval, PositiveBytes, PositiveSeconds, Seconds, exactly_one


def within(error: FieldError, path: str) -> FieldError:
    """The error of a nested request, with the path of its field in the outer request."""
    path = f"{path}.{error.path}".rstrip(".")
    return type(error)(f"{path}: {error.message.removeprefix(error.path + ': ')}", hint=error.hint, path=path)


class PipelineAnswer(Closed):
    """The answer of ``cdmpp plan pipeline``. Fields that are not listed here are ignored."""

    model_config = ConfigDict(extra="ignore")

    makespan_s: PositiveSeconds
    interval: Annotated[Interval | None, Field(description="With all predictions at their bounds.")] = None


class PipelineForm(Closed):
    """Training by a pipeline schedule, such as RLHFuse's fused pipelines of actor and critic.

    Each run of the schedule trains on ``samples`` samples. The samples of a step, or of a streamed batch, are divided
    between the pipelines; each runs its schedule as often as it takes. Either ``request`` or ``answer``.
    """

    request: Annotated[
        FusedRequest | None,
        Field(description="The schedule is searched, within its own budget_s and at most a quarter of this request's."),
    ] = None
    answer: PipelineAnswer | None = None
    samples: Annotated[Count, Field(description="Samples of one run: those of all its micro-batches.")]
    units: Annotated[
        Count, Field(description="Units of the pool that one pipeline occupies: its ranks, if a unit is one device.")
    ] = 1

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        return exactly_one(self, "request", "answer")

    def schedule_request(self, ignore_memory: bool) -> FusedRequest | None:
        """The request, without memory limits where the outer request ignores them."""
        if self.request is None or not ignore_memory:
            return self.request
        return self.request.model_copy(update={"ignore_memory": True})


class TrainingForm(Closed):
    """Cost of training on one unit; the given costs are added. At least one of the first five."""

    step_s: Annotated[PositiveSeconds | None, Field(description="For all samples of a step.")] = None
    seconds_per_sample: PositiveSeconds | None = None
    seconds_per_token: Annotated[
        PositiveSeconds | None, Field(description="For each token of prompt and response.")
    ] = None
    sample: Annotated[PredictedCost | None, Field(description="Predicted, for each sample.")] = None
    pipeline: Annotated[PipelineForm | None, Field(description="Training by a pipeline schedule.")] = None
    fixed_s: Annotated[Seconds, Field(description="Once per step, for any number of units: optimizer.")] = 0.0
    efficiency: Annotated[
        float, Field(gt=0.5, le=1, description="Share of the ideal speed-up that remains at each doubling of units.")
    ] = 1.0
    batch_overhead_s: Annotated[Seconds, Field(description="Added for each batch of a streamed step.")] = 0.0
    state_bytes: Annotated[
        PositiveBytes | None,
        Field(
            description="Weights, gradients and optimizer states of the whole model, divided among the devices that "
            "train. Default: 18 bytes for each weight of the language model that `decode` names."
        ),
    ] = None

    @model_validator(mode="after")
    def _some(self) -> Self:
        given = (self.step_s, self.seconds_per_sample, self.seconds_per_token, self.sample, self.pipeline)
        if all(cost is None for cost in given):
            raise ValueError("give step_s, seconds_per_sample, seconds_per_token, sample or pipeline")
        return self
