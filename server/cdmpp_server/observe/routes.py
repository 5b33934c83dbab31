"""``POST /observe`` and ``GET /observe``, and the lifespan of their database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Request, Response

from cdmpp.devices import known
from cdmpp.errors import MissingDependencyError
from cdmpp_server.background import background
from cdmpp_server.body import INLINE_BYTES, read_json_body
from cdmpp_server.database_url import default_database
from cdmpp_server.deadline import Deadline
from cdmpp_server.feature import Schema
from cdmpp_server.fields import program_value
from cdmpp_server.observe.ids import Signer
from cdmpp_server.observe.outage import StoreUnavailableError
from cdmpp_server.observe.records import Observation, Stored
from cdmpp_server.observe.schema import (
    DeviceError,
    ObservedErrors,
    ObservedProgram,
    ObserveRequest,
    ObserveResponse,
    observe_request_model,
)
from cdmpp_server.observe.store import Store, Summary
from cdmpp_server.observe.writer import FullError, Writer
from cdmpp_server.openapi import BODY_PROBLEMS, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.operate.access import sender_id
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.parse import parse
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings

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
        store = Store(database, settings.max_programs, settings.max_program_bytes, settings.max_observations)
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
    model = observe_request_model(state.settings.max_items)
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
    try:
        if state.store.signer is None:
            await run_sync(state.store.check)
    except StoreUnavailableError as error:
        raise _unavailable(error) from None
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
    try:
        summaries = await run_sync(state.store.summaries)
        jobs = await run_sync(state.proposals.jobs)
    except StoreUnavailableError as error:
        raise _unavailable(error) from None
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
        {
            "program": program_value(o.program),
            "device": o.device,
            "backend": o.backend,
            "protocol": o.protocol,
            "framework": o.framework,
        }
        for _, o in unpredicted
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
    except StoreUnavailableError as error:
        _set_up(state, False)
        raise _unavailable(error) from None
    except FullError as error:
        raise ProblemError("overloaded", str(error), "retry after a second", headers={"retry-after": "1"}) from None
    _set_up(state, True)
    return stored


def _unavailable(error: StoreUnavailableError) -> ProblemError:
    return ProblemError(
        "store_unavailable",
        str(error),
        "nothing of this request was stored; retry after some seconds",
        headers={"retry-after": "5"},
    )


def _device_error(summary: Summary, jobs: Mapping[tuple[str, str, str], str]) -> DeviceError:
    return DeviceError(
        device=summary.device,
        device_digest=summary.device_digest,
        model_id=summary.model_id,
        last_at=summary.last_at,
        proposal=jobs.get((summary.device, summary.device_digest, summary.model_id)),
        **asdict(summary.figures),
    )


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Describe bodies and problems of /observe."""
    add_models(schemas, observe_request_model(settings.max_items), ObserveResponse)
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
    add_problems(
        document["paths"]["/observe"]["get"], 503, meaning={503: "The database cannot be read (store_unavailable)."}
    )
