"""JSON of results. A prediction is rendered once; the item's id is added per request."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from cdmpp.prediction import ErrorInfo, Prediction
from cdmpp_server.observe.ids import make_id

#: JSON without spaces; raises ValueError for a figure that is not finite.
encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class Answer(NamedTuple):
    """A rendered prediction.

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
    """The rendered form of a prediction without an error; raises as :func:`fragment`."""
    return Answer(fragment(prediction, device_digest), (prediction.device, prediction.domain or "out"))


def fragment(prediction: Prediction, device_digest: str) -> str:
    """The JSON object of a result without its opening brace and its id.

    Raises
    ------
    ValueError
        A figure is not finite: NaN and infinity are not valid JSON.
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
            **reason_field(prediction),
        }
    )[1:]


def reason_field(prediction: Prediction) -> dict[str, str]:
    """``domain_reason`` of a prediction that has one."""
    return {} if prediction.domain_reason is None else {"domain_reason": prediction.domain_reason}


def error_fragment(error: ErrorInfo) -> str:
    """The JSON object of an item's error, without its opening brace and its id."""
    return encode({"error": error_fields(error)})[1:]


def error_fields(error: ErrorInfo) -> dict[str, Any]:
    """Fields of an error in JSON."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def with_id(id: str | None, rest: str) -> str:
    """A result with its id."""
    return f'{{"id":{"null" if id is None else encode_basestring_ascii(id)},{rest}'


def response(model_id: str, results: list[str]) -> bytes:
    """The body of a response of ``/predict``."""
    return f'{{"model_id":{encode_basestring_ascii(model_id)},"results":[{",".join(results)}]}}'.encode()
