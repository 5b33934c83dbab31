"""From an ONNX model's programs and their predictions to the answer of ``POST /models/predict``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdmpp.devices.spec import DeviceSpec
from cdmpp.domain.score import Label, worst
from cdmpp.errors import CdmppError
from cdmpp.prediction import ErrorInfo, Prediction, Query
from cdmpp_server.observe.ids import make_id
from cdmpp_server.onnx.query import ModelQuery
from cdmpp_server.sandbox.replies import ModelSummary

Named = tuple[str, DeviceSpec | CdmppError]


def questions(summary: ModelSummary, devices: Sequence[Named], query: ModelQuery) -> list[Query]:
    """Every program on every device that is one, programs outermost."""
    return [
        Query(program, device, query.protocol, query.framework)
        for program in summary.programs
        for _, device in devices
        if not isinstance(device, CdmppError)
    ]


def model_answer(
    model_id: str, query: ModelQuery, summary: ModelSummary, devices: Sequence[Named], predictions: Sequence[Prediction]
) -> dict[str, Any]:
    """The answer as plain values.

    Parameters
    ----------
    devices : sequence of (name as asked, specification or why there is none)
    predictions : sequence of Prediction
        As :func:`questions` asks for them.
    """
    asked = iter(predictions)
    rows = [
        [ErrorInfo.of(d) if isinstance(d, CdmppError) else next(asked) for _, d in devices] for _ in summary.programs
    ]
    programs = sorted(zip(summary.programs, summary.counts, rows, strict=True), key=lambda p: -_cost(*p[1:]))
    return {
        "model_id": model_id,
        "protocol": query.protocol,
        "framework": query.framework,
        "devices": [
            _total(_name(device), summary.counts, [row[i] for row in rows]) for i, device in enumerate(devices)
        ],
        "programs": [
            {
                "name": program.name,
                "program_hash": program.hash,
                "program": {} if program.operator is None else program.operator.canonical(),
                "count": count,
                "answers": [_answer(device, said) for device, said in zip(devices, row, strict=True)],
            }
            for program, count, row in programs
        ],
        "unsupported": [{"operator": u.operator, "count": u.count, "reason": u.reason} for u in summary.unsupported],
    }


def counted(predictions: Sequence[Prediction]) -> tuple[list[tuple[str, str]], list[str]]:
    """(device, domain) of what was answered and the codes of what was not, for the metrics."""
    answered: list[tuple[str, str]] = [
        (p.device, p.domain) for p in predictions if p.error is None and p.domain is not None
    ]
    return answered, [p.error.code for p in predictions if p.error is not None]


def _name(device: Named) -> str:
    """The device's own name, which an alias stands for; as asked where it is none."""
    asked, spec = device
    return asked if isinstance(spec, CdmppError) else spec.name


def _cost(count: int, row: Sequence[Prediction | ErrorInfo]) -> float:
    return sum(count * said.latency_s for said in _predicted(row) if said.latency_s is not None)


def _predicted(row: Sequence[Prediction | ErrorInfo]) -> list[Prediction]:
    return [said for said in row if isinstance(said, Prediction) and said.error is None]


def _total(device: str, counts: Sequence[int], column: Sequence[Prediction | ErrorInfo]) -> dict[str, Any]:
    sums: dict[str, float | None] = dict.fromkeys(("latency_s", "lower_s", "upper_s"))
    domains: list[Label] = []
    launches = 0
    for count, said in zip(counts, column, strict=True):
        if isinstance(said, ErrorInfo) or said.error is not None or said.domain is None:
            continue
        for key in sums:
            sums[key] = (sums[key] or 0.0) + count * getattr(said, key)
        domains.append(said.domain)
        launches += count
    return {"device": device, **sums, "domain": worst(domains), "launches": sum(counts), "launches_predicted": launches}


def _answer(device: Named, said: Prediction | ErrorInfo) -> dict[str, Any]:
    error = said if isinstance(said, ErrorInfo) else said.error
    spec = device[1]
    if error is not None or isinstance(said, ErrorInfo) or isinstance(spec, CdmppError):
        assert error is not None
        return {"device": _name(device), "error": {"code": error.code, "message": error.message, "hint": error.hint}}
    return {
        "device": spec.name,
        "latency_s": said.latency_s,
        "lower_s": said.lower_s,
        "upper_s": said.upper_s,
        "domain": said.domain,
        "domain_score": said.domain_score,
        "roofline_s": said.roofline_s,
        "prediction_id": make_id(said, spec.digest()),
    }
