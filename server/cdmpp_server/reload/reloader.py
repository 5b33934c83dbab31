"""Loading the configured model folder again, in one process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from anyio.to_thread import run_sync
from starlette.datastructures import State

from cdmpp.errors import CdmppError
from cdmpp.predictor import LatencyPredictor
from cdmpp_server.models import Fingerprint, Models, fingerprint, load_model
from cdmpp_server.predict.service import check_golden

_log = logging.getLogger(__name__)


class ReloadRefusedError(Exception):
    """The folder holds no model that works; the message says why. The old model goes on."""


class Reloader:
    """Puts what is in the model folder now in the place of the loaded model.

    Parameters
    ----------
    state : State
        The application's, with ``models``, ``metrics`` and ``not_ready``.
    folder : Path, optional
        The configured one; None: the one that ships with the package.
    loaded : Fingerprint
        Of the folder, taken before the present model was loaded.
    """

    def __init__(self, state: State, folder: Path | None, loaded: Fingerprint) -> None:
        self._state, self._folder, self._loaded = state, folder, loaded
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> str:
        """Load, try, and swap; requests that are being answered keep the model that they began with.

        Returns
        -------
        str
            The ``model_id`` of the model that answers from now on. A folder in which nothing has changed is
            not loaded again.

        Raises
        ------
        ReloadRefusedError
        """
        async with self._one_at_a_time:
            models: Models = self._state.models
            before = models.base.model_id
            seen = await run_sync(fingerprint, self._folder)
            if seen == self._loaded and not self._state.not_ready:
                _log.info("nothing has changed in the model folder: %s goes on", before)
                return before
            try:
                predictor = await run_sync(_load, self._folder)
            except ReloadRefusedError as error:
                _log.error("the model was not reloaded: %s; %s goes on", error, self._state.models.base.model_id)
                raise
            models.replace(predictor)
            self._state.metrics.model(predictor.model_id)
            self._state.not_ready = ""
            self._loaded = seen
            _log.info("the model was reloaded: %s in the place of %s", predictor.model_id, before)
            return predictor.model_id


def _load(folder: Path | None) -> LatencyPredictor:
    try:
        predictor = load_model(folder)
    except (CdmppError, OSError) as error:
        raise ReloadRefusedError(str(error).replace("\n", " ")) from None
    reason = check_golden(predictor)
    if reason:
        raise ReloadRefusedError(f"the golden prediction of {predictor.model_id} failed: {reason}")
    return predictor
