"""OpenAPI schema of ``/curve``."""

from __future__ import annotations

from typing import Any

from cdmpp_server.curve.schema import CurveRequest, CurveResponse, CurvesRequest
from cdmpp_server.deadline import DESCRIPTION
from cdmpp_server.feature import Schema
from cdmpp_server.openapi import BODY_PROBLEMS, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.settings import Settings

_MEANING = {
    404: "The model is not loaded (unknown_model).",
    409: "The request fits the schema, but an axis is not used, `monotone` names a non-numeric axis, or there "
    "are more predictions than items of one request (data_error); or a template's operator or fields are not "
    "known, or an expression is invalid (unsupported_operator, invalid_program).",
}
_EXAMPLE: dict[str, Any] = {
    "program": {"operator": "linear", "m": "batch*128", "n": 4096, "k": 1024, "dtype": "float16"},
    "axes": {"batch": [1, 2, 4, 8]},
    "devices": ["t4", "l4"],
    "protocol": "eager",
    "framework": "pytorch",
}


def describe_curve(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add request, response and problems of ``/curve``."""
    add_models(schemas, CurveRequest, CurvesRequest, CurveResponse)
    operation = document["paths"]["/curve"]["post"]
    operation["description"] += (
        f"\n\nAt most {settings.max_items:,} predictions: programs times points times devices. {DESCRIPTION}"
    )
    add_body(operation, {"oneOf": [ref("CurveRequest"), ref("CurvesRequest")]}, _EXAMPLE)
    add_answer(operation, ref("CurveResponse"), "The points of the curve.")
    add_problems(operation, 404, 409, *BODY_PROBLEMS, meaning=_MEANING)
