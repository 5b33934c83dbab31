"""OpenAPI schema of ``/predict`` and ``/programs``."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from cdmpp.predict.bulk import MEDIA_TYPE
from cdmpp_server.concurrency import DESCRIPTION
from cdmpp_server.openapi import BODY_PROBLEMS, Schema, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.predict.schema import PredictResponse, RegisterResponse, register_request_model, request_model
from cdmpp_server.predict.strict import strict_device, strict_program, strict_schemas
from cdmpp_server.settings import Settings

_MEANING = {
    404: "The model is not loaded (unknown_model); with strict: a device "
    "(unknown_device) or the hash of a program (unknown_program) is not known.",
    409: "With strict: an item fits the schema but contradicts itself, or its TIR cannot be read. The "
    "code is the one that the item would have without strict.",
    422: "The body violates this schema (invalid_request); with strict also an item (invalid_request), or its "
    "operator or device (unsupported_operator, invalid_program, invalid_device).",
}
_BYTES = {
    "type": "string",
    "format": "binary",
    "description": "cdmpp.predict.bulk.FeatureQueries and FeatureAnswers as safetensors; docs/server.md.",
}
_OTHER_ITEM = {"title": "InvalidItem", "description": "Anything else gets an error; other items are unaffected."}
_EXAMPLE: dict[str, Any] = {
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


def describe_predict(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add requests, responses and problems of ``/predict`` and ``/programs``."""
    max_items = settings.max_items
    add_models(schemas, request_model(max_items), PredictResponse, register_request_model(max_items), RegisterResponse)
    schemas.update(strict_schemas())
    _add_strict_request(schemas)
    predict = document["paths"]["/predict"]["post"]
    add_body(predict, {"oneOf": [ref("PredictRequest"), ref("StrictPredictRequest")]}, _EXAMPLE)
    add_body(predict, _BYTES, media=MEDIA_TYPE)
    description = "One prediction or error per item, in order."
    add_answer(predict, ref("PredictResponse"), description)
    add_answer(predict, _BYTES, description, media=MEDIA_TYPE)
    add_problems(predict, 404, 409, *BODY_PROBLEMS, meaning=_MEANING)
    predict["description"] += "\n\n" + DESCRIPTION
    programs = document["paths"]["/programs"]["post"]
    add_body(programs, ref("RegisterRequest"), {"programs": [i["program"] for i in _EXAMPLE["items"]]})
    add_answer(programs, ref("RegisterResponse"), "A hash or an error per program, in order.")
    add_problems(programs, *BODY_PROBLEMS)


def _add_strict_request(schemas: Schema) -> None:
    """Split the request model by ``strict``; the strict one has a model of every operator."""
    item = deepcopy(schemas["Item"])
    item["title"] = "StrictItem"
    item["properties"]["program"] = strict_program()
    names = [s for s in item["properties"]["device"]["oneOf"] if s.get("type") == "string"]
    item["properties"]["device"] = strict_device(names[0])
    schemas["StrictItem"] = item
    strict = deepcopy(schemas["PredictRequest"])
    strict["title"] = "StrictPredictRequest"
    strict["description"] = "A request that is refused as a whole when one item cannot be predicted."
    strict["properties"]["items"]["items"] = ref("StrictItem")
    strict["properties"]["strict"] = {"const": True, "type": "boolean"}
    strict["required"] = [*strict["required"], "strict"]
    schemas["StrictPredictRequest"] = strict
    lenient = schemas["PredictRequest"]["properties"]
    lenient["strict"]["const"] = False
    lenient["items"]["items"] = {"anyOf": [ref("Item"), _OTHER_ITEM]}
