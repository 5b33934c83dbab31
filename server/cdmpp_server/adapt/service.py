"""Answering ``/adapt``: measurements in, an adapted model kept under its name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from cdmpp.adaptation.records import measurement
from cdmpp.data.records import Measurement
from cdmpp.devices import from_mapping
from cdmpp.errors import CdmppError, OverloadedError
from cdmpp.frontends.request import program_from_request
from cdmpp_server.adapt.schema import AdaptRequest, Record
from cdmpp_server.concurrency import ConcurrencyLimiter
from cdmpp_server.deadline import Deadline
from cdmpp_server.models import Models
from cdmpp_server.predict.service import PredictionService
from cdmpp_server.problems import ProblemError
from cdmpp_server.sandbox.sandbox import Sandbox


async def adapt(
    request: AdaptRequest, service: PredictionService, sandbox: Sandbox, limiter: ConcurrencyLimiter, deadline: Deadline
) -> bytes:
    """Adapt the model to a device, keep the adapted one, and answer with what was gained.

    Texts of TIR are read in the sandbox first: one that takes too long or too much memory gets no further.
    Adapting reads TVM JSON again here, in plain Python; TVMScript comes back from the sandbox as TVM JSON.

    Raises
    ------
    ProblemError
        404 for a device that is not known, 409 for records that cannot be used, 503 and 504 under load.
    """
    forms = [r.program if isinstance(r.program, dict) else r.program.model_dump() for r in request.records]
    backends = [record.backend for record in request.records]
    known = await service.read_programs(list(zip(forms, backends, strict=True)), deadline)
    for position, program in enumerate(known):
        if isinstance(program, CdmppError):
            raise _refused(position, program)
    forms = await _without_scripts(forms, sandbox, deadline)
    return await limiter.run(lambda: _adapt(request, forms, service.models), deadline)


async def _without_scripts(
    forms: Sequence[dict[str, Any]], sandbox: Sandbox, deadline: Deadline
) -> list[dict[str, Any]]:
    scripts = {form["tvmscript"]: "" for form in forms if "tvmscript" in form}
    try:
        async with asyncio.timeout_at(deadline.at):
            for script in scripts:
                scripts[script] = await sandbox.script_as_json(script)
    except TimeoutError:
        raise deadline.exceeded() from None
    except OverloadedError as error:
        raise ProblemError(error.code, error.message, error.hint, headers={"retry-after": "1"}) from None
    except CdmppError as error:  # it was read a moment ago: its reader has been overtaken by time or memory
        raise ProblemError(error.code, error.message, error.hint, status=409) from None
    return [{"tvm_json": scripts[form["tvmscript"]]} if "tvmscript" in form else form for form in forms]


def _adapt(request: AdaptRequest, forms: Sequence[dict[str, Any]], models: Models) -> bytes:
    rows = [_record(i, *each) for i, each in enumerate(zip(request.records, forms, strict=True))]
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
    # NaN and infinity are no JSON: better no answer than one that no client can read.
    answer = {"adapted_model": report.pop("model_id"), **report}
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()


def _record(position: int, record: Record, form: dict[str, Any]) -> Measurement:
    try:
        program = program_from_request(form, record.backend)
        return measurement(program, record.latency_s, record.protocol, record.framework)
    except CdmppError as error:
        raise _refused(position, error) from None


def _refused(position: int, error: CdmppError) -> ProblemError:
    return ProblemError(error.code, f"records.{position}: {error.message}", error.hint, status=409, item=position)
