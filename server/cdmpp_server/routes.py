"""Endpoints that describe the service: health, devices, models and support."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from cdmpp.devices import DeviceSpec, known
from cdmpp.errors import CdmppError
from cdmpp.model.artifact.model import Artifact
from cdmpp.predict.support import known_operator, selected
from cdmpp.programs.operators import PRODUCT_ALIASES, operator_types
from cdmpp_server.openapi import Schema, add_problems
from cdmpp_server.predict.service import PredictionService
from cdmpp_server.problems import ProblemError
from cdmpp_server.schema_base import AnswerModel
from cdmpp_server.settings import Settings

router = APIRouter()
#: Letters of a name in a query.
_MAX_NAME = 200


class Health(AnswerModel):
    """The process is running."""

    status: str = Field("ok", pattern="^ok$")


class Ready(AnswerModel):
    """The golden prediction succeeded."""

    status: str = Field("ready", pattern="^ready$")
    model_id: str
    observations: Literal["ready", "unavailable"] = Field(
        description="State of the database of /observe; predictions do not need it."
    )


class KnownDevice(DeviceSpec):
    """A known device, and whether the model was trained on it."""

    trained: bool


class DeviceList(AnswerModel):
    """All known devices."""

    devices: list[KnownDevice]


class ModelInfo(AnswerModel):
    """A loaded model."""

    model_id: str
    name: str
    default: bool
    parameters: int = Field(ge=0, description="Number of trainable parameters.")
    feature_schema: str
    label: str = Field(description="Quantity whose transform the network predicts.")
    trained_devices: list[str]
    libraries: dict[str, Any] = Field(description="Library versions at training.")
    adapted_device: str | None = Field(
        None, description="Device that the model was adapted to; null for the base model."
    )


class ModelList(AnswerModel):
    """The loaded models."""

    models: list[ModelInfo]


class CoverageRow(AnswerModel):
    """Coverage of one operator in one combination of element types."""

    operator: str
    dtype: str
    weight_dtype: str | None
    scaling: str | None
    elsewhere: Literal["in", "near", "out"] = Field(description="Best domain on a device without training rows.")
    domain: dict[str, Literal["in", "near", "out"]] = Field(
        description="Best domain by trained device, where it is not `elsewhere`."
    )
    rows: dict[str, int] | None = Field(description="Training rows by device; null where the model does not say.")
    mape: dict[str, float] = Field(description="Mean absolute percentage error on held-out rows by device; a fraction.")


class Coverage(AnswerModel):
    """Coverage by operator, element types and device."""

    devices: list[str] = Field(description="Devices that the model was trained on.")
    errors_by: Literal["types", "operator"] = Field(
        description="operator: `mape` is that of the operator in all element types."
    )
    rows: list[CoverageRow]


class Support(AnswerModel):
    """Coverage and accuracy of the model."""

    model_id: str
    operators: dict[str, dict[str, Any]] = Field(description="Fields and trained settings of each operator.")
    trained_devices: list[str]
    backends: list[str]
    protocols: list[str]
    frameworks: list[str]
    implementations: list[str]
    default_protocol: str
    quantile_range: list[float] = Field(min_length=2, max_length=2)
    accuracy: dict[str, Any] = Field(description="Error table by source; fractions.")
    matrix: Coverage


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add the problems of these endpoints."""
    add_problems(document["paths"]["/readyz"]["get"], 503)
    add_problems(document["paths"]["/support"]["get"], 404, 422)


def _service(request: Request) -> PredictionService:
    service: PredictionService = request.app.state.service
    return service


@router.get("/healthz", summary="Process is running")
async def healthz() -> Health:
    """Respond at once, even while predictions are being computed."""
    return Health()


@router.get("/readyz", summary="Service is ready")
async def readyz(request: Request) -> Ready:
    """Respond 200 once the loaded model has computed the golden prediction, else 503."""
    reason = request.app.state.not_ready
    if reason:
        raise ProblemError("not_ready", reason, "retry after a few seconds")
    return Ready(
        model_id=_service(request).predictor.model_id,
        observations="ready" if request.app.state.store_up else "unavailable",
    )


@router.get("/devices", summary="Known devices")
async def devices(request: Request) -> DeviceList:
    """List the known devices with their figures. Describe any other device by an object in the item."""
    artifact = _service(request).predictor.artifact
    trained, named = set(artifact.device_names), {spec.name: spec for spec in known()}
    specs = {**named, **{name: artifact.device(name) for name in artifact.device_specs}}
    return DeviceList(
        devices=[KnownDevice(**spec.model_dump(), trained=name in trained) for name, spec in specs.items()]
    )


@router.get("/models", summary="Loaded models")
async def models(request: Request) -> ModelList:
    """List the loaded models with id, size and origin."""
    loaded = _service(request).models.every()
    return ModelList(models=[_model_info(predictor.artifact, i == 0) for i, predictor in enumerate(loaded)])


def _model_info(artifact: Artifact, default: bool) -> ModelInfo:
    manifest = artifact.manifest
    return ModelInfo(
        model_id=artifact.model_id,
        name=manifest["name"],
        default=default,
        parameters=artifact.weights.parameters,
        feature_schema=manifest["feature_schema"],
        label=manifest["label"],
        trained_devices=list(artifact.device_names),
        libraries=manifest["libraries"],
        adapted_device=manifest.get("adapted_device"),
    )


@router.get("/support", summary="Coverage and accuracy")
def support(
    request: Request,
    device: Annotated[
        str | None, Query(max_length=_MAX_NAME, description="Name of a device: only its part of the matrix.")
    ] = None,
    operator: Annotated[
        str | None,
        Query(
            max_length=_MAX_NAME,
            description="Name of an operator: only its part of the matrix.",
            json_schema_extra={"enum": [*operator_types(), *PRODUCT_ALIASES, None]},
        ),
    ] = None,
) -> Support:
    """List operators with their fields, trained devices, protocols, accuracy and coverage of the base model."""
    predictor = _service(request).predictor
    answer = predictor.support()
    try:
        name = None if device is None else predictor.artifact.device(device).name
        chosen = None if operator is None else known_operator(operator)
    except CdmppError as error:
        raise ProblemError(error.code, error.message, error.hint) from None
    answer["matrix"] = selected(answer["matrix"], chosen, name)
    return Support.model_validate(answer)
