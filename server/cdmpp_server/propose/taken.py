"""The base model with the proposal that an administrator has taken."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from cdmpp.errors import CdmppError
from cdmpp.model.artifact.load import ADAPTER, on_base, without_adapter
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.observe.outage import StoreUnavailableError
from cdmpp_server.propose.store import Proposal, ProposalStore

_log = logging.getLogger(__name__)


def with_taken(predictor: LatencyPredictor, proposals: ProposalStore) -> tuple[LatencyPredictor, str | None]:
    """A loaded model with the proposal that was taken, and the proposal's job, at the start of the service.

    The service starts without the proposal if that cannot be read or applied; the log has the reason.
    """
    try:
        proposal = proposals.taken()
    except StoreUnavailableError:
        _log.error("the database is unavailable: a proposal that was taken is not loaded")
        return predictor, None
    job_id = None if proposal is None else proposal.job_id
    try:
        return with_proposal(predictor, proposal), job_id
    except CdmppError as error:
        _log.error("the proposal of job %s cannot be loaded: %s", job_id, error)
        return predictor, job_id


def with_proposal(predictor: LatencyPredictor, proposal: Proposal | None) -> LatencyPredictor:
    """A loaded model with a proposal instead of its adapter; the model itself if the proposal is for another base.

    Raises
    ------
    ArtifactError
        The proposal was made by another version of the service.
    """
    if proposal is None:
        return predictor
    base = without_adapter(predictor.artifact)
    if base.model_id != proposal.base_model_id:
        _log.warning("job %s proposed a model on %s: not loaded", proposal.job_id, proposal.base_model_id)
        return predictor
    adapted = on_base(base, proposal.adapter, json.loads(proposal.manifest), Path(ADAPTER))
    return LatencyPredictor(adapted, cache=predictor.cache)
