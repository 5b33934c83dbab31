"""The published schema: exact, for what the server always refuses it forbids.

Routes read raw bodies (one parser, limits first), so requests and problems are described here from the
same models that check them.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.adapt.wire import AdaptResponse, adapt_request_model
from server.problems import MEDIA_TYPE, Problem
from server.predict.strict import REF, strict_device, strict_program, strict_schemas
from server.predict.wire import PredictResponse, request_model

_POST_PROBLEMS = (400, 404, 408, 409, 413, 415, 422, 500, 503)
_MEANING = {
    400: "The body is not JSON (malformed_json).",
    404: "The model is not loaded (unknown_model); with strict, and in /adapt: the device is not known "
    "(unknown_device).",
    408: "The body did not arrive in time (body_timeout).",
    409: "With strict: an item fits the schema but contradicts itself, or its TIR cannot be read. The "
    "code is the one that the item would have without strict. In /adapt: a record cannot be read, or the "
    "records cannot be used.",
    413: "The body is too large (body_too_large).",
    415: "The body is not application/json (unsupported_media_type).",
    422: "The body breaks this schema (invalid_request); with strict: an item breaks the schema of its "
    "operator or device (unsupported_operator, invalid_program, invalid_device).",
    500: "A bug of the service (internal_error).",
    503: "Too much work waits (overloaded), or the model is not ready (not_ready); retry later.",
}
_EXAMPLE = {
    "items": [
        {
            "id": "a",
            "program": {"operator": "linear", "m": 512, "n": 4096, "k": 1024, "dtype": "float16"},
            "device": "t4",
        },
        {
            "program": {"operator": "softmax", "rows": 4096, "cols": 1024},
            "device": "a100-pcie-40gb",
            "protocol": "eager",
            "framework": "pytorch",
        },
    ],
    "quantiles": [0.1, 0.9],
}
_ADAPT_EXAMPLE = {
    "device": "t4",
    "records": [
        {
            "program": {"operator": "linear", "m": 512, "n": 4096, "k": k, "dtype": "float16"},
            "latency_s": latency_s,
            "protocol": "eager",
        }
        for k, latency_s in ((256, 1.1e-4), (1024, 1.9e-4), (4096, 7.2e-4))
    ],
}


def build_openapi(app: FastAPI, max_items: int) -> dict[str, Any]:
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
    _, parts = models_json_schema(
        [
            (model, "validation")
            for model in (
                request_model(max_items),
                PredictResponse,
                adapt_request_model(max_items),
                AdaptResponse,
                Problem,
            )
        ],
        ref_template=REF,
    )
    schemas.update(parts["$defs"])
    schemas.update(strict_schemas())
    _add_strict_request(schemas)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            statuses = {
                "/predict": _POST_PROBLEMS,
                "/adapt": _POST_PROBLEMS,
                "/readyz": (500, 503),
            }.get(path, (500,))
            for status in statuses:
                operation["responses"][str(status)] = _problem(status)
    predict = document["paths"]["/predict"]["post"]
    predict["requestBody"] = {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"oneOf": [_ref("PredictRequest"), _ref("StrictPredictRequest")]},
                "example": _EXAMPLE,
            }
        },
    }
    predict["responses"]["200"] = {
        "description": "One prediction or error per item, in order.",
        "content": {"application/json": {"schema": _ref("PredictResponse")}},
    }
    adapt = document["paths"]["/adapt"]["post"]
    adapt["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": _ref("AdaptRequest"), "example": _ADAPT_EXAMPLE}},
    }
    adapt["responses"]["200"] = {
        "description": "What was gained, and the adapted model's name.",
        "content": {"application/json": {"schema": _ref("AdaptResponse")}},
    }
    return document


def _add_strict_request(schemas: dict[str, Any]) -> None:
    """Split the request by ``strict``: with it every operator is spelled out."""
    item = deepcopy(schemas["Item"])
    item["title"] = "StrictItem"
    item["properties"]["program"] = strict_program()
    names = [s for s in item["properties"]["device"]["oneOf"] if s.get("type") == "string"]
    item["properties"]["device"] = strict_device(names[0])
    schemas["StrictItem"] = item
    strict = deepcopy(schemas["PredictRequest"])
    strict["title"] = "StrictPredictRequest"
    strict["description"] = "The same, refused as a whole when one item cannot be predicted."
    strict["properties"]["items"]["items"] = _ref("StrictItem")
    strict["properties"]["strict"] = {"const": True, "type": "boolean"}
    strict["required"] = [*strict["required"], "strict"]
    schemas["StrictPredictRequest"] = strict
    lenient = schemas["PredictRequest"]["properties"]["strict"]
    lenient["const"] = False


def _problem(status: int) -> dict[str, Any]:
    return {
        "description": _MEANING[status],
        "content": {MEDIA_TYPE: {"schema": _ref("Problem")}},
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": REF.format(model=name)}
