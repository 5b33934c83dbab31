"""The job of a proposal: read the observations since the last change, hold some back, adapt, compare."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from anyio.to_thread import run_sync

from cdmpp.errors import CdmppError, OverloadedError
from cdmpp.train.adaptation.observed import current
from cdmpp_server.adapt.processes import check
from cdmpp_server.adapt.work import header_for, unpack
from cdmpp_server.jobs.store import LeasedJob
from cdmpp_server.models import Models
from cdmpp_server.observe.listing import list_observations
from cdmpp_server.observe.outage import StoreUnavailableError
from cdmpp_server.observe.store import Store
from cdmpp_server.problems import ProblemError, internal_error
from cdmpp_server.propose.store import ProposalStore
from cdmpp_server.sandbox.sandbox import Sandbox
from cdmpp_server.sandbox.supervised import SupervisedWorker
from cdmpp_server.sandbox.worker import Worker, WorkerDiedError, WorkerMemoryError, WorkerTimeoutError

_log = logging.getLogger(__name__)
#: Kind of the jobs.
KIND = "adapt"
#: Time limit of reading the programs, and of the adaptation, in seconds.
LIMIT_S = 60.0
#: Every so many of the different queries are held back; the smallest number of them.
HELD_BACK = 4
Row = dict[str, Any]


class ProposalJob:
    """Executes the jobs of proposals.

    Parameters
    ----------
    store : Store
    proposals : ProposalStore
    models : Models
    sandbox : Sandbox
        Converts TVMScript.
    make : callable
        Makes an adapting process that is not started.
    """

    def __init__(
        self, store: Store, proposals: ProposalStore, models: Models, sandbox: Sandbox, make: Callable[[], Worker]
    ) -> None:
        self._store, self._proposals, self._models = store, proposals, models
        self._sandbox, self._make = sandbox, make

    async def __call__(self, job: LeasedJob) -> str:
        """Execute a job; returns its answer as JSON.

        Raises
        ------
        ProblemError
            There are too few observations, or they cannot be used.
        """
        try:
            return await self._propose(json.loads(job.request)["proposal"])
        except (ProblemError, StoreUnavailableError):
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
            reply, data = await worker.run({**header_for(base), "do": "propose"}, json.dumps(request).encode(), LIMIT_S)
        except OverloadedError as error:
            raise ProblemError(error.code, error.message, error.hint) from None
        except WorkerTimeoutError:
            raise ProblemError("deadline_exceeded", f"the adaptation did not end within {LIMIT_S:g} s") from None
        except WorkerMemoryError:
            message = "the observations need more memory than is allowed"
            raise ProblemError("data_error", message, "raise adapt_memory_bytes", status=409) from None
        except WorkerDiedError:
            _log.warning("two adapting processes died with a proposal of %s", key)
            raise internal_error() from None
        finally:
            await worker.stop()
        check(reply)
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

    Raises
    ------
    ProblemError
        There are fewer queries.
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
