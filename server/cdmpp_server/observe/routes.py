"""``POST /observe`` and ``GET /observe``, and the database that stays open for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, FastAPI, Request, Response

from cdmpp.errors import MissingDependencyError
from cdmpp_server.body import read_json_body
from cdmpp_server.deadline import Deadline
from cdmpp_server.feature import Schema
from cdmpp_server.observe.ids import read_id
from cdmpp_server.observe.schema import (
    DeviceError,
    ObservedErrors,
    ObservedProgram,
    ObserveRequest,
    ObserveResponse,
    observe_request_model,
)
from cdmpp_server.observe.store import Observation, Store, StoreUnavailableError, Summary
from cdmpp_server.observe.writer import FullError, Writer
from cdmpp_server.openapi import BODY_PROBLEMS, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.operate.middleware import count_items
from cdmpp_server.parse import parse
from cdmpp_server.predict.service import INLINE_BYTES
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings

router = APIRouter()
#: How often the database is looked at.
_CHECK_EACH_S = 5.0
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
    """Open the database and its writer; without the database everything else goes on."""
    try:
        store = Store(settings.database, settings.max_programs, settings.max_program_bytes)
    except MissingDependencyError as error:
        app.state.start_error = f"{error.message} ({error.hint})"
        raise
    except ValueError as error:
        app.state.start_error = str(error)
        raise
    app.state.store = store
    app.state.observations = Writer(store.add, settings.max_waiting_observations)
    watch = None
    try:
        await _check(app)
        watch = asyncio.create_task(_watch(app))
        yield
    finally:
        if watch is not None:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
        # What was taken is written before the service ends.
        await run_sync(app.state.observations.close)
        await run_sync(store.close)


async def _watch(app: FastAPI) -> None:
    """Keep ``app.state.store_up`` true: whoever asks for it must not wait for a database that is away."""
    while True:
        await asyncio.sleep(_CHECK_EACH_S)
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


@router.post("/observe", summary="Tell measured latencies", response_class=Response)
async def observe(request: Request) -> Response:
    """Keep measurements beside what was predicted; 200 once they are on the disk. Order is kept."""
    state = request.app.state
    body = await read_json_body(request, state.settings)
    deadline = Deadline.of(request, state.settings)
    model = observe_request_model(state.settings.max_items)
    # With the large bodies of /predict: not as many at a time as there are threads.
    do, small = state.service.do, len(body) <= INLINE_BYTES
    asked = await do(small, lambda: parse(model, body), deadline)
    count_items(request, len(asked.observations))
    results = await do(small, lambda: _by_id(asked), deadline)
    await _by_program(request, asked, results, deadline)
    kept = [each for each in results if isinstance(each, Observation)]
    ids = iter(await _write(state, kept, deadline))
    state.metrics.observed(len(kept))
    answer = {
        "accepted": len(kept),
        "results": [
            {"observation_id": next(ids)} if isinstance(each, Observation) else {"error": each} for each in results
        ],
    }
    return Response(json.dumps(answer, separators=(",", ":")), media_type="application/json")


@router.get("/observe", summary="How far predictions were from measurements")
async def observed(request: Request) -> ObservedErrors:
    """Running error and drift of every model on every device, as all workers of one database know them."""
    state = request.app.state
    try:
        summaries = await run_sync(state.store.summaries)
    except StoreUnavailableError as error:
        raise _unavailable(error) from None
    return ObservedErrors(devices=[_shown(summary) for summary in summaries])


def _by_id(asked: ObserveRequest) -> list[Observation | _Error]:
    """Observations of what was predicted before; the others are errors until they are predicted."""
    results: list[Observation | _Error] = []
    for each in asked.observations:
        if isinstance(each, ObservedProgram):
            results.append({})
            continue
        try:
            results.append(Observation(read_id(each.prediction_id), each.latency_s))
        except ValueError as error:
            hint = "send program, device and latency_s where the id is lost"
            results.append({"code": "invalid_prediction_id", "message": str(error), "hint": hint})
    return results


async def _by_program(
    request: Request, asked: ObserveRequest, results: list[Observation | _Error], deadline: Deadline
) -> None:
    """Predict what came without an id, as /predict does, and put observation or error in its place."""
    late = [(i, each) for i, each in enumerate(asked.observations) if isinstance(each, ObservedProgram)]
    if not late:
        return
    items = [
        {
            "program": each.program if isinstance(each.program, dict) else each.program.model_dump(),
            "device": each.device,
            "backend": each.backend,
            "protocol": each.protocol,
            "framework": each.framework,
        }
        for _, each in late
    ]
    body = json.dumps({"items": items}).encode()
    # They were counted as observations.
    answer = await request.app.state.service.predict(body, deadline, lambda _: None)
    for (position, each), result in zip(late, json.loads(answer)["results"], strict=True):
        if "error" in result:
            results[position] = result["error"]
        else:
            results[position] = Observation(read_id(result["prediction_id"]), each.latency_s)


async def _write(state: Any, kept: list[Observation], deadline: Deadline) -> list[str]:
    if not kept:
        return []
    try:
        async with asyncio.timeout_at(deadline.at):
            ids: list[str] = await state.observations.write(kept)
    except StoreUnavailableError as error:
        _set_up(state, False)
        raise _unavailable(error) from None
    except FullError as error:
        raise ProblemError("overloaded", str(error), "retry after a second", headers={"retry-after": "1"}) from None
    except TimeoutError:
        raise deadline.exceeded() from None
    _set_up(state, True)
    return ids


def _unavailable(error: StoreUnavailableError) -> ProblemError:
    return ProblemError(
        "store_unavailable",
        str(error),
        "nothing of this request was kept; retry after some seconds",
        headers={"retry-after": "5"},
    )


def _shown(summary: Summary) -> DeviceError:
    return DeviceError(
        device=summary.device,
        device_digest=summary.device_digest,
        model_id=summary.model_id,
        last_at=summary.last_at,
        **asdict(summary.figures),
    )


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add bodies and problems of /observe."""
    add_models(schemas, observe_request_model(settings.max_items), ObserveResponse)
    operation = document["paths"]["/observe"]["post"]
    add_body(operation, ref("ObserveRequest"), _EXAMPLE)
    add_answer(operation, ref("ObserveResponse"), "What became of each observation, in order.")
    add_problems(
        operation,
        *BODY_PROBLEMS,
        meaning={
            503: "Too much waits (overloaded), or the database cannot be written (store_unavailable): "
            "nothing of this request was kept.",
            504: "The deadline passed first (deadline_exceeded): the observations may have been kept, or not.",
        },
    )
    add_problems(
        document["paths"]["/observe"]["get"], 503, meaning={503: "The database cannot be read (store_unavailable)."}
    )
