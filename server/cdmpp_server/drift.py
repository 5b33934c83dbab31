"""Drift: a watch submits a job that adapts the model to a device that has drifted, and stores the result as a proposal.

The job reads the observations since the last change, holds some back, adapts, and compares.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from anyio.to_thread import run_sync
from fastapi import FastAPI

from cdmpp.errors import CdmppError
from cdmpp.train.adaptation.observed import current
from cdmpp_server.adapt.work import header_for, unpack
from cdmpp_server.concurrency import background
from cdmpp_server.jobs.store import FullError, JobStore, LeasedJob
from cdmpp_server.models import Models
from cdmpp_server.observe.figures import MeasuredErrors
from cdmpp_server.observe.routes import list_observations
from cdmpp_server.observe.store import ObservationStore, Summary
from cdmpp_server.observe.tables import StoreUnavailableError
from cdmpp_server.problems import ProblemError, internal_error
from cdmpp_server.processes import ADAPTING, adapting
from cdmpp_server.proposals import Key, ProposalStore
from cdmpp_server.sandbox.sandbox import Sandbox
from cdmpp_server.sandbox.worker import SupervisedWorker, Worker
from cdmpp_server.settings import Settings

_log = logging.getLogger(__name__)
#: Kind of the jobs.
KIND = "adapt"
#: Time limit of reading the programs, and of the adaptation, in seconds.
LIMIT_S = 60.0
#: Every so many of the different queries are held back; the smallest number of them.
HELD_BACK = 4
Row = dict[str, Any]
_PROPOSING = replace(
    ADAPTING, memory="the observations need more memory than is allowed", hint="raise adapt_memory_bytes"
)


class ProposalJob:
    """Executes the jobs of proposals.

    ``sandbox``: converts TVMScript. ``make``: makes an adapting process that is not started.
    """

    def __init__(
        self,
        store: ObservationStore,
        proposals: ProposalStore,
        models: Models,
        sandbox: Sandbox,
        make: Callable[[], Worker],
    ) -> None:
        self._store, self._proposals, self._models = store, proposals, models
        self._sandbox, self._make = sandbox, make

    async def __call__(self, job: LeasedJob) -> str:
        """Execute a job; returns its answer as JSON.

        Raises ProblemError: there are too few observations, or they cannot be used.
        """
        try:
            return await self._propose(json.loads(job.request)["proposal"])
        except ProblemError:
            raise
        except Exception:
            _log.exception("a proposal failed")
            raise internal_error() from None

    async def _propose(self, id: str) -> str:
        key = await run_sync(self._proposals.key, id)
        if key is None:
            raise ProblemError("data_error", "the proposal was replaced by a newer one", status=409)
        read = partial(list_observations, self._store, key.device, key.device_digest, model_id=key.model_id)
        rows: Sequence[Row] = await run_sync(read)
        try:
            async with asyncio.timeout(LIMIT_S):
                usable = await self._readable([row for row in current(rows) if row["program"] is not None])
        except TimeoutError:
            message = f"the programs of the observations were not read within {LIMIT_S:g} s"
            raise ProblemError("deadline_exceeded", message) from None
        used, held = hold_back(usable)
        request = {"device": key.device, "records": used, "held": held}
        base = self._models.base.artifact
        worker = SupervisedWorker(self._make)
        try:
            late = ProblemError("deadline_exceeded", f"the adaptation did not end within {LIMIT_S:g} s")
            with _PROPOSING.problems(key, late):
                header = {**header_for(base), "do": "propose"}
                reply, data = await worker.run(header, json.dumps(request).encode(), LIMIT_S)
        finally:
            await worker.stop()
        _PROPOSING.raise_refusal(reply)
        answer, manifest, adapter = unpack(reply, data)
        if answer["proposed"]:
            text = json.dumps(manifest)
            await run_sync(self._proposals.finish, id, answer["base_model_id"], text, adapter)
        answer = {"replaces": key.model_id, **answer, "observations": _counts(rows, usable)}
        return json.dumps(answer, allow_nan=False)

    async def _readable(self, rows: Sequence[Row]) -> list[Row]:
        """Rows as records of the adapting process, TVMScript as TVM JSON."""
        scripts: dict[str, str | None] = {}
        out = []
        for row in rows:
            script = row["program"].get("tvmscript")
            if script is not None and script not in scripts:
                try:
                    scripts[script] = await self._sandbox.script_as_json(script)
                except CdmppError:
                    scripts[script] = None
            if script is None:
                out.append(row)
            elif scripts[script] is not None:
                out.append({**row, "program": {"tvm_json": scripts[script]}})
        return out


def hold_back(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows to adapt to, and rows of every :data:`HELD_BACK`-th other query to compare with.

    Raises ProblemError: there are fewer queries.
    """
    queries = sorted({_query(row) for row in rows})
    if len(queries) < HELD_BACK:
        raise ProblemError(
            "data_error",
            f"the observations since the last change have {len(queries)} different programs that are known; at least "
            f"{HELD_BACK} are needed",
            "register the programs (POST /programs), or observe with program and device instead of prediction_id",
            status=409,
        )
    held = set(queries[HELD_BACK - 1 :: HELD_BACK])
    return [row for row in rows if _query(row) not in held], [row for row in rows if _query(row) in held]


def _query(row: Row) -> tuple[str, str, str, str]:
    return row["program_hash"], row["backend"], row["protocol"], row["framework"] or ""


def _counts(rows: Sequence[Row], usable: Sequence[Row]) -> dict[str, int]:
    since = current(rows)
    return {"read": len(rows), "since_change": len(since), "with_program": len(usable)}


#: Interval between two checks, and shortest interval, in seconds.
_CHECK_S, _SHORTEST_S = 5.0, 2.0
#: Observations since the last change from which a job is submitted; fewer may still be of the time before.
MIN_OBSERVATIONS = 40
#: A constant bias is not drift. Predictions miss if at least this many observations have at most this share inside the
#: 80 % interval.
BIASED_FROM, BIASED_COVERAGE = 100, 0.5


def is_beyond(figures: MeasuredErrors) -> bool:
    """Whether the predictions of a model on a device have drifted, or miss most measurements."""
    biased = figures.count >= BIASED_FROM and figures.coverage < BIASED_COVERAGE
    return figures.drifting or biased


class DriftWatch:
    """Checks for drift every few seconds, and after observations. Belongs to one event loop.

    ``on_job``: called after a job was submitted.
    """

    def __init__(
        self,
        store: ObservationStore,
        proposals: ProposalStore,
        jobs: JobStore,
        models: Models,
        on_job: Callable[[], None],
    ) -> None:
        self._store, self._proposals, self._jobs, self._models = store, proposals, jobs, models
        self._on_job = on_job
        self._wake = asyncio.Event()
        #: Observations at the last check of each model and device.
        self._checked: dict[Key, int] = {}

    def wake(self) -> None:
        """Schedule a check, because there are new observations."""
        self._wake.set()

    async def serve(self) -> None:
        """Check until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _CHECK_S)
            self._wake.clear()
            try:
                if await run_sync(self.check):
                    self._on_job()
            except StoreUnavailableError:
                pass  # the store has logged it
            except Exception:
                _log.exception("the check for drift failed")
            await asyncio.sleep(_SHORTEST_S)

    def check(self) -> int:
        """Submit jobs for devices that have drifted; returns their number. Blocks."""
        base = self._models.base
        submitted = 0
        for summary in self._store.summaries():
            key = Key(summary.device, summary.device_digest, summary.model_id)
            count = summary.figures.count
            if key.model_id != base.model_id or not is_beyond(summary.figures) or self._checked.get(key) == count:
                continue
            self._checked = {k: n for k, n in self._checked.items() if k.model_id == base.model_id} | {key: count}
            if self._is_known(summary) and self._proposals.is_due(key, count):
                submitted += self._submit(key, count)
        return submitted

    def _is_known(self, summary: Summary) -> bool:
        """Whether the device's figures can be found again by its name."""
        try:
            return self._models.base.artifact.device(summary.device).digest() == summary.device_digest
        except CdmppError:
            return False

    def _submit(self, key: Key, count: int) -> bool:
        rows = list_observations(self._store, key.device, key.device_digest, model_id=key.model_id)
        if len(current(rows)) < MIN_OBSERVATIONS:
            return False
        id = self._proposals.claim(key, count)
        if id is None:
            return False
        try:
            job_id = self._jobs.add(KIND, json.dumps({"proposal": id}).encode(), b"", LIMIT_S)
        except FullError as error:
            _log.warning("no proposal for %s: %s", key.device, error)
            self._proposals.release(id)
            self._checked.pop(key, None)
            return False
        self._proposals.submitted(id, job_id)
        _log.info("%s has drifted: job %s proposes an adapted model", key.device, job_id)
        return True


@asynccontextmanager
async def handlers(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Provide the executor of the jobs; entered before the runners start."""
    state = app.state
    make = adapting(settings.adapt_memory_bytes)
    state.job_handlers = {KIND: ProposalJob(state.store, state.proposals, state.models, state.sandbox, make)}
    yield


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Watch for drift while the application runs; jobs must be running."""
    state = app.state

    def on_job() -> None:
        for runner in state.runners:
            runner.wake()

    state.drift = DriftWatch(state.store, state.proposals, state.jobs, state.models, on_job)
    if not settings.propose_models:
        yield
        return
    async with background(state.drift.serve()):
        yield
