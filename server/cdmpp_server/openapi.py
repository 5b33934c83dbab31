"""The published schema: exact, for what the server always refuses it forbids.

Routes read raw bodies (one parser, limits first), so each feature describes its requests and problems from
the same models that check them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cdmpp_server.feature import Feature, Schema
from cdmpp_server.problems import MEDIA_TYPE, Problem
from cdmpp_server.settings import Settings

REF = "#/components/schemas/{model}"
#: What every endpoint that reads a JSON body may answer.
BODY_PROBLEMS = (400, 408, 413, 415, 422, 503, 504)
_MEANING = {
    400: "The body is not JSON (malformed_json).",
    401: "A key is needed, and this one is not known (unauthorized).",
    403: "An administrator's key is needed (forbidden).",
    404: "Something that the request names is not known.",
    408: "The body did not arrive in time (body_timeout).",
    413: "The body is too large (body_too_large).",
    415: "The body is of a media type that is not read (unsupported_media_type).",
    422: "The request breaks this schema (invalid_request).",
    429: "This sender asks too much (rate_limited); Retry-After says when to come back.",
    500: "A bug of the service (internal_error).",
    503: "Too much work waits (overloaded), or the model is not ready (not_ready); retry later.",
    504: "There was no answer before the request's deadline (deadline_exceeded).",
}


def build_openapi(app: FastAPI, features: Iterable[Feature], settings: Settings) -> Schema:
    """OpenAPI 3.1 document of the application."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    add_models(schemas, Problem)
    for feature in features:
        if feature.describe is not None:
            feature.describe(document, schemas, settings)
    for methods in document["paths"].values():
        for operation in methods.values():
            # FastAPI's own description of 422 is for parameters that it parses, in another form.
            if "HTTPValidationError" in str(operation["responses"].get("422", "")):
                add_problems(operation, 422)
            add_problems(operation, 500)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def add_models(schemas: Schema, *models: type[BaseModel]) -> None:
    """Put the schemas of models, and of all that they contain, among the components."""
    _, parts = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schemas.update(parts["$defs"])


def ref(name: str) -> Schema:
    """A reference to a component."""
    return {"$ref": REF.format(model=name)}


def add_problems(operation: Schema, *statuses: int, meaning: Mapping[int, str] | None = None) -> None:
    """Document refusals of an operation; ``meaning`` says what one means there, in place of the usual."""
    for status in statuses:
        operation["responses"][str(status)] = {
            "description": (meaning or {}).get(status) or _MEANING[status],
            "content": {MEDIA_TYPE: {"schema": ref("Problem")}},
        }


def add_body(operation: Schema, schema: Schema, example: Any = None, media: str = "application/json") -> None:
    """Document the body that an operation reads; once for each media type."""
    content = operation.setdefault("requestBody", {"required": True, "content": {}})["content"]
    content[media] = {"schema": schema} | ({} if example is None else {"example": example})


def add_answer(
    operation: Schema, schema: Schema, description: str, media: str = "application/json", status: int = 200
) -> None:
    """Document an answer; once for each media type."""
    answer = operation["responses"].setdefault(str(status), {})
    answer["description"] = description
    answer.setdefault("content", {})[media] = {"schema": schema}
