"""What travels of a job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ID_PATTERN = "^[0-9a-f]{32}$"


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Submitted(_Answer):
    """A request that has become a job."""

    job_id: Annotated[str, Field(pattern=ID_PATTERN, description="For GET and DELETE /jobs/{job_id}.")]
    state: Literal["queued"] = "queued"


class JobError(_Answer):
    """Why a job has no answer."""

    code: Annotated[str, Field(pattern="^[a-z_]+$", description="Stable identifier for machines.")]
    message: str
    hint: str
    path: Annotated[str, Field(description="The field of the request that is wrong; may be empty.")]


class Job(_Answer):
    """A search that goes on, or its end."""

    job_id: Annotated[str, Field(pattern=ID_PATTERN)]
    kind: Annotated[str, Field(description="As `cdmpp plan` calls it.")]
    state: Annotated[
        Literal["queued", "running", "done", "cancelled", "failed"], Field(description="The last three are final.")
    ]
    progress: Annotated[float, Field(ge=0, le=1, description="Share of the work or of the budget.")]
    best: Annotated[float | None, Field(description="Objective of the best answer so far.")]
    bound: Annotated[float | None, Field(description="Its lower bound.")]
    answer: Annotated[
        dict[str, Any] | None,
        Field(description="As the kind's endpoint answers; before the end, and of a cancelled job, the best."),
    ]
    error: Annotated[JobError | None, Field(description="With `failed`.")]
    created_at: Annotated[float, Field(description="Seconds since 1970.")]
    updated_at: Annotated[float, Field(description="Seconds since 1970.")]
