"""The job of an adapting process: records as JSON become a report and the files of an adapted model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

import cdmpp.train.adaptation.adapt  # noqa: F401 - imported before the memory of the process is limited
from cdmpp.data.records import Measurement
from cdmpp.devices.loading import resolve_device
from cdmpp.errors import ArtifactError, CdmppError, DataError
from cdmpp.model.artifact.folder import MANIFEST
from cdmpp.model.artifact.load import ADAPTER, load_artifact, without_adapter
from cdmpp.model.artifact.model import Artifact
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.predict.requests.request import WholeNumber
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp.train.adaptation.records import measurement
from cdmpp.train.adaptation.samplers import Sampler
from cdmpp.train.evaluation.tables import BELIEVABLE_S
from cdmpp_server.body import parse
from cdmpp_server.fields import Device, RegisteredProgram, program_value, with_max_items
from cdmpp_server.problems import ProblemError
from cdmpp_server.schema_base import RequestModel

WorkerReply = tuple[dict[str, Any], bytes]


class Record(RequestModel):
    """A program and its measured latency on the device."""

    program: RegisteredProgram
    latency_s: float = Field(
        ge=BELIEVABLE_S[0], le=BELIEVABLE_S[1], allow_inf_nan=False, description="Measured latency in seconds."
    )
    backend: Backend | None = None
    protocol: Protocol = Field(DEFAULT_PROTOCOL, description="As in an item of /predict.")
    framework: Framework | None = None


class AdaptRequest(RequestModel):
    """Measurements of one device."""

    device: Device
    records: list[Record] = Field(min_length=1, max_length=10_000)
    k: Annotated[int, Field(ge=1, le=100_000), WholeNumber] | None = Field(
        None,
        description="Number of records to use. They are chosen without their latencies, and the errors are "
        "reported for the remaining records. Default: use all records.",
    )
    sampler: Sampler = Field("variance", description="Method that chooses the k records.")
    seed: Annotated[int, Field(ge=0, le=2**31 - 1), WholeNumber] = 0


class RecordError(Exception):
    """A record that cannot be read."""

    def __init__(self, position: int, error: CdmppError) -> None:
        super().__init__(str(error))
        self.position, self.error = position, error


class Bases:
    """Base models of the process: the last one that was used."""

    def __init__(self) -> None:
        self._last: LatencyPredictor | None = None

    def get(self, folder: str, model_id: str) -> LatencyPredictor:
        """The base model of a folder.

        Raises ArtifactError: the folder no longer holds this model.
        """
        if self._last is None or self._last.model_id != model_id:
            artifact = without_adapter(load_artifact(folder))
            if artifact.model_id != model_id:
                raise ArtifactError(
                    f"the model folder now holds {artifact.model_id}, which the service has not loaded",
                    hint="an administrator can load it: POST /models/reload",
                )
            self._last = LatencyPredictor(artifact)
        return self._last


def header_for(artifact: Artifact) -> dict[str, Any]:
    """Header of a job that adapts the base of this model."""
    return {"folder": str(artifact.folder), "model_id": without_adapter(artifact).model_id}


def run(bases: Bases, header: Mapping[str, Any], body: bytes) -> WorkerReply:
    """Run one job; an error of the request becomes the reply."""
    try:
        if header.get("do") == "read":
            return {}, _read(body, header["most"])
        job = _propose if header.get("do") == "propose" else _adapt
        return job(bases.get(header["folder"], header["model_id"]), json.loads(body))
    except RecordError as failed:
        return {"refused": _refusal(failed.error, failed.position)}, b""
    except ProblemError as error:
        return {"refused": error.refusal()}, b""
    except CdmppError as error:
        return {"refused": _refusal(error)}, b""


def _read(body: bytes, max_records: int) -> bytes:
    """The validated request with its defaults; each program is its text or the object that was sent."""
    request = parse(with_max_items(AdaptRequest, "records", max_records), body)
    records = [
        {**record.model_dump(exclude={"program"}), "program": program_value(record.program)}
        for record in request.records
    ]
    return json.dumps({**request.model_dump(exclude={"records"}), "records": records}).encode()


def _adapt(base: LatencyPredictor, request: Mapping[str, Any]) -> WorkerReply:
    device = resolve_device(request["device"], base.artifact.device)
    options = {name: request[name] for name in ("k", "sampler", "seed")}
    adapted = base.adapt(measurements(request["records"]), device, **options)
    return pack(adapted.adaptation or {}, adapted)


def _propose(base: LatencyPredictor, request: Mapping[str, Any]) -> WorkerReply:
    """Adapt to the records, and compare with the predictions that were served on those that were held back."""
    device = base.artifact.device(request["device"])
    adapted = base.adapt(measurements(request["records"]), device)
    held = request["held"]
    programs = [program_from_request(record["program"], record["backend"]) for record in held]
    answers = adapted.predict_queries(
        [Query(p, device, record["protocol"], record["framework"]) for p, record in zip(programs, held, strict=True)]
    )
    pairs = [(record, answer.latency_s) for record, answer in zip(held, answers, strict=True) if answer.latency_s]
    if not pairs:
        raise DataError("none of the observations that were held back can be predicted")
    before = fmean(abs(record["predicted_s"] / record["latency_s"] - 1) for record, _ in pairs)
    after = fmean(abs(latency_s / record["latency_s"] - 1) for record, latency_s in pairs)
    report = adapted.adaptation or {}
    answer = {
        "device": device.name,
        "model_id": adapted.model_id,
        "base_model_id": base.model_id,
        "proposed": bool(report["weight"]) and after < before,
        "held_back": {
            "programs": len({program.hash for program in programs}),
            "observations": len(pairs),
            "before": before,
            "after": after,
        },
        **{name: report[name] for name in ("k", "programs", "weight", "width", "cross_validated", "warnings")},
    }
    return pack(answer, adapted)


def measurements(records: list[dict[str, Any]]) -> list[Measurement]:
    """Records as measurements without a device. Raises RecordError: one cannot be read."""
    rows = []
    for position, record in enumerate(records):
        try:
            program = program_from_request(record["program"], record["backend"])
            rows.append(measurement(program, record["latency_s"], record["protocol"], record["framework"]))
        except CdmppError as error:
            raise RecordError(position, error) from None
    return rows


def pack(answer: Mapping[str, Any], adapted: LatencyPredictor) -> WorkerReply:
    """Reply with an answer and the two files of an adapted model.

    Raises ArtifactError: only the collectives were adapted, and the service keeps adapters of the network alone.
    """
    if adapted.artifact.adapter is None:
        raise ArtifactError(
            "the records are all of collectives, and the service adapts tensor programs",
            hint="run cdmpp adapt --records FILE --out DIR, and start the service with --model DIR",
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "adapted"
        adapted.save(folder)
        manifest, payload = (folder / MANIFEST).read_bytes(), (folder / ADAPTER).read_bytes()
    # NaN and infinity are not JSON: they are a bug and raise.
    text = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
    return {"answer": len(text), "manifest": len(manifest)}, text + manifest + payload


def unpack(reply: Mapping[str, Any], data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Answer, manifest and adapter of :func:`pack`."""
    first, second = reply["answer"], reply["answer"] + reply["manifest"]
    return json.loads(data[:first]), json.loads(data[first:second]), data[second:]


def _refusal(error: CdmppError, position: int | None = None) -> dict[str, Any]:
    status = 404 if error.code == "unknown_device" else 409
    message = error.message if position is None else f"records.{position}: {error.message}"
    return {"code": error.code, "message": message, "hint": error.hint, "status": status, "item": position}
