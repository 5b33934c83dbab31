"""Reloading of the configured model folder, with the proposal that was taken, in one process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from anyio.to_thread import run_sync
from starlette.datastructures import State

from cdmpp.errors import CdmppError
from cdmpp.predict.predictor import CachedRow, LatencyPredictor
from cdmpp.utils.lru import Lru
from cdmpp_server.models import Fingerprint, Models, fingerprint, load_model
from cdmpp_server.observe.outage import StoreUnavailableError
from cdmpp_server.predict.service import check_golden
from cdmpp_server.propose.store import Proposal
from cdmpp_server.propose.taken import with_proposal

_log = logging.getLogger(__name__)


class ReloadRefusedError(Exception):
    """The folder has no working model; the message is the reason. The old model stays."""


class Reloader:
    """Replaces the base model by the current content of the model folder, with the proposal that was taken.

    Parameters
    ----------
    state : State
        State of the application, with ``models``, ``proposals``, ``metrics`` and ``not_ready``.
    folder : Path, optional
        The configured model folder; None: the model in the package.
    loaded : Fingerprint
        Fingerprint of the folder, taken before the present model was loaded.
    taken : str, optional
        Job of the proposal that was loaded.
    """

    def __init__(self, state: State, folder: Path | None, loaded: Fingerprint, taken: str | None) -> None:
        self._state, self._folder, self._loaded = state, folder, (loaded, taken)
        self._lock = asyncio.Lock()

    async def reload(self) -> str:
        """Load, test and swap the model; requests that have begun keep the old model.

        Returns
        -------
        str
            ``model_id`` of the base model from now on. An unchanged folder is not loaded again.

        Raises
        ------
        ReloadRefusedError
        """
        async with self._lock:
            models: Models = self._state.models
            before = models.base.model_id
            try:
                taken = await run_sync(self._state.proposals.taken)
            except StoreUnavailableError as error:
                raise ReloadRefusedError(f"{error}: it holds the proposal that was taken") from None
            seen = await run_sync(fingerprint, self._folder), None if taken is None else taken.job_id
            if seen == self._loaded and not self._state.not_ready:
                _log.info("the model folder and the proposal are unchanged: %s stays", before)
                return before
            try:
                predictor = await run_sync(_load, self._folder, models.base.cache, taken)
            except ReloadRefusedError as error:
                _log.error("the model was not reloaded: %s; %s stays", error, self._state.models.base.model_id)
                raise
            models.replace(predictor)
            self._state.metrics.model(predictor.model_id)
            self._state.not_ready = ""
            self._loaded = seen
            _log.info("the model was reloaded: %s replaces %s", predictor.model_id, before)
            return predictor.model_id


def _load(folder: Path | None, cache: Lru[CachedRow], taken: Proposal | None) -> LatencyPredictor:
    try:
        predictor = with_proposal(load_model(folder, cache), taken)
    except (CdmppError, OSError) as error:
        raise ReloadRefusedError(str(error).replace("\n", " ")) from None
    reason = check_golden(predictor)
    if reason:
        raise ReloadRefusedError(f"the golden prediction of {predictor.model_id} failed: {reason}")
    return predictor
