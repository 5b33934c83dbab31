"""Response models of ``POST /models/predict``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.programs.query_options import Framework, Protocol
from cdmpp_server.fields import OPERATOR_SCHEMA
from cdmpp_server.observe.ids import MAX_ID
from cdmpp_server.predict.schema import ErrorInfo, Reason, Seconds

Domain = Literal["in", "near", "out"]
_CLOSED = ConfigDict(extra="forbid")
_Count = Annotated[int, Field(ge=1)]


_Share = Annotated[float, Field(ge=0, le=1)]


class DeviceTotal(BaseModel):
    """Sum of the predicted kernel latencies on one device, without the gaps between kernels."""

    model_config = _CLOSED

    device: str
    latency_s: Annotated[Seconds | None, Field(description="Sum over the predicted launches; null if there is none.")]
    lower_s: Annotated[
        Seconds | None, Field(description="Sum of the lower bounds, as if all errors had the same sign.")
    ]
    upper_s: Seconds | None
    domain: Annotated[
        Domain | None, Field(description="in: at least 90 % of the time is in; near: at most 10 % is out; else out.")
    ]
    domain_shares: Annotated[
        dict[Domain, _Share] | None, Field(description="Share of latency_s that the programs of each domain have.")
    ]
    lower_bound: Annotated[
        bool, Field(description="Whether nodes without a program or launches without a prediction are left out.")
    ]
    launches: Annotated[int, Field(ge=0, description="Number of program launches in one pass of the model.")]
    launches_predicted: Annotated[int, Field(ge=0, description="Number of launches in the sum.")]


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
    prediction_id: Annotated[
        Annotated[str, Field(max_length=MAX_ID)] | None,
        Field(description="Identifies this result in POST /observe; null as in a result of /predict."),
    ]
    domain_reason: Reason = ""


class ProgramFailure(BaseModel):
    """Error of a program on a device."""

    model_config = _CLOSED

    device: str
    error: ErrorInfo


class ModelProgram(BaseModel):
    """A kernel that the model launches."""

    model_config = _CLOSED

    name: Annotated[str, Field(description="The operator as text.")]
    program_hash: str
    program: Annotated[
        dict[str, Any],
        Field(
            description="The operator with all fields, in the form of an item of /predict.",
            json_schema_extra={k: OPERATOR_SCHEMA[k] for k in ("required", "properties")},
        ),
    ]
    count: Annotated[_Count, Field(description="Number of launches in one pass of the model.")]
    answers: Annotated[
        list[ProgramAnswer | ProgramFailure], Field(description="One entry per device, in the order of the query.")
    ]


class UnsupportedNodes(BaseModel):
    """Nodes without a program; they are not part of any sum."""

    model_config = _CLOSED

    operator: str
    count: _Count
    reason: str


class ModelResponse(BaseModel):
    """Latency of an ONNX model on each device, and of its programs."""

    model_config = _CLOSED

    model_id: str
    protocol: Protocol
    framework: Framework | None
    devices: Annotated[list[DeviceTotal], Field(description="In the order of the query.")]
    programs: Annotated[
        list[ModelProgram], Field(description="Most expensive first: count times latency, summed over all devices.")
    ]
    unsupported: list[UnsupportedNodes]
