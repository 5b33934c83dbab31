"""Features of the service, and the published OpenAPI schema, which forbids requests that are always refused.

The routes read raw bodies, so that limits apply before parsing. Each feature therefore describes its
requests and problems with the models that validate them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cdmpp_server.problems import MEDIA_TYPE, Problem
from cdmpp_server.settings import Settings

Schema = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """One feature of the service."""

    #: The endpoints.
    router: APIRouter | None = None
    #: ``describe(document, schemas, settings)`` adds bodies and problems to the OpenAPI document in place, because the
    #: routes read raw bodies. ``schemas`` are the document's components.
    describe: Callable[[Schema, Schema, Settings], None] | None = None
    #: ``install(app, settings)`` adds middleware when the application is created. The middleware of the last feature is
    #: outermost.
    install: Callable[[FastAPI, Settings], None] | None = None
    #: ``lifespan(app, settings)`` returns an async context manager that holds resources while the application runs.
    #: Features are entered in order and left in reverse order.
    lifespan: Callable[[FastAPI, Settings], AbstractAsyncContextManager[None]] | None = None


REF = "#/components/schemas/{model}"
#: Statuses of the problems of every endpoint that reads a JSON body.
BODY_PROBLEMS = (400, 408, 413, 415, 422, 503, 504)
_MEANING = {
    400: "The body is not JSON (malformed_json).",
    401: "The key is missing or unknown (unauthorized).",
    403: "The endpoint needs an administrator's key (forbidden).",
    404: "A device, model, program or job of the request is unknown.",
    408: "The body did not arrive in time (body_timeout).",
    413: "The body is too large (body_too_large).",
    415: "The media type of the body is not accepted (unsupported_media_type).",
    421: "The service does not answer under the name in Host (unknown_host).",
    422: "The request violates this schema (invalid_request).",
    429: "The sender exceeds its rate limit (rate_limited); retry after the seconds in Retry-After.",
    500: "A bug of the service (internal_error).",
    503: "The queue is full (overloaded), or the model is not ready (not_ready); retry later.",
    504: "The request's deadline passed (deadline_exceeded).",
}


def build_openapi(app: FastAPI, features: Iterable[Feature], settings: Settings) -> Schema:
    """Build the OpenAPI 3.1 document of the application."""
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
            # FastAPI describes 422 in its own form, for parameters that it parses.
            if "HTTPValidationError" in str(operation["responses"].get("422", "")):
                add_problems(operation, 422)
            add_problems(operation, 500)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def add_models(schemas: Schema, *models: type[BaseModel]) -> None:
    """Add the schemas of models, and of the models that they contain, to the components."""
    _, parts = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schemas.update(parts["$defs"])


def ref(name: str) -> Schema:
    """A reference to a component."""
    return {"$ref": REF.format(model=name)}


def add_problems(operation: Schema, *statuses: int, meaning: Mapping[int, str] | None = None) -> None:
    """Document the problems of an operation; ``meaning`` overrides the usual description of a status."""
    for status in statuses:
        operation["responses"][str(status)] = {
            "description": (meaning or {}).get(status) or _MEANING[status],
            "content": {MEDIA_TYPE: {"schema": ref("Problem")}},
        }


def add_body(operation: Schema, schema: Schema, example: Any = None, media: str = "application/json") -> None:
    """Document the request body of an operation; call it once per media type."""
    content = operation.setdefault("requestBody", {"required": True, "content": {}})["content"]
    content[media] = {"schema": schema} | ({} if example is None else {"example": example})


def add_answer(
    operation: Schema, schema: Schema, description: str, media: str = "application/json", status: int = 200
) -> None:
    """Document a response; call it once per media type."""
    answer = operation["responses"].setdefault(str(status), {})
    answer["description"] = description
    answer.setdefault("content", {})[media] = {"schema": schema}
