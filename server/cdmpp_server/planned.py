"""Endpoints whose queries are predicted by the queue of ``/predict`` and whose other work planning processes do.

A planning process reads the request and lists its queries, the service predicts them, and a planning process makes the
answer. Such a job ends at the request's deadline and when the client leaves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from cdmpp.devices.loading import from_mapping
from cdmpp.devices.registry import lookup_board
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError, UnknownDeviceError
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Prediction, Query
from cdmpp.utils.lru import Lru
from cdmpp_server.body import INLINE_BYTES, JSON, check, parse_json, read_json_body
from cdmpp_server.concurrency import DESCRIPTION, Deadline, cancel_on_disconnect
from cdmpp_server.openapi import BODY_PROBLEMS, Schema, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.predict.service import bugs_hidden
from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.queries import decode_prices, decode_queries, encode_prices, encode_queries
from cdmpp_server.sandbox.worker import WorkerReply
from cdmpp_server.settings import Settings

#: Queries of plans that a process keeps, and models whose devices it keeps.
_MAX_KEPT_QUERIES, _MAX_KEPT_MODELS = 50_000, 16
Find = Callable[[str], DeviceSpec]


class QueryPlan(Protocol):
    """A plan with queries for a predictor.

    It may have ``levels``, the quantiles of their predictions, and ``seconds``, a prediction of the time of its answer.
    """

    queries: list[Query]


@dataclass(frozen=True)
class Endpoint:
    """Work of an endpoint in a planning process. A :class:`CdmppError` of its functions becomes a problem."""

    path: str
    summary: str
    description: str
    #: From the form, a function that finds devices by name, and the most predictions of a request.
    plan_of: Callable[[Any, Find, int], QueryPlan]
    #: From the plan, the model's id and the predictions of its queries to a JSON value.
    answer_of: Callable[[Any, str, Sequence[Prediction]], dict[str, Any]]
    #: Models of the body, with a field ``model``, and of the answer.
    forms: tuple[type[BaseModel], ...]
    answers: tuple[type[BaseModel], ...]
    answer: str  # description of the answer
    example: Any
    meaning: Mapping[int, str]  # of statuses
    note: str = ""  # where the description continues; {most} are the most predictions
    several: str = ""  # the field that only the second of ``forms`` has

    def form_of(self, value: Any) -> type[BaseModel]:
        """The model of the JSON value of a body."""
        return self.forms[1 if self.several and isinstance(value, dict) and self.several in value else 0]


#: By path; the modules of the endpoints fill it.
ENDPOINTS: dict[str, Endpoint] = {}


def planned(*endpoints: Endpoint) -> APIRouter:
    """The routes of endpoints, which :data:`ENDPOINTS` then has."""
    router = APIRouter()
    for endpoint in endpoints:
        ENDPOINTS[endpoint.path] = endpoint
        router.add_api_route(
            endpoint.path,
            answer_planned,
            methods=["POST"],
            name=endpoint.path.rpartition("/")[2].replace("-", "_"),
            summary=endpoint.summary,
            description=endpoint.description,
            response_class=Response,
        )
    return router


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add descriptions, models, bodies, answers and problems of :data:`ENDPOINTS`."""
    for path, endpoint in ENDPOINTS.items():
        add_models(schemas, *endpoint.forms, *endpoint.answers)
        operation = document["paths"][path]["post"]
        operation["description"] += f"\n\n{endpoint.note.format(most=f'{settings.max_items:,}')}{DESCRIPTION}"
        add_body(operation, _one_of(endpoint.forms), endpoint.example)
        add_answer(operation, _one_of(endpoint.answers), endpoint.answer)
        add_problems(operation, 404, 409, *BODY_PROBLEMS, meaning=endpoint.meaning)


def _one_of(models: Sequence[type[BaseModel]]) -> Schema:
    refs = [ref(model.__name__) for model in models]
    return refs[0] if len(refs) == 1 else {"oneOf": refs}


async def answer_planned(request: Request) -> Response:
    """Answer a request of one of :data:`ENDPOINTS`."""
    path: str = request.scope["route"].path
    body = bytes(await read_json_body(request, request.app.state.settings))
    deadline = Deadline.of(request, request.app.state.settings)
    with bugs_hidden(path):
        text = await cancel_on_disconnect(request, _answer(request, path, body, deadline))
    return Response(text, media_type=JSON)


async def _answer(request: Request, path: str, body: bytes, deadline: Deadline) -> bytes:
    state = request.app.state
    predictor = state.service.predictor
    header = {"kind": path, "body": len(body), "most": state.settings.max_items, "model": None}
    with state.planners.admitted(path, deadline) as place:

        async def run(do: str, prices: bytes = b"", seconds: float = 0.0) -> WorkerReply:
            nonlocal predictor
            devices = b""
            while True:
                header.update(do=do, prices=len(prices), model_id=predictor.model_id)
                payload = body + prices + devices
                job = state.planners.run(header, payload, deadline, place, seconds=seconds, stoppable=True)
                reply, data = await job
                if "needs" not in reply:
                    return reply, data
                # The request names another model, or the process does not know the model's devices yet.
                if reply["needs"] != header["model"]:
                    header["model"] = reply["needs"]
                    predictor = await state.service.model(reply["needs"])
                specs = predictor.artifact.device_specs.items()
                known = {name: spec.model_dump(mode="json", exclude_none=True) for name, spec in specs}
                devices = json.dumps(known).encode()

        reply, listed = await run("list")
        queries = await state.service.do(len(listed) <= INLINE_BYTES, partial(decode_queries, listed), deadline)
        count_items(request, len(queries))
        predictions = await state.batcher.ask(predictor, queries, reply["levels"], deadline)
        state.metrics.predictions(predictions)
        prices = await state.service.do(len(queries) <= 256, partial(encode_prices, predictions), deadline)
        return (await run("answer", prices, reply["seconds"]))[1]


class GivenUpError(BaseException):
    """The request of the job has ended; nothing in the job catches this."""


class PlannedJobs:
    """Jobs of a planning process for :data:`ENDPOINTS`; it keeps the last plans."""

    def __init__(self) -> None:
        self._plans: Lru[QueryPlan] = Lru(_MAX_KEPT_QUERIES)
        self._devices: Lru[dict[str, DeviceSpec]] = Lru(_MAX_KEPT_MODELS)
        self._stoppable = False

    def stop(self) -> None:
        """End the running job; called by a signal's handler."""
        if self._stoppable:
            raise GivenUpError

    def run(self, header: dict[str, Any], payload: bytes) -> WorkerReply:
        """Run a job; a problem of the request becomes the reply."""
        try:
            self._stoppable = True
            return self._run(header, payload)
        except GivenUpError:
            return {"given_up": True}, b""
        except ProblemError as error:
            return {"refused": error.refusal()}, b""
        except CdmppError as error:
            return {"refused": problem_of(error).refusal()}, b""
        finally:
            self._stoppable = False

    def _run(self, header: dict[str, Any], payload: bytes) -> WorkerReply:
        endpoint, model_id = ENDPOINTS[header["kind"]], header["model_id"]
        end = header["body"] + header["prices"]
        body, prices, devices = payload[: header["body"]], payload[header["body"] : end], payload[end:]
        if devices:
            known = {name: from_mapping(fields) for name, fields in json.loads(devices).items()}
            self._devices.put(model_id, known, 1)
        key = hashlib.sha256(f"{header['kind']}\0{model_id}\0".encode() + body).digest()
        plan = self._plans.get(key)
        if plan is None:
            value = parse_json(body)
            form = check(endpoint.form_of(value), value)
            wanted = getattr(form, "model")  # noqa: B009
            specs = self._devices.get(model_id)
            if wanted != header["model"] or specs is None:
                return {"needs": wanted}, b""
            plan = endpoint.plan_of(form, partial(lookup_board, others=specs), header["most"])
            self._plans.put(key, plan, 100 + len(plan.queries))
        if header["do"] == "answer":
            return {}, json_bytes(endpoint.answer_of(plan, model_id, decode_prices(prices)))
        levels = list(getattr(plan, "levels", DEFAULT_QUANTILES))
        return {"levels": levels, "seconds": getattr(plan, "seconds", 0.0)}, encode_queries(plan.queries)


def problem_of(error: CdmppError) -> ProblemError:
    """The problem of an error behind the schema: 404 for an unknown device, else 409, because the body fits."""
    status = 404 if isinstance(error, UnknownDeviceError) else 409
    places = [SchemaViolation(path=error.path, message=error.message)] if isinstance(error, FieldError) else None
    return ProblemError(error.code, error.message, error.hint, status=status, errors=places)


def json_bytes(value: Any) -> bytes:
    """A body without spaces; NaN and infinities are a bug and raise."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
