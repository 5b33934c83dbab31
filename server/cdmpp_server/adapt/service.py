"""Implementation of ``POST /adapt``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync

from cdmpp.errors import CdmppError
from cdmpp.model.artifact.load import ADAPTER, on_base, without_adapter
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.adapt.processes import AdaptProcesses
from cdmpp_server.adapt.schema import AdaptRequest
from cdmpp_server.adapt.work import header_for, unpack
from cdmpp_server.deadline import Deadline
from cdmpp_server.fields import ProgramValue, program_value
from cdmpp_server.models import Models
from cdmpp_server.operate.access import sender_id
from cdmpp_server.predict.service import PredictionService
from cdmpp_server.problems import ProblemError
from cdmpp_server.sandbox.sandbox import Sandbox


async def adapt(
    request: AdaptRequest, service: PredictionService, sandbox: Sandbox, processes: AdaptProcesses, deadline: Deadline
) -> bytes:
    """Adapt the base model to a device, keep the adapted model, and return the response body.

    The sandbox reads TIR texts first and refuses those that exceed its limits, and converts TVMScript to TVM JSON.
    An adapting process reads TVM JSON again, in plain Python. It is killed at the deadline.

    Raises
    ------
    ProblemError
        404 for an unknown device, 409 for records that cannot be used, 503 and 504 under load.
    """
    forms = [program_value(record.program) for record in request.records]
    backends = [record.backend for record in request.records]
    known = await service.read_programs(list(zip(forms, backends, strict=True)), deadline)
    for position, program in enumerate(known):
        if isinstance(program, CdmppError):
            message = f"records.{position}: {program.message}"
            raise ProblemError(program.code, message, program.hint, status=409, item=position)
    forms = await _without_scripts(forms, sandbox, deadline)
    base = service.models.base  # a reload may replace it during the adaptation
    body = await service.do(False, partial(_encode, request, forms), deadline)
    reply, data = await processes.run(header_for(base.artifact), body, deadline, len(request.records))
    return await run_sync(_keep, unpack(reply, data), base, service.models)


async def _without_scripts(forms: Sequence[ProgramValue], sandbox: Sandbox, deadline: Deadline) -> list[ProgramValue]:
    scripts = {form["tvmscript"]: "" for form in forms if isinstance(form, dict) and "tvmscript" in form}
    try:
        async with deadline.limit():
            for script in scripts:
                scripts[script] = await sandbox.script_as_json(script)
    except CdmppError as error:  # the first reading succeeded; this one exceeded the time or memory limit
        raise ProblemError(error.code, error.message, error.hint, status=409) from None
    return [
        {"tvm_json": scripts[form["tvmscript"]]} if isinstance(form, dict) and "tvmscript" in form else form
        for form in forms
    ]


def _encode(request: AdaptRequest, forms: Sequence[ProgramValue]) -> bytes:
    records = [
        {
            "program": form,
            "backend": record.backend,
            "latency_s": record.latency_s,
            "protocol": record.protocol,
            "framework": record.framework,
        }
        for form, record in zip(forms, request.records, strict=True)
    ]
    fields = request.model_dump(include={"device", "k", "sampler", "seed"})
    return json.dumps({**fields, "records": records}).encode()


def _keep(reply: tuple[dict[str, Any], dict[str, Any], bytes], base: LatencyPredictor, models: Models) -> bytes:
    report, manifest, payload = reply
    predictor = LatencyPredictor(
        on_base(without_adapter(base.artifact), payload, manifest, Path(ADAPTER)), cache=base.cache
    )
    models.add(predictor, sender_id())
    return json.dumps({"adapted_model": report.pop("model_id"), **report}, separators=(",", ":")).encode()
