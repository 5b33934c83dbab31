"""Implementation of ``POST /adapt``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from cdmpp.adaptation.records import measurement
from cdmpp.data.records import Measurement
from cdmpp.devices import from_mapping
from cdmpp.errors import CdmppError
from cdmpp.frontends.request import program_from_request
from cdmpp_server.adapt.schema import AdaptRequest, Record
from cdmpp_server.concurrency import ConcurrencyLimiter
from cdmpp_server.deadline import Deadline
from cdmpp_server.fields import ProgramValue, program_value
from cdmpp_server.models import Models
from cdmpp_server.predict.service import PredictionService
from cdmpp_server.problems import ProblemError
from cdmpp_server.sandbox.sandbox import Sandbox


async def adapt(
    request: AdaptRequest, service: PredictionService, sandbox: Sandbox, limiter: ConcurrencyLimiter, deadline: Deadline
) -> bytes:
    """Adapt the model to a device, keep the adapted model, and return the response body.

    The sandbox reads TIR texts first and refuses those that exceed its limits. The adaptation then reads
    TVM JSON again in this process, in plain Python. The sandbox converts TVMScript to TVM JSON.

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
            raise _refused(position, program)
    forms = await _without_scripts(forms, sandbox, deadline)
    return await limiter.run(lambda: _adapt(request, forms, service.models), deadline)


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


def _adapt(request: AdaptRequest, forms: Sequence[ProgramValue], models: Models) -> bytes:
    rows = [_record(i, record, form) for i, (record, form) in enumerate(zip(request.records, forms, strict=True))]
    base = models.base
    try:
        name = request.device
        device = base.artifact.device(name) if isinstance(name, str) else from_mapping(name)
        adapted = base.adapt(rows, device, k=request.k, sampler=request.sampler, seed=request.seed)
    except CdmppError as error:
        status = 404 if error.code == "unknown_device" else 409
        raise ProblemError(error.code, error.message, error.hint, status=status) from None
    models.add(adapted)
    report = dict(adapted.adaptation or {})
    # NaN and infinity are not JSON: they are a bug and raise.
    answer = {"adapted_model": report.pop("model_id"), **report}
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()


def _record(position: int, record: Record, form: ProgramValue) -> Measurement:
    try:
        program = program_from_request(form, record.backend)
        return measurement(program, record.latency_s, record.protocol, record.framework)
    except CdmppError as error:
        raise _refused(position, error) from None


def _refused(position: int, error: CdmppError) -> ProblemError:
    return ProblemError(error.code, f"records.{position}: {error.message}", error.hint, status=409, item=position)
