"""The answer of ``POST /models/predict``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.programs.query_options import Framework, Protocol
from cdmpp_server.observe.ids import MAX_ID
from cdmpp_server.predict.schema import OPERATOR_SCHEMA, ErrorInfo, Seconds

Domain = Literal["in", "near", "out"]
_CLOSED = ConfigDict(extra="forbid")
_Count = Annotated[int, Field(ge=1)]


class DeviceTotal(BaseModel):
    """The sum of what was predicted on one device: kernels only, no gaps between them."""

    model_config = _CLOSED

    device: str
    latency_s: Annotated[
        Seconds | None, Field(description="Sum over the launches that were predicted; null where none was.")
    ]
    lower_s: Annotated[Seconds | None, Field(description="Sum of the bounds: as if all errors went the same way.")]
    upper_s: Seconds | None
    domain: Annotated[Domain | None, Field(description="The worst of its programs'.")]
    launches: Annotated[int, Field(ge=0, description="Program launches of one pass of the model.")]
    launches_predicted: Annotated[int, Field(ge=0, description="How many of them are in the sum.")]


class ProgramAnswer(BaseModel):
    """One launch of a program on one device, in seconds."""

    model_config = _CLOSED

    device: str
    latency_s: Seconds
    lower_s: Seconds
    upper_s: Seconds
    domain: Domain
    domain_score: float
    roofline_s: Annotated[float, Field(ge=0)]
    prediction_id: Annotated[str, Field(max_length=MAX_ID, description="Names this answer in POST /observe.")]


class ProgramFailure(BaseModel):
    """Why there is no answer for a program on a device."""

    model_config = _CLOSED

    device: str
    error: ErrorInfo


class ModelProgram(BaseModel):
    """A kernel that the model launches."""

    model_config = _CLOSED

    name: Annotated[str, Field(description="The operator's text.")]
    program_hash: str
    program: Annotated[
        dict[str, Any],
        Field(
            description="The operator with all its fields, as an item of /predict takes it.",
            json_schema_extra={k: OPERATOR_SCHEMA[k] for k in ("required", "properties")},
        ),
    ]
    count: Annotated[_Count, Field(description="Launches in one pass of the model.")]
    answers: Annotated[list[ProgramAnswer | ProgramFailure], Field(description="One for each device, in their order.")]


class UnsupportedNodes(BaseModel):
    """Nodes that no program stands for: they are in no sum."""

    model_config = _CLOSED

    operator: str
    count: _Count
    reason: str


class ModelResponse(BaseModel):
    """What an ONNX model costs on each device, and which programs it spends that on."""

    model_config = _CLOSED

    model_id: str
    protocol: Protocol
    framework: Framework | None
    devices: Annotated[list[DeviceTotal], Field(description="In the order of the query.")]
    programs: Annotated[
        list[ModelProgram], Field(description="The most expensive first: count times latency, over all devices.")
    ]
    unsupported: list[UnsupportedNodes]
