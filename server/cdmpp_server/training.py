"""``POST /training-step``: one training step of a language model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cdmpp.devices.loading import resolve_device
from cdmpp.errors import DataError
from cdmpp.llm import TrainingPlan, defaults, read_config
from cdmpp.llm.engines.profile import load_training_engine
from cdmpp.llm.options import TRAINING
from cdmpp.predict.prediction import Seconds
from cdmpp_server.fields import Device
from cdmpp_server.llm import EXAMPLE_MODEL, Config, with_options
from cdmpp_server.planned import Endpoint, Find, planned
from cdmpp_server.predict.schema import ModelName
from cdmpp_server.schema_base import AnswerModel, RequestModel


@with_options(TRAINING)
class TrainingStepRequest(RequestModel):
    """A training step of a language model."""

    config: Config
    device: Device
    network: float | Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Bytes per second of one device between nodes, or a name; null: 400 Gbit/s, assumed."
    )
    engine: str | dict[str, Any] = Field(
        defaults.TRAINING_ENGINE,
        max_length=100,
        description="Name of a training profile, or the fields of one (docs/training-steps.md).",
    )
    model: ModelName = None


class TrainingMemoryAnswer(AnswerModel):
    """Bytes on the rank that holds most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    total: int
    device: float | None = Field(description="Capacity of the device; null: not published.")


class TrainingExposed(AnswerModel):
    """Seconds of communication that computation does not hide, by kind of parallelism."""

    tp: float = Field(ge=0)
    cp: float = Field(ge=0)
    ep: float = Field(ge=0)
    dp: float = Field(ge=0)
    pp: float = Field(ge=0)


class TrainingBreakdown(AnswerModel):
    """Seconds on the slowest rank; they add up to `step_s`."""

    compute: dict[str, float] = Field(description="Kernels by operator.")
    exposed: TrainingExposed
    bubble: float = Field(ge=0)
    optimizer: float = Field(ge=0)
    host: float = Field(ge=0)


class TrainingStepAnswer(AnswerModel):
    """Duration, throughput, memory and breakdown of a step, with the settings of the request."""

    model_id: str
    model_type: str
    parameters: int
    device: str
    engine: str = Field(description="Name of the profile.")
    gpus: int
    micro_batch: int
    global_batch: int
    sequence: int
    tp: int
    pp: int
    virtual_pp: int
    cp: int
    ep: int
    sharding: str
    recompute: str
    overlap: str
    dp: int = Field(description="Copies that divide the batch.")
    micro_batches: int = Field(description="Passes of one copy.")
    layers: list[int] = Field(description="Layers of each stage.")
    dtype: str
    products: str | None
    network_bytes_per_s: float
    step_s: Seconds
    lower_s: Seconds = Field(description="80 % interval.")
    upper_s: Seconds
    tokens_per_s_per_gpu: float = Field(gt=0)
    model_flops_utilization: float | None = Field(
        description="Operations of the model over those of the peak; null: no published peak."
    )
    memory_bytes: TrainingMemoryAnswer
    breakdown: TrainingBreakdown
    domain: Literal["in", "near", "out"]
    domain_shares: dict[str, float] = Field(description="Share of the predicted time by domain.")
    domain_reason: str = Field(description="The part with the largest share that is not `in`.")
    remarks: list[str]


_MEANING = {
    404: "The model is not loaded (unknown_model), or `device` is not known (unknown_device).",
    409: "The request fits the schema, but the architecture is not known, the layout divides neither model nor batch "
    "(invalid_field), the step does not fit the memory (infeasible), or `device` is invalid (invalid_device).",
}
_EXAMPLE: dict[str, Any] = {
    **EXAMPLE_MODEL,
    "gpus": 8,
    "sharding": "fsdp",
    "micro_batch": 1,
    "global_batch": 128,
    "sequence": 8192,
}


def _plan(request: TrainingStepRequest, find: Find, max_predictions: int) -> TrainingPlan:
    # By name or fields, never a file: a client's text must not be used as a path on this machine.
    engine = load_training_engine(request.engine, files=False)
    device = resolve_device(request.device, find)
    options = request.model_dump(exclude={"config", "device", "engine", "model"})
    plan = TrainingPlan.of(read_config(request.config), device, engine, options)
    if len(plan.queries) > max_predictions:
        raise DataError(
            f"the step needs more than {max_predictions:,} predictions", hint="raise the limit of the service"
        )
    return plan


router = planned(
    Endpoint(
        "/training-step",
        "Predict a training step",
        "Predict how long one training step of a language model takes on a cluster.",
        _plan,
        lambda plan, *made: plan.result(*made).to_dict(),
        (TrainingStepRequest,),
        (TrainingStepAnswer,),
        "The step.",
        _EXAMPLE,
        _MEANING,
    )
)
