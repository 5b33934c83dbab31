"""Settings and progress interface of a collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.data.measure.pools import WorkerSettings
from cdmpp.data.measure.sampling import SampledProgram
from cdmpp.data.measure.timing import TimingSettings


class CollectSettings(BaseModel):
    """Settings of a collection."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedules: int = Field(64, ge=0, description="random schedules per task, besides the untuned default")
    irregular: int = Field(0, ge=0, description="further schedules per task with random loops and annotations")
    seed: int = Field(0, ge=0)
    tune: int = Field(0, ge=0, description="measured trials per task of a search for good schedules")
    timing: TimingSettings = TimingSettings()
    repeat_share: float = Field(0.1, ge=0, le=1, description="programs that are measured a second time")
    repeat_gap_s: float = Field(180.0, ge=0, description="seconds between first and second measurement")
    build_limit_s: float = Field(60.0, gt=0, description="time limit of one build")
    time_limit_s: float = Field(30.0, gt=0, description="time limit of all runs of one program")
    memory_gib: float = Field(8.0, gt=0, description="address space of a worker")
    builders: int | None = Field(None, ge=1, description="building processes; default: one per core")

    log: str = Field("", description="file for the output of workers; empty: the terminal")

    def worker(self, time_limit_s: float, **rest: Any) -> WorkerSettings:
        """Return the limits of one kind of worker."""
        return WorkerSettings(time_limit_s, int(self.memory_gib * 2**30), log=self.log, **rest)


class Chooser(Protocol):
    """Chooses which of the drawn schedules of a task are measured."""

    pool: int  # number of schedules to draw
    description: dict[str, Any]  # settings of the choice; an interrupted collection resumes with equal ones only

    def __call__(self, programs: Sequence[SampledProgram], schedules: int) -> list[SampledProgram]:
        """Return programs in the order of measurement: the default, ``schedules`` random draws, and the chosen ones."""


class ProgressListener(Protocol):
    """A progress listener."""

    def phase(self, name: str, done: int, total: int) -> None:
        """A phase begins, or its size has changed."""

    def step(self, ok: bool) -> None:
        """One more item is done."""
