"""From a prediction to the JSON of a result, once for each answer: the item's id is put in later."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from cdmpp.prediction import ErrorInfo, Prediction
from cdmpp_server.observe.ids import make_id

#: JSON without spaces; a figure that is not finite raises ValueError.
encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class Answer(NamedTuple):
    """An answer as it is remembered.

    Attributes
    ----------
    text : str
        The JSON object of a result without its opening brace and its id.
    kind : (str, str)
        Device and domain, for statistics.
    """

    text: str
    kind: tuple[str, str]


def answer_of(prediction: Prediction, device_digest: str) -> Answer:
    """From a prediction with figures; raises as :func:`fragment`."""
    return Answer(fragment(prediction, device_digest), (prediction.device, prediction.domain or "out"))


def fragment(prediction: Prediction, device_digest: str) -> str:
    """The JSON object of a result without its opening brace and its id.

    Raises
    ------
    ValueError
        A figure is not finite: NaN and infinity are no JSON, and better no answer than one that no client
        can read.
    """
    return encode(
        {
            "prediction_id": make_id(prediction, device_digest),
            "name": prediction.name,
            "program_hash": prediction.program_hash,
            "device": prediction.device,
            "backend": prediction.backend,
            "protocol": prediction.protocol,
            "framework": prediction.framework,
            "model_id": prediction.model_id,
            "latency_s": prediction.latency_s,
            "lower_s": prediction.lower_s,
            "upper_s": prediction.upper_s,
            "quantiles": prediction.quantiles,
            "domain": prediction.domain,
            "domain_score": prediction.domain_score,
            "roofline_s": prediction.roofline_s,
        }
    )[1:]


def error_fragment(error: ErrorInfo) -> str:
    """The same for an item that has no answer."""
    return encode({"error": error_fields(error)})[1:]


def error_fields(error: ErrorInfo) -> dict[str, Any]:
    """An error as it travels."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def with_id(id: str | None, rest: str) -> str:
    """A result."""
    return f'{{"id":{"null" if id is None else encode_basestring_ascii(id)},{rest}'


def response(model_id: str, results: list[str]) -> bytes:
    """The body of an answer to ``/predict``."""
    return f'{{"model_id":{encode_basestring_ascii(model_id)},"results":[{",".join(results)}]}}'.encode()
