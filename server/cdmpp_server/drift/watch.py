"""Watch for drift: submits a job that proposes an adapted model, at most one for each model and device."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress

from anyio.to_thread import run_sync

from cdmpp.errors import CdmppError
from cdmpp.train.adaptation.observed import current
from cdmpp_server.drift.job import KIND, LIMIT_S
from cdmpp_server.jobs.store import FullError, JobStore, QuotaError
from cdmpp_server.models import Models
from cdmpp_server.observe.figures import Figures
from cdmpp_server.observe.listing import list_observations
from cdmpp_server.observe.outage import StoreUnavailableError
from cdmpp_server.observe.store import Store, Summary
from cdmpp_server.propose.store import Key, ProposalStore

_log = logging.getLogger(__name__)
#: Interval between two checks, and shortest interval, in seconds.
_CHECK_S, _SHORTEST_S = 5.0, 2.0
#: Observations since the last change from which a job is submitted; fewer may still be of the time before.
MIN_OBSERVATIONS = 40
#: A constant bias is not drift. Predictions miss if at least this many observations have at most this share inside the
#: 80 % interval.
BIASED_FROM, BIASED_COVERAGE = 100, 0.5


def is_beyond(figures: Figures) -> bool:
    """Whether the predictions of a model on a device have drifted, or miss most measurements."""
    biased = figures.count >= BIASED_FROM and figures.coverage < BIASED_COVERAGE
    return figures.drifting or biased


class DriftWatch:
    """Checks for drift every few seconds, and after observations. Belongs to one event loop.

    Parameters
    ----------
    store : Store
    proposals : ProposalStore
    jobs : JobStore
    models : Models
    on_job : callable
        Called after a job was submitted.
    """

    def __init__(
        self, store: Store, proposals: ProposalStore, jobs: JobStore, models: Models, on_job: Callable[[], None]
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
        except (FullError, QuotaError) as error:
            _log.warning("no proposal for %s: %s", key.device, error)
            self._proposals.release(id)
            self._checked.pop(key, None)
            return False
        self._proposals.submitted(id, job_id)
        _log.info("%s has drifted: job %s proposes an adapted model", key.device, job_id)
        return True
