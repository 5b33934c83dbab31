"""JSON of results, and its cache. A prediction is rendered once; the item's id and a receipt are added per request."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from cdmpp.predict.prediction import ErrorInfo, Prediction
from cdmpp.predict.predictor import RowKey
from cdmpp.utils.lru import Lru
from cdmpp_server.observe.ids import Signer

#: JSON without spaces; raises ValueError for a figure that is not finite.
encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class RenderedAnswer(NamedTuple):
    """A rendered prediction."""

    #: The JSON object of a result after its id and, if it is signed, after the receipt in its ``prediction_id``.
    text: str
    #: Device and domain, for statistics.
    kind: tuple[str, str]
    #: Whether the text begins with the content of a ``prediction_id``; only such answers are cached.
    signed: bool


def answer_of(prediction: Prediction, device_digest: str, signer: Signer | None) -> RenderedAnswer:
    """The rendered form of a prediction without an error.

    ``signer``: None while the database has not been opened: results then have no ``prediction_id``.
    Raises ValueError: a figure is not finite: NaN and infinity are not valid JSON.
    """
    text = encode(prediction.to_dict())[1:]
    kind = (prediction.device, prediction.domain or "out")
    if signer is None:
        return RenderedAnswer(text, kind, signed=False)
    return RenderedAnswer(f'{signer.content(prediction, device_digest)}",{text}', kind, signed=True)


def reason_field(prediction: Prediction) -> dict[str, str]:
    """``domain_reason`` of a prediction that has one."""
    return {} if prediction.domain_reason is None else {"domain_reason": prediction.domain_reason}


def result(id: str | None, answer: RenderedAnswer, receipt: str) -> str:
    """The JSON object of a result; ``receipt`` is used if the answer is signed."""
    id_text = "null" if id is None else encode_basestring_ascii(id)
    prediction_id = f'"{receipt}' if answer.signed else "null,"
    return f'{{"id":{id_text},"prediction_id":{prediction_id}{answer.text}'


def failure(id: str | None, error: ErrorInfo) -> str:
    """The JSON object of an item's error."""
    return encode({"id": id, "error": error_fields(error)})


def error_fields(error: ErrorInfo) -> dict[str, Any]:
    """Fields of an error in JSON."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def response(model_id: str, results: list[str]) -> bytes:
    """The body of a response of ``/predict``."""
    return f'{{"model_id":{encode_basestring_ascii(model_id)},"results":[{",".join(results)}]}}'.encode()


#: Memory of a rendered answer and its key besides its text, approximately.
_ANSWER_BYTES = 600
#: Share of the memory for predictions that the predictor's own rows get; the rest is for rendered answers.
ROWS_SHARE = 0.35
Levels = tuple[float, ...]


class AnswerCache:
    """Rendered answers of all models of a service, by query, program name and quantile levels."""

    def __init__(self, max_bytes: int) -> None:
        self._answers: Lru[RenderedAnswer] = Lru(max_bytes)

    def get(self, key: RowKey, name: str, levels: Levels) -> RenderedAnswer | None:
        """The answer of a query on a program of this name at these levels, if it is cached."""
        return self._answers.get((*key, name, levels))

    def put(self, key: RowKey, name: str, levels: Levels, answer: RenderedAnswer) -> None:
        """Cache an answer."""
        entry: tuple[Any, ...] = (*key, name, levels)
        self._answers.put(entry, answer, len(answer.text) + _ANSWER_BYTES)
