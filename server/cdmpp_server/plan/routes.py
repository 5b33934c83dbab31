"""An endpoint for every planner: prices, planning processes, and OpenAPI descriptions.

The queue and the caches of ``/predict`` price the programs of a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from cdmpp.errors import CdmppError, FieldError
from cdmpp.plan.base.solve import check_price
from cdmpp.plan.registry import PLANNERS, PlannerSpec
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Query
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.requests.request import Answer, PriceRequest
from cdmpp_server.body import JSON, read_json_body
from cdmpp_server.concurrency import DESCRIPTION, Deadline, cancel_on_disconnect
from cdmpp_server.fields import Device, Program
from cdmpp_server.jobs.routes import Submitted, submit
from cdmpp_server.llm import EXAMPLE_MODEL
from cdmpp_server.openapi import BODY_PROBLEMS, REF, Schema, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.plan.warm import REQUESTS
from cdmpp_server.predict.batcher import Batcher
from cdmpp_server.predict.programs import ResolvedProgram
from cdmpp_server.predict.service import PredictionService, bugs_hidden
from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.processes import PLANNING, Processes, planning
from cdmpp_server.queries import encode_prices
from cdmpp_server.schema_base import AnswerModel, violations
from cdmpp_server.settings import Settings

_PROGRAM: TypeAdapter[Any] = TypeAdapter(Program)
_DEVICE: TypeAdapter[Any] = TypeAdapter(Device)


async def price(
    text: bytes, service: PredictionService, batcher: Batcher, predictor: LatencyPredictor, deadline: Deadline
) -> bytes:
    """Prices as JSON, for the programs that :func:`cdmpp_server.plan.work.read` lists.

    Raises FieldError: a program or device cannot be read, or has no prediction; ProblemError: 503, 504.
    """
    listed = await service.do(len(text) <= 2**16, lambda: json.loads(text), deadline)
    requests = [PriceRequest(**fields) for fields in listed["programs"]]
    forms = [(_program(request), request.backend) for request in requests]
    programs = await service.read_programs(forms, deadline)

    def make_queries() -> list[Query]:
        pairs = zip(requests, programs, strict=True)
        return [_query(request, program, service, predictor) for request, program in pairs]

    queries = await service.do(len(requests) <= 256, make_queries, deadline)
    predictions = await batcher.ask(predictor, queries, DEFAULT_QUANTILES, deadline)
    for request, prediction in zip(requests, predictions, strict=True):
        check_price(request, prediction)
    return encode_prices(predictions, listed["positions"])


def _program(request: PriceRequest) -> dict[str, Any]:
    try:
        _PROGRAM.validate_python(request.program)
    except ValidationError as error:
        raise _field_error(request, violations(error)[0]) from None
    return request.program


def _query(
    request: PriceRequest,
    program: ResolvedProgram | CdmppError,
    service: PredictionService,
    predictor: LatencyPredictor,
) -> Query:
    if not isinstance(program, ResolvedProgram):
        raise _field_error(request, program.message, program.hint)
    try:
        _DEVICE.validate_python(request.device)
        # By name, never by path: text of a client is not a file of this machine.
        device = service.devices.find(request.device, predictor.artifact)
    except ValidationError as error:
        raise _field_error(request, violations(error)[0]) from None
    except CdmppError as error:
        raise _field_error(request, error.message, error.hint) from None
    return Query(program.program, device.spec, request.protocol, request.framework)


def _field_error(request: PriceRequest, message: str, hint: str = "") -> FieldError:
    return FieldError(f"{request.path}: {message}", path=request.path, hint=hint)


router = APIRouter()
#: Seconds between the start of the service and that of its planning process.
_WARM_AFTER_S = 0.5


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Keep planning processes. The first one starts early, so that no request waits for it."""
    make = planning("inline", settings.plan_memory_bytes, settings.plan_limits)
    async with Processes(PLANNING, settings.plan_workers, make, settings.max_queued, settings.deadline_s) as planners:
        app.state.planners = planners
        warm = asyncio.create_task(_warm(planners)) if settings.warm_plans else None
        try:
            yield
        finally:
            if warm is not None:
                warm.cancel()
                with suppress(asyncio.CancelledError):
                    await warm


async def _warm(planners: Processes) -> None:
    await asyncio.sleep(_WARM_AFTER_S)
    planners.start()


async def answer(spec: PlannerSpec, request: Request) -> Response:
    """Validate, price and solve a request, or make it a job."""
    state = request.app.state
    body = bytes(await read_json_body(request, state.settings))
    deadline = Deadline.of(request, state.settings)
    try:
        with bugs_hidden(spec.path):
            response = await cancel_on_disconnect(request, _plan(spec, request, body, deadline))
    except ProblemError as error:
        state.metrics.plan(spec.name, error.problem.code)
        raise
    state.metrics.plan(spec.name, "job" if response.status_code == 202 else "done")
    return response


async def _plan(spec: PlannerSpec, request: Request, body: bytes, deadline: Deadline) -> Response:
    state = request.app.state
    figure = _wants_figure(request)
    header = {"do": "read", "kind": spec.name, "body": len(body)}
    reply, programs = await state.planners.run(header, body, deadline)
    count_items(request, max(reply["programs"], 1))
    predictor = state.service.predictor
    prices = b""
    if programs:
        try:
            prices = await price(programs, state.service, state.batcher, predictor, deadline)
        except CdmppError as error:
            # The schema is kept, but a program or device does not exist.
            path = getattr(error, "path", "")
            places = [SchemaViolation(path=path, message=error.message)]
            raise ProblemError(error.code, error.message, error.hint, status=409, errors=places) from None
    budget_s = reply["budget_s"]
    if (budget_s is not None and budget_s > state.settings.max_inline_s) or _wants_job(request):
        if figure:
            message = (
                f"a figure comes with an answer, and this request becomes a job ({state.settings.max_inline_s:g} s)"
            )
            hint = "give a smaller budget_s, leave figure out, or draw the plan with `cdmpp plan --figure`"
            raise ProblemError("invalid_field", message, hint, status=409)
        # Errors are reported now, because a client may never read the job.
        await state.planners.run({"do": "check", "kind": spec.name, "body": len(body)}, body + prices, deadline)
        return await submit(request.app, spec.name, body, prices, budget_s)
    header = {"do": "solve", "kind": spec.name, "body": len(body), "progress": False, "figure": figure}
    _, text = await state.planners.run(header, body + prices, deadline)
    return Response(text, media_type=JSON)


def _wants_job(request: Request) -> bool:
    """RFC 7240: ``Prefer: respond-async``."""
    wishes = ",".join(request.headers.getlist("prefer")).lower().split(",")
    return any(wish.partition(";")[0].strip() == "respond-async" for wish in wishes)


def _wants_figure(request: Request) -> bool:
    formats = request.query_params.getlist("figure")
    if formats not in ([], ["svg"]):
        message = f"figure is {', '.join(formats)[:80]!r}"
        raise ProblemError("invalid_request", message, "?figure=svg is the only format", status=422)
    return bool(formats)


class PlanKind(AnswerModel):
    """A query above single programs, and where it is asked."""

    kind: str = Field(description="As `cdmpp plan` and `cdmpp.make_plan` call it.")
    path: str
    summary: str
    example: dict[str, Any] = Field(description="A small request of this kind.")


class PlanKinds(AnswerModel):
    """Every query above single programs."""

    kinds: list[PlanKind]


@router.get("/plans", summary="Kinds of plans")
async def plans() -> PlanKinds:
    """What can be asked above single programs, and at which endpoint."""
    return PlanKinds(
        kinds=[
            PlanKind(kind=spec.name, path=spec.path, summary=spec.summary, example=EXAMPLE_REQUESTS[spec.name])
            for spec in PLANNERS.values()
        ]
    )


def _endpoint(spec: PlannerSpec) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await answer(spec, request)

    endpoint.__doc__ = f"{spec.summary}\n\nThe same as `cdmpp plan {spec.name}` and `cdmpp.make_plan`."
    endpoint.__name__ = spec.name.replace("-", "_")
    return endpoint


for _spec in PLANNERS.values():
    router.add_api_route(_spec.path, _endpoint(_spec), methods=["POST"], summary=_spec.summary, response_class=Response)


#: One request of each planner; with given costs, which need no model, except for training.
EXAMPLE_REQUESTS: dict[str, dict[str, Any]] = {
    **{name: forms[0] for name, forms in REQUESTS.items()},
    "data-parallel": {
        "layers": [
            {"name": "embedding", "forward": 0.0002, "backward": 0.0004, "gradient_bytes": [3e7]},
            {"name": "block", "forward": 0.001, "backward": 0.002, "gradient_bytes": [1e7, 2e7]},
        ],
        "ranks": 4,
        "link": {"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e10},
    },
    "training": {
        "model": EXAMPLE_MODEL["config"],
        "device": EXAMPLE_MODEL["device"],
        "gpus": 8,
        "global_batch": 64,
        "sequence": 4096,
    },
    "split": {
        "layers": [
            {
                "name": "embedding",
                "forward_s": 0.0001,
                "backward_s": 0.0002,
                "weight_bytes": 1e9,
                "activation_bytes": 1e7,
                "transfer_s": 0.0001,
            },
            {
                "name": "block",
                "count": 4,
                "forward_s": 0.001,
                "backward_s": 0.002,
                "weight_bytes": 1e8,
                "activation_bytes": 1e7,
                "transfer_s": 0.0001,
            },
        ],
        "ranks": [{}, {}],
        "micro_batches": 4,
    },
    "afd": {
        "layers": 48,
        "attention": {"layer": {"batch": [1, 64, 256], "seconds": [0.0001, 0.0002, 0.0005]}, "instances": 4},
        "ffn": {"layer": {"batch": [1, 64, 512], "seconds": [0.0001, 0.0001, 0.0003]}, "instances": 4},
        "link": {"bytes_per_token": 10240, "bandwidth_bytes_per_s": 5e10, "alpha_s": 1e-5},
        "tpot_s": 0.05,
    },
    "cluster": {
        "gpus": 8,
        "jobs": [
            {"name": "language", "workers": [4, 8], "remaining_samples": 500000, "samples_per_s": [40, 72]},
            {"name": "ranking", "workers": [1, 2, 4], "remaining_samples": 90000, "samples_per_s": [20, 38, 55]},
        ],
    },
    "application": {
        "engines": [
            {"name": "search", "curve": {"batch": [1, 8], "seconds": [0.004, 0.006]}},
            {"name": "decode", "curve": {"batch": [1, 8], "seconds": [0.9, 1.0]}},
        ],
        "primitives": [{"id": "search", "engine": "search"}, {"id": "answer", "engine": "decode", "after": ["search"]}],
        "arrivals_s": [0, 0.1],
    },
}


_MEANING = {
    409: "The request fits the schema, but its parts contradict each other, or a program or device does not exist "
    "(invalid_field); no plan keeps its limits (infeasible); or it needs more memory than a plan may use "
    "(plan_too_large). `errors` names the field.",
    429: "The sender has as many jobs as one sender may have (quota_exceeded), or exceeds its rate limit "
    "(rate_limited); retry after the seconds in Retry-After.",
    503: "Too much work waits (overloaded), or the database of jobs or programs cannot be used "
    "(store_unavailable); retry later.",
}
_PARAMETERS: list[dict[str, Any]] = [
    {
        "name": "Prefer",
        "in": "header",
        "required": False,
        "description": "`respond-async`: make it a job, independent of its budget (RFC 7240).",
        "schema": {"type": "string"},
    },
    {
        "name": "figure",
        "in": "query",
        "required": False,
        "description": "`svg`: the answer has its figure as SVG text in the key `figure`. Not for jobs.",
        "schema": {"type": "string", "enum": ["svg"]},
    },
]


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add bodies, answers and problems of every planner."""
    add_models(schemas, Submitted)
    forms = {spec.name: spec.models() for spec in PLANNERS.values()}
    answers = {name: list(dict.fromkeys(model.answer_model() for model in models)) for name, models in forms.items()}
    refs = _add_apart(schemas, [model for part in (forms, answers) for models in part.values() for model in models])
    links = _job_links(document)
    for spec in PLANNERS.values():
        operation = document["paths"][spec.path]["post"]
        operation["operationId"] = f"plan_{spec.name.replace('-', '_')}"
        operation["description"] += (
            f"\n\nThe response is the plan where there is no search or `budget_s` is at most "
            f"{settings.max_inline_s:g}; otherwise, and with `Prefer: respond-async`, it is a job. "
            f"{DESCRIPTION}"
        )
        operation["parameters"] = [dict(parameter) for parameter in _PARAMETERS]
        add_body(operation, _any_of([refs[model] for model in forms[spec.name]]), EXAMPLE_REQUESTS[spec.name])
        add_answer(operation, _any_of([refs[model] for model in answers[spec.name]]), "The answer.")
        add_answer(operation, ref("Submitted"), "A job: see GET /jobs/{job_id}.", status=202)
        operation["responses"]["202"]["headers"] = {
            "Location": {"description": "URL of the job.", "schema": {"type": "string"}}
        }
        operation["responses"]["202"]["links"] = links
        add_problems(operation, 409, 429, *BODY_PROBLEMS, meaning=_MEANING)


def _job_links(document: Schema) -> Schema:
    """OpenAPI links from a submitted job to the operations on it."""
    paths = document["paths"]
    job_path = paths["/jobs/{job_id}"]
    operations = {
        "job": job_path["get"],
        "cancel": paths["/jobs/{job_id}/cancel"]["post"],
        "remove": job_path["delete"],
    }
    return {
        name: {"operationId": operation["operationId"], "parameters": {"job_id": "$response.body#/job_id"}}
        for name, operation in operations.items()
    }


def _add_apart(schemas: Schema, models: Sequence[type[BaseModel]]) -> dict[type[BaseModel], Schema]:
    """Add models to the components, and return a reference to each. Planners may have models of equal names."""
    # All at once: pydantic then gives different names to models of equal names.
    distinct = list(dict.fromkeys(models))
    made, parts = models_json_schema([(model, _mode(model)) for model in distinct], ref_template="{model}")
    # The other endpoints may have models of these names, too.
    names = {name: name if name not in schemas else f"Plan{name}" for name in parts["$defs"]}

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {
            key: REF.format(model=names[item])
            if key == "$ref"
            else {value: REF.format(model=names[to]) for value, to in item.items()}
            if key == "mapping" and all(isinstance(to, str) for to in item.values())
            else renamed(item)
            for key, item in value.items()
        }

    schemas.update({names[name]: renamed(schema) for name, schema in parts["$defs"].items()})
    return {model: renamed(made[model, _mode(model)]) for model in distinct}


def _mode(model: type[BaseModel]) -> JsonSchemaMode:
    """Answers are described as they are serialized, computed fields included."""
    return "serialization" if issubclass(model, Answer) else "validation"


def _any_of(choices: list[Schema]) -> Schema:
    return choices[0] if len(choices) == 1 else {"anyOf": choices}
