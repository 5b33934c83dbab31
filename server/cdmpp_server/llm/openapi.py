"""OpenAPI schema of ``/llm``."""

from __future__ import annotations

from typing import Any

from cdmpp_server.deadline import DESCRIPTION
from cdmpp_server.feature import Schema
from cdmpp_server.llm.schema import LlmAnswer, LlmAnswers, LlmDevicesRequest, LlmRequest
from cdmpp_server.openapi import BODY_PROBLEMS, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.settings import Settings

_MEANING = {
    404: "The model is not loaded (unknown_model), or `device` is not known (unknown_device).",
    409: "The request fits the schema, but the architecture is not known, a field of the configuration is missing or "
    "impossible, the layout does not divide the model (invalid_field), the model does not fit on `device` "
    "(infeasible), `device` is invalid (invalid_device), or there are more predictions than items of one request "
    "(data_error).",
}
_EXAMPLE: dict[str, Any] = {
    "config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "device": "h100-sxm",
    "batch": 8,
    "input": 1024,
    "output": 128,
}


def describe_llm(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add request, response and problems of ``/llm``."""
    add_models(schemas, LlmRequest, LlmDevicesRequest, LlmAnswer, LlmAnswers)
    operation = document["paths"]["/llm"]["post"]
    operation["description"] += (
        f"\n\nA model has some 50 to 200 predictions for each device; at most {settings.max_items:,} in one request. "
        f"{DESCRIPTION}"
    )
    add_body(operation, {"oneOf": [ref("LlmRequest"), ref("LlmDevicesRequest")]}, _EXAMPLE)
    add_answer(operation, {"oneOf": [ref("LlmAnswer"), ref("LlmAnswers")]}, "The estimate, or those of `devices`.")
    add_problems(operation, 404, 409, *BODY_PROBLEMS, meaning=_MEANING)
