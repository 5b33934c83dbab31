"""OpenAPI description of ``POST /adapt``."""

from __future__ import annotations

from cdmpp_server.adapt.schema import AdaptResponse, adapt_request_model
from cdmpp_server.feature import Schema
from cdmpp_server.openapi import BODY_PROBLEMS, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.settings import Settings

_MEANING = {
    404: "The device is unknown (unknown_device).",
    409: "A record cannot be read, or the records cannot be used.",
}
_EXAMPLE = {
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


def describe_adapt(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add request, response and problems of ``POST /adapt``."""
    add_models(schemas, adapt_request_model(settings.max_items), AdaptResponse)
    adapt = document["paths"]["/adapt"]["post"]
    add_body(adapt, ref("AdaptRequest"), _EXAMPLE)
    add_answer(
        adapt, ref("AdaptResponse"), "Errors before and after the adaptation, and the name of the adapted model."
    )
    add_problems(adapt, 404, 409, *BODY_PROBLEMS, meaning=_MEANING)
