"""The response of ``POST /models/predict``, from the model's programs and their predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError
from cdmpp.features.encode import EncodedProgram
from cdmpp.predict.prediction import ErrorInfo, Prediction, Query
from cdmpp.predict.prediction_matrix import Failed, PredictionMatrix
from cdmpp.predict.prediction_total import PredictionTotal
from cdmpp.programs.program import TensorProgram
from cdmpp_server.observe.ids import Signer
from cdmpp_server.onnx.query import ModelQuery
from cdmpp_server.predict.render import reason_field
from cdmpp_server.sandbox.replies import ModelSummary

Device = DeviceSpec | Failed
Program = TensorProgram | EncodedProgram


def queries(summary: ModelSummary, devices: Sequence[Device], query: ModelQuery) -> list[Query]:
    """Every program on every valid device, program by program."""
    pairs = _matrix(summary, devices).pairs()
    return [Query(program, device, query.protocol, query.framework) for program, device in pairs]


def model_answer(
    model_id: str,
    query: ModelQuery,
    summary: ModelSummary,
    devices: Sequence[Device],
    predictions: Sequence[Prediction],
    signer: Signer | None,
) -> dict[str, Any]:
    """The response as plain values.

    Parameters
    ----------
    devices : sequence of DeviceSpec or Failed
    predictions : sequence of Prediction
        One for each of :func:`queries`.
    signer : Signer, optional
        Makes prediction ids; without it they are null.
    """
    receipts = iter([] if signer is None else signer.receipts(len(summary.programs) * len(devices)))

    def failed(_: Program | Failed, device: Device) -> Prediction | ErrorInfo:
        assert isinstance(device, Failed)
        return ErrorInfo.of(device.error)

    results: list[Prediction | ErrorInfo] = [*predictions]
    rows = _matrix(summary, devices).results(results, failed)
    programs = sorted(zip(summary.programs, summary.counts, rows, strict=True), key=lambda p: -_cost(*p[1:]))
    return {
        "model_id": model_id,
        "protocol": query.protocol,
        "framework": query.framework,
        "devices": [
            _total(device.name, summary.counts, [row[i] for row in rows], bool(summary.unsupported))
            for i, device in enumerate(devices)
        ],
        "programs": [
            {
                "name": program.name,
                "program_hash": program.hash,
                "program": {} if program.operator is None else program.operator.canonical(),
                "count": count,
                "answers": [
                    _answer(device, result, signer, receipts) for device, result in zip(devices, row, strict=True)
                ],
            }
            for program, count, row in programs
        ],
        "unsupported": [{"operator": u.operator, "count": u.count, "reason": u.reason} for u in summary.unsupported],
    }


def counted(predictions: Sequence[Prediction]) -> tuple[list[tuple[str, str]], list[str]]:
    """(device, domain) of the predictions and the codes of the errors, for the metrics."""
    predicted: list[tuple[str, str]] = [
        (p.device, p.domain) for p in predictions if p.error is None and p.domain is not None
    ]
    return predicted, [p.error.code for p in predictions if p.error is not None]


def device_of(artifact: Any, name: str) -> Device:
    """The device of this name, or the error."""
    # By name and never load_device: a client's text must not be used as a path on this machine.
    try:
        spec: DeviceSpec = artifact.device(name)
        return spec
    except CdmppError as error:
        return Failed(name, error)


def _matrix(summary: ModelSummary, devices: Sequence[Device]) -> PredictionMatrix[Program, DeviceSpec]:
    return PredictionMatrix(summary.programs, devices)


def _cost(count: int, row: Sequence[Prediction | ErrorInfo]) -> float:
    return sum(count * p.latency_s for p in row if isinstance(p, Prediction) and p.latency_s is not None)


def _total(
    device: str, counts: Sequence[int], column: Sequence[Prediction | ErrorInfo], left_out: bool
) -> dict[str, Any]:
    counted = [(None if isinstance(r, ErrorInfo) else r, count) for count, r in zip(counts, column, strict=True)]
    total = PredictionTotal.of(counted, left_out=left_out)
    return {
        "device": device,
        "latency_s": total.latency_s,
        "lower_s": total.lower_s,
        "upper_s": total.upper_s,
        "domain": total.domain,
        "domain_shares": total.domain_shares,
        "lower_bound": total.lower_bound,
        "launches": sum(counts),
        "launches_predicted": total.launches,
    }


def _answer(
    device: Device, result: Prediction | ErrorInfo, signer: Signer | None, receipts: Iterator[str]
) -> dict[str, Any]:
    error = result if isinstance(result, ErrorInfo) else result.error
    if error is not None or isinstance(result, ErrorInfo) or isinstance(device, Failed):
        assert error is not None
        return {"device": device.name, "error": {"code": error.code, "message": error.message, "hint": error.hint}}
    return {
        "device": device.name,
        "latency_s": result.latency_s,
        "lower_s": result.lower_s,
        "upper_s": result.upper_s,
        "domain": result.domain,
        "domain_score": result.domain_score,
        "roofline_s": result.roofline_s,
        "prediction_id": None if signer is None else next(receipts) + signer.content(result, device.digest()),
        **reason_field(result),
    }
