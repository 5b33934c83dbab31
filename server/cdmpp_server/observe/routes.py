"""``POST /observe``, ``GET /observe`` and ``GET /observations``, and the lifespan of their database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import Discriminator, Field, Tag
from sqlalchemy import Select, select

from cdmpp.devices import known
from cdmpp.errors import MissingDependencyError
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Implementation, Protocol
from cdmpp.train.evaluation.tables import BELIEVABLE_S
from cdmpp_server.body import INLINE_BYTES, parse, read_json_body
from cdmpp_server.concurrency import Deadline, background
from cdmpp_server.database import default_database
from cdmpp_server.fields import MAX_DEVICE_TEXT, Device, Program, program_value, with_max_items
from cdmpp_server.observe.ids import MAX_ID, Signer
from cdmpp_server.observe.store import Observation, ObservationStore, Stored, Summary, Writer
from cdmpp_server.observe.tables import StoreUnavailableError, observations
from cdmpp_server.openapi import BODY_PROBLEMS, Schema, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.operate.access import sender_id
from cdmpp_server.operate.middleware import count_items, is_administrator
from cdmpp_server.schema_base import AnswerModel, RequestModel
from cdmpp_server.settings import Settings

_MEASURED = Field(ge=BELIEVABLE_S[0], le=BELIEVABLE_S[1], allow_inf_nan=False, description="Measured seconds.")


class ObservedPrediction(RequestModel):
    """A measurement of a previous prediction; each result of a response counts once."""

    prediction_id: str = Field(max_length=MAX_ID, description="`prediction_id` of a result of /predict.")
    latency_s: Annotated[float, _MEASURED]


class ObservedProgram(RequestModel):
    """A measurement without a previous prediction; the base model predicts it first."""

    program: Program
    device: Device
    latency_s: Annotated[float, _MEASURED]
    backend: Backend | None = None
    protocol: Protocol = Field(DEFAULT_PROTOCOL, description="As in an item of /predict.")
    framework: Framework | None = None
    implementation: Implementation | None = Field(None, description="As in an item of /predict.")


def _form(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    return "predicted" if "prediction_id" in value else "program"


Observed = Annotated[
    Annotated[ObservedPrediction, Tag("predicted")] | Annotated[ObservedProgram, Tag("program")],
    Discriminator(
        _form,
        custom_error_type="observation_form",
        custom_error_message="an observation needs latency_s, and either prediction_id or program and device",
    ),
]


class ObserveRequest(RequestModel):
    """Measurements; each is stored or gets an error."""

    observations: list[Observed] = Field(min_length=1, max_length=10_000)


class Kept(AnswerModel):
    """An observation that is stored on disk; the same one sent again has the same id."""

    observation_id: str


class ObservationError(AnswerModel):
    """Reason for which an observation was not stored."""

    code: Literal[
        "invalid_prediction_id",
        "already_observed",
        "unknown_program",
        "invalid_program",
        "unsupported_operator",
        "unknown_device",
        "invalid_device",
        "missing_dependency",
        "data_error",
    ] = Field(description="Stable identifier for programs.")
    message: str
    hint: str


class NotKept(AnswerModel):
    """An observation that was not stored; the others are not affected."""

    error: ObservationError


class ObserveResponse(AnswerModel):
    """Result of each observation, in the order of the request."""

    accepted: int = Field(ge=0, description="Number of stored observations, including those that were sent before.")
    results: list[Kept | NotKept]


class DeviceError(AnswerModel):
    """Running error of one model on one device; all figures except count and drift are fractions.

    A ratio measured / predicted above 10 or below 0.1 counts as 10 or 0.1.
    """

    device: str
    device_digest: str = Field(description="Hash of the device's figures; it differs between devices of one name.")
    model_id: str
    count: int = Field(ge=1, description="Number of observations.")
    mape: float = Field(ge=0, description="Mean of |predicted / measured - 1|.")
    bias: float = Field(description="exp(mean log(measured / predicted)) - 1; 0.1: measured latencies are 10 % longer.")
    coverage: float = Field(ge=0, le=1, description="Share of measurements inside their interval.")
    recent_bias: float = Field(description="Bias of the last 200 observations.")
    drift: float | None = Field(
        description="Change of the mean log ratio from the first to the last 200 observations, in standard "
        "errors; null while there are too few observations."
    )
    drifting: bool = Field(description="Whether the change is at least 5 standard errors and 5 %.")
    proposal: str | None = Field(
        None, description="Job that proposes an adapted model, for GET /jobs/{job_id} and POST /models/reload."
    )
    last_at: float = Field(description="Unix time of the last observation, in seconds.")


class ObservedErrors(AnswerModel):
    """Running error by device and model, most recent first; at most 1,000 entries."""

    devices: list[DeviceError]


router = APIRouter()
#: Interval between checks of the database.
_CHECK_INTERVAL_S = 5.0
_Error = dict[str, str]
_EXAMPLE = {
    "observations": [
        {
            "program": {"operator": "linear", "m": 512, "n": 4096, "k": 1024, "dtype": "float16"},
            "device": "t4",
            "latency_s": 1.2e-4,
        }
    ]
}


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Open the database and its writer; if it is unavailable, the other endpoints still work."""
    try:
        database = settings.database or default_database(settings.model)
        store = ObservationStore(database, settings.max_programs, settings.max_program_bytes, settings.max_observations)
    except MissingDependencyError as error:
        app.state.start_error = f"{error.message} ({error.hint})"
        raise
    except ValueError as error:
        app.state.start_error = str(error)
        raise
    app.state.store = store
    app.state.observations = Writer(store.add, settings.max_waiting_observations)
    try:
        await _check(app)
        async with background(_watch(app)):
            yield
    finally:
        # Write accepted observations before the service ends.
        await run_sync(app.state.observations.close)
        await run_sync(store.close)


async def _watch(app: FastAPI) -> None:
    """Update ``app.state.store_up`` regularly, so that readers need not wait for an unavailable database."""
    while True:
        await asyncio.sleep(_CHECK_INTERVAL_S)
        await _check(app)


async def _check(app: FastAPI) -> None:
    try:
        await run_sync(app.state.store.check)
    except StoreUnavailableError:
        _set_up(app.state, False)
    else:
        _set_up(app.state, True)


def _set_up(state: Any, up: bool) -> None:
    state.store_up = up
    state.metrics.store(up)


@router.post("/observe", summary="Report measured latencies", response_class=Response)
async def observe(request: Request) -> Response:
    """Store measurements with their predictions; 200 once they are on disk. Results are in order."""
    state = request.app.state
    body = await read_json_body(request, state.settings)
    deadline = Deadline.of(request, state.settings)
    model = with_max_items(ObserveRequest, "observations", state.settings.max_items)
    # Large bodies run in the same bounded threads as those of /predict.
    do, small = state.service.do, len(body) <= INLINE_BYTES
    observe_request = await do(small, lambda: parse(model, body), deadline)
    count_items(request, len(observe_request.observations))
    reports = _Reports(await _signer(state), state.service.predictor.model_id, sender_id())
    results = await do(small, lambda: _by_id(observe_request, reports), deadline)
    await _by_program(request, observe_request, reports, results, deadline)
    observations = [result for result in results if isinstance(result, Observation)]
    # Before the observations: one whose program is not stored cannot be adapted to.
    with suppress(StoreUnavailableError):
        await run_sync(state.observed_programs.keep, observe_request, results)
    stored = await _write(state, observations, deadline)
    state.metrics.observed(sum(result.new for result in stored))
    state.drift.wake()
    outcomes = iter(map(_outcome, observations, stored))
    rendered = [next(outcomes) if isinstance(result, Observation) else {"error": result} for result in results]
    answer = {"accepted": sum("error" not in result for result in rendered), "results": rendered}
    return Response(json.dumps(answer, separators=(",", ":")), media_type="application/json")


async def _signer(state: Any) -> Signer:
    if state.store.signer is None:
        await run_sync(state.store.check)
    signer: Signer = state.store.signer
    return signer


def _outcome(observation: Observation, stored: Stored) -> dict[str, Any]:
    """The result of an observation; one that is sent again has the result of the first time."""
    if stored.latency_s == observation.latency_s:
        return {"observation_id": stored.id}
    error = {
        "code": "already_observed",
        "message": f"this prediction_id was observed with {stored.latency_s:g} s (observation {stored.id})",
        "hint": "each result of /predict counts once: predict again to report another measurement",
    }
    return {"error": error}


@router.get("/observe", summary="Error of predictions against measurements", operation_id="observed_observe_get")
async def get_observed(request: Request) -> ObservedErrors:
    """Running error and drift of every model on every device, over all workers of the database."""
    state = request.app.state
    summaries = await run_sync(state.store.summaries)
    jobs = await run_sync(state.proposals.jobs)
    return ObservedErrors(devices=[_device_error(summary, jobs) for summary in summaries])


@dataclass(frozen=True)
class _Reports:
    """Makes the observations of one request."""

    signer: Signer
    model_id: str
    sender: str

    def observation(self, prediction_id: str, latency_s: float) -> Observation:
        """Raise ValueError where ``prediction_id`` is not one of this service."""
        predicted = self.signer.read(prediction_id)
        own_device = _digests().get(predicted.device) == predicted.device_digest
        return Observation(predicted, latency_s, self.sender, own_device and predicted.model_id == self.model_id)


@cache
def _digests() -> dict[str, str]:
    """Digests of the known devices by name."""
    return {spec.name: spec.digest() for spec in known()}


def _by_id(observe_request: ObserveRequest, reports: _Reports) -> list[Observation | _Error]:
    """Return observations of previous predictions; the remaining entries are empty until predicted."""
    results: list[Observation | _Error] = []
    for observed in observe_request.observations:
        if isinstance(observed, ObservedProgram):
            results.append({})
            continue
        try:
            results.append(reports.observation(observed.prediction_id, observed.latency_s))
        except ValueError as error:
            hint = "send program, device and latency_s instead"
            results.append({"code": "invalid_prediction_id", "message": str(error), "hint": hint})
    return results


async def _by_program(
    request: Request,
    observe_request: ObserveRequest,
    reports: _Reports,
    results: list[Observation | _Error],
    deadline: Deadline,
) -> None:
    """Predict observations without an id, as /predict does, and fill in observation or error."""
    unpredicted = [(i, o) for i, o in enumerate(observe_request.observations) if isinstance(o, ObservedProgram)]
    if not unpredicted:
        return
    items = [
        {**o.model_dump(exclude={"program", "latency_s"}), "program": program_value(o.program)} for _, o in unpredicted
    ]
    body = json.dumps({"items": items}).encode()
    # The items are already counted as observations.
    answer = await request.app.state.service.predict(body, deadline, lambda _: None)
    for (position, observed), result in zip(unpredicted, json.loads(answer)["results"], strict=True):
        if "error" in result:
            results[position] = result["error"]
        else:
            results[position] = reports.observation(result["prediction_id"], observed.latency_s)


async def _write(state: Any, observations: list[Observation], deadline: Deadline) -> list[Stored]:
    if not observations:
        return []
    try:
        async with deadline.limit():
            stored: list[Stored] = await state.observations.write(observations)
    except StoreUnavailableError:
        _set_up(state, False)
        raise
    _set_up(state, True)
    return stored


def _device_error(summary: Summary, jobs: Mapping[tuple[str, str, str], str]) -> DeviceError:
    key = (summary.device, summary.device_digest, summary.model_id)
    fields = {"device": key[0], "device_digest": key[1], "model_id": key[2], "last_at": summary.last_at}
    return DeviceError(**fields, proposal=jobs.get(key), **asdict(summary.figures))


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Describe bodies and problems of /observe."""
    add_models(schemas, with_max_items(ObserveRequest, "observations", settings.max_items), ObserveResponse)
    operation = document["paths"]["/observe"]["post"]
    add_body(operation, ref("ObserveRequest"), _EXAMPLE)
    add_answer(operation, ref("ObserveResponse"), "Result of each observation, in order.")
    add_problems(
        operation,
        *BODY_PROBLEMS,
        meaning={
            503: "The queue is full (overloaded), or the database cannot be written (store_unavailable). "
            "No observation of this request was stored.",
            504: "The deadline passed (deadline_exceeded). The observations may or may not have been stored.",
        },
    )
    for path in ("/observe", "/observations"):
        unavailable = {503: "The database cannot be read (store_unavailable)."}
        add_problems(document["paths"][path]["get"], 503, meaning=unavailable)


#: Maximum number of observations of one response.
MAX_LISTED = 1000
_ID = "^[0-9a-f]{32}$"
# Some databases cannot store control characters.
_NAME = f"^[^\\x00-\\x1f\\x7f]{{1,{MAX_DEVICE_TEXT}}}$"


class ListedObservation(AnswerModel):
    """A measurement, its prediction, and its program where it is known."""

    observation_id: str
    program: dict[str, Any] | None = Field(description="As in an item of /predict; null if it is not known.")
    program_hash: str
    device: str
    device_digest: str
    backend: str
    protocol: str
    framework: str | None
    model_id: str = Field(description="Model of the prediction.")
    predicted_s: float
    lower_s: float
    upper_s: float
    latency_s: float
    received_at: float = Field(description="Unix time, in seconds.")


class ListedObservations(AnswerModel):
    """Observations of a device, newest first."""

    observations: list[ListedObservation]
    next: str | None = Field(description="Pass it as `before` for older observations; null: there are none.")


def list_observations(
    store: ObservationStore,
    device: str,
    digest: str | None = None,
    *,
    model_id: str | None = None,
    sender: str | None = None,
    before: str | None = None,
    limit: int = MAX_LISTED,
) -> list[dict[str, Any]]:
    """Observations of a device, newest first, as fields of :class:`ListedObservation`.

    ``digest``: hash of the device's figures; None: of every device with this name. ``before``: only observations that
    are older than the one with this id.
    """
    query: Select[Any] = select(observations).where(observations.c.device == device)
    for column, value in (("device_digest", digest), ("model_id", model_id), ("sender", sender)):
        if value is not None:
            query = query.where(observations.c[column] == value)
    if before is not None:
        query = query.where(observations.c.id < before)
    query = query.order_by(observations.c.id.desc()).limit(limit)
    rows = store.read(lambda connection: connection.execute(query).all())
    programs = store.get_programs({row.program_hash for row in rows})
    names = set(ListedObservation.model_fields) - {"observation_id", "program"}
    return [
        {
            "observation_id": row.id,
            "program": programs.get(row.program_hash),
            **{name: row._mapping[name] for name in names},
        }
        for row in rows
    ]


@router.get("/observations", summary="Stored measurements of a device")
async def get_observations(
    request: Request,
    device: Annotated[str, Query(pattern=_NAME, description="Name of the device.")],
    digest: Annotated[str | None, Query(pattern="^[0-9a-f]{16}$", description="`device_digest`.")] = None,
    before: Annotated[str | None, Query(pattern=_ID, description="`next` of the previous response.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
) -> ListedObservations:
    """List measurements of a device with their programs, newest first, to adapt a model to them.

    With API keys, a user's key lists its own observations, and an administrator's key those of all.
    """
    state = request.app.state
    sender = sender_id() if state.settings.api_key_hashes and not is_administrator(request) else None
    work = partial(list_observations, state.store, device, digest, sender=sender, before=before, limit=limit)
    rows = await run_sync(work)
    following = rows[-1]["observation_id"] if len(rows) == limit else None
    return ListedObservations(observations=[ListedObservation(**row) for row in rows], next=following)
