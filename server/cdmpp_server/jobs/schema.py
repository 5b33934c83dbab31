"""Response models of jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ID_PATTERN = "^[0-9a-f]{32}$"


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Submitted(_Answer):
    """A request that has become a job."""

    job_id: Annotated[str, Field(pattern=ID_PATTERN, description="For /jobs/{job_id} and /jobs/{job_id}/cancel.")]
    state: Literal["queued"] = "queued"


class JobError(_Answer):
    """Reason why a job has no answer."""

    code: Annotated[str, Field(pattern="^[a-z_]+$", description="Stable identifier for machines.")]
    message: str
    hint: str
    path: Annotated[str, Field(description="The invalid field of the request; may be empty.")]


class JobSummary(_Answer):
    """A queued, running or finished search without its answer."""

    job_id: Annotated[str, Field(pattern=ID_PATTERN)]
    kind: Annotated[str, Field(description="Name of the planner, as in `cdmpp plan`.")]
    state: Annotated[
        Literal["queued", "running", "done", "cancelled", "failed"], Field(description="The last three are final.")
    ]
    progress: Annotated[float, Field(ge=0, le=1, description="Share of the work or of the budget.")]
    best: Annotated[float | None, Field(description="Objective of the best answer so far.")]
    bound: Annotated[float | None, Field(description="Its lower bound.")]
    created_at: Annotated[float, Field(description="Seconds since 1970.")]
    updated_at: Annotated[float, Field(description="Seconds since 1970.")]


class Job(JobSummary):
    """A queued, running or finished search."""

    answer: Annotated[
        dict[str, Any] | None,
        Field(description="The plan, as the planner's endpoint returns it; the best so far unless `done`."),
    ]
    error: Annotated[JobError | None, Field(description="Set if the state is `failed`.")]


class Jobs(_Answer):
    """The newest jobs of one sender."""

    jobs: Annotated[list[JobSummary], Field(description="Newest first; GET /jobs/{job_id} has the answer of each.")]
