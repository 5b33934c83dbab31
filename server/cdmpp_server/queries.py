"""Queries and their predictions as JSON, between the service and its planning processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from cdmpp.devices.loading import from_mapping
from cdmpp.predict.prediction import ErrorInfo, Prediction, Query
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend


def encode_queries(queries: Sequence[Query]) -> bytes:
    """JSON of queries of operators; each device is written once."""
    devices: dict[int, int] = {}
    specs: list[Any] = []
    rows = []
    for query in queries:
        device = devices.setdefault(id(query.device), len(specs))
        if device == len(specs):
            spec = query.device
            specs.append(spec if isinstance(spec, str) else spec.model_dump(mode="json", exclude_none=True))
        program = query.program
        rows.append((program.name, program.backend, device, query.protocol, query.framework, query.implementation))
    return json.dumps({"devices": specs, "rows": rows}, separators=(",", ":")).encode()


def decode_queries(text: bytes) -> list[Query]:
    """Queries of :func:`encode_queries`."""
    value = json.loads(text)
    devices = [device if isinstance(device, str) else from_mapping(device) for device in value["devices"]]
    return [
        Query(_program(name, backend), devices[device], *options) for name, backend, device, *options in value["rows"]
    ]


@lru_cache(8192)
def _program(text: str, backend: Backend) -> TensorProgram:
    return TensorProgram.from_operator(text, backend)


def encode_prices(predictions: Sequence[Prediction], positions: Sequence[int] | None = None) -> bytes:
    """Predictions as JSON; they are also stored with a job.

    ``positions``: index of the prediction of each program, where programs share them; default: each its own.
    """
    answers = [prediction.to_dict() for prediction in predictions]
    places = range(len(answers)) if positions is None else positions
    return json.dumps({"answers": answers, "places": list(places)}, separators=(",", ":")).encode()


def decode_prices(text: bytes) -> list[Prediction]:
    """Predictions of :func:`encode_prices`, one for each position."""
    stored = json.loads(text)
    names = Prediction.__dataclass_fields__
    predictions = []
    for fields in stored["answers"]:
        known = {name: value for name, value in fields.items() if name in names}
        if "error" in known:
            known["error"] = ErrorInfo(**known["error"])
        predictions.append(Prediction(**known))
    return [predictions[position] for position in stored["places"]]
