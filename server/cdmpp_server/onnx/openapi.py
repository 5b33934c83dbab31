"""OpenAPI description of ``POST /models/predict``."""

from __future__ import annotations

from cdmpp_server.feature import Schema
from cdmpp_server.onnx.query import PARAMETERS
from cdmpp_server.onnx.schema import ModelResponse
from cdmpp_server.openapi import BODY_PROBLEMS, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.settings import Settings

MEDIA = "application/octet-stream"
_MEANING = {
    404: "The model that `model` names is not loaded (unknown_model).",
    409: "The file is not a readable ONNX model, has a dynamic dimension without a size, exceeds the time or "
    "memory limit, or launches too many programs (invalid_program).",
    415: f"The body is not {MEDIA} (unsupported_media_type).",
    422: "A parameter is missing, unknown or invalid (invalid_request).",
}


def describe_onnx(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add parameters, body, response and problems."""
    add_models(schemas, ModelResponse)
    operation = document["paths"]["/models/predict"]["post"]
    operation["parameters"] = PARAMETERS
    file = {
        "type": "string",
        "format": "binary",
        "description": "An ONNX file. Its weights are not read, so external data files are not needed.",
    }
    add_body(operation, file, media=MEDIA)
    add_answer(operation, ref("ModelResponse"), "Latency of each program, and the sum for each device.")
    statuses = [status for status in BODY_PROBLEMS if status != 400]
    add_problems(operation, 404, 409, *statuses, meaning=_MEANING)
