"""What the service says of itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from cdmpp.artifact.model import Artifact
from cdmpp.devices import DeviceSpec, known
from cdmpp_server.feature import Schema
from cdmpp_server.openapi import add_problems
from cdmpp_server.predict.service import PredictionService
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings

router = APIRouter()


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Health(_Answer):
    """The process lives."""

    status: Annotated[str, Field(pattern="^ok$")] = "ok"


class Ready(_Answer):
    """A golden prediction succeeded."""

    status: Annotated[str, Field(pattern="^ready$")] = "ready"
    model_id: str
    observations: Annotated[
        Literal["ready", "unavailable"],
        Field(description="Whether the database of /observe can be used; predictions need none."),
    ]


class KnownDevice(DeviceSpec):
    """A device of the table, and whether the model was trained on it."""

    trained: bool


class DeviceList(_Answer):
    """Every device that can be named."""

    devices: list[KnownDevice]


class ModelInfo(_Answer):
    """A loaded model."""

    model_id: str
    name: str
    default: bool
    parameters: Annotated[int, Field(ge=0, description="Trainable numbers in the network.")]
    feature_schema: str
    label: Annotated[str, Field(description="What the network's output is a transform of.")]
    trained_devices: list[str]
    libraries: Annotated[dict[str, Any], Field(description="Versions it was trained with.")]
    adapted_device: Annotated[
        str | None, Field(description="The device that measurements adapted it to; null for a base model.")
    ] = None


class ModelList(_Answer):
    """What is loaded."""

    models: list[ModelInfo]


class Support(_Answer):
    """What the model covers, and how accurate it is."""

    model_id: str
    operators: Annotated[dict[str, dict[str, Any]], Field(description="Operator to its fields and trained settings.")]
    trained_devices: list[str]
    backends: list[str]
    protocols: list[str]
    frameworks: list[str]
    default_protocol: str
    quantile_range: Annotated[list[float], Field(min_length=2, max_length=2)]
    accuracy: Annotated[dict[str, Any], Field(description="Error table by source; fractions.")]


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Problems of the endpoints here."""
    add_problems(document["paths"]["/readyz"]["get"], 503)


def _service(request: Request) -> PredictionService:
    service: PredictionService = request.app.state.service
    return service


@router.get("/healthz", summary="The process lives")
async def healthz() -> Health:
    """Answer at once, also while predictions are being computed."""
    return Health()


@router.get("/readyz", summary="Predictions work")
async def readyz(request: Request) -> Ready:
    """Whether a golden prediction succeeded with the loaded model."""
    reason = request.app.state.not_ready
    if reason:
        raise ProblemError("not_ready", reason, "retry after a few seconds", headers={"retry-after": "1"})
    return Ready(
        model_id=_service(request).predictor.model_id,
        observations="ready" if request.app.state.store_up else "unavailable",
    )


@router.get("/devices", summary="Known devices")
async def devices(request: Request) -> DeviceList:
    """Every device that can be named, with its figures. Any other goes into an item as an object."""
    artifact = _service(request).predictor.artifact
    trained, named = set(artifact.devices), {spec.name: spec for spec in known()}
    every = {**named, **{name: artifact.device(name) for name in artifact.device_specs}}
    return DeviceList(
        devices=[KnownDevice(**spec.model_dump(), trained=name in trained) for name, spec in every.items()]
    )


@router.get("/models", summary="Loaded models")
async def models(request: Request) -> ModelList:
    """What is loaded: identity, size and origin."""
    loaded = _service(request).models.every()
    return ModelList(models=[_model_info(predictor.artifact, i == 0) for i, predictor in enumerate(loaded)])


def _model_info(artifact: Artifact, default: bool) -> ModelInfo:
    manifest = artifact.manifest
    adapter = artifact.adapter
    return ModelInfo(
        model_id=artifact.model_id,
        name=manifest["name"],
        default=default,
        parameters=artifact.weights.parameters,
        feature_schema=manifest["feature_schema"],
        label=manifest["label"],
        trained_devices=list(artifact.devices),
        libraries=manifest["libraries"],
        adapted_device=adapter.device.name if adapter is not None else None,
    )


@router.get("/support", summary="What is covered, and how accurately")
async def support(request: Request) -> Support:
    """Operators with their fields, trained devices, protocols, accuracy. The same code path as /predict."""
    return Support.model_validate(_service(request).predictor.support())
