"""``GET /observations``: the stored measurements of a device with their programs."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Select, select

from cdmpp_server.feature import Schema
from cdmpp_server.fields import MAX_DEVICE_TEXT
from cdmpp_server.observe.outage import StoreUnavailableError
from cdmpp_server.observe.store import Store
from cdmpp_server.observe.tables import observations
from cdmpp_server.openapi import add_problems
from cdmpp_server.operate.access import sender_id
from cdmpp_server.operate.middleware import is_administrator
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings

router = APIRouter()
#: Maximum number of observations of one response.
MAX_LISTED = 1000
_ID = "^[0-9a-f]{32}$"
# Some databases cannot store control characters.
_NAME = f"^[^\\x00-\\x1f\\x7f]{{1,{MAX_DEVICE_TEXT}}}$"


class ListedObservation(BaseModel):
    """A measurement, its prediction, and its program where it is known."""

    model_config = ConfigDict(extra="forbid")

    observation_id: str
    program: Annotated[dict[str, Any] | None, Field(description="As in an item of /predict; null if it is not known.")]
    program_hash: str
    device: str
    device_digest: str
    backend: str
    protocol: str
    framework: str | None
    model_id: Annotated[str, Field(description="Model of the prediction.")]
    predicted_s: float
    lower_s: float
    upper_s: float
    latency_s: float
    received_at: Annotated[float, Field(description="Unix time, in seconds.")]


class ListedObservations(BaseModel):
    """Observations of a device, newest first."""

    model_config = ConfigDict(extra="forbid")

    observations: list[ListedObservation]
    next: Annotated[str | None, Field(description="Pass it as `before` for older observations; null: there are none.")]


def list_observations(
    store: Store,
    device: str,
    digest: str | None = None,
    *,
    model_id: str | None = None,
    sender: str | None = None,
    before: str | None = None,
    limit: int = MAX_LISTED,
) -> list[dict[str, Any]]:
    """Observations of a device, newest first, as fields of :class:`ListedObservation`.

    Parameters
    ----------
    store : Store
    device, digest : str
        Name, and hash of the figures; None: of every device with this name.
    model_id : str, optional
        Only predictions of this model.
    sender : str, optional
        Only observations of this sender.
    before : str, optional
        Only observations that are older than the one with this id.
    limit : int
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
    try:
        rows = await run_sync(work)
    except StoreUnavailableError as error:
        raise ProblemError("store_unavailable", str(error), "retry after some seconds") from None
    following = rows[-1]["observation_id"] if len(rows) == limit else None
    return ListedObservations(observations=[ListedObservation(**row) for row in rows], next=following)


def describe(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Describe the problems of /observations."""
    add_problems(
        document["paths"]["/observations"]["get"],
        503,
        meaning={503: "The database cannot be read (store_unavailable)."},
    )
