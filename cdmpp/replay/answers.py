"""The answer to a replay request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cdmpp.compose.request import Closed, Explained
from cdmpp.replay.forms import MissingForm, OverrideForm


class IntervalAnswer(Closed):
    """Where the makespan lies if the predictions are off as their own intervals say."""

    lower_s: Annotated[float, Field(description="The lowest of the quantiles, or the makespan where that is lower.")]
    upper_s: Annotated[float, Field(description="The highest of the quantiles, or the makespan where that is higher.")]
    quantiles: Annotated[dict[str, float], Field(description="Level to seconds, of the sampled makespans.")]
    mean_s: float
    samples: Annotated[int, Field(description="0: nothing was to be predicted, the makespan is certain.")]


class PathAnswer(Closed):
    """A node of the critical path."""

    id: str
    device: Annotated[str, Field(description="Of a collective its first rank.")]
    stream: str
    class_: Annotated[str, Field(alias="class")]
    start_s: float
    end_s: float
    share: Annotated[float, Field(description="Of the makespan.")]
    program: Annotated[str | None, Field(description="What it runs; of several programs the one that takes longest.")]


class ShareAnswer(Closed):
    """What part of the critical path a program has, or all nodes of a class that have none."""

    program: Annotated[str | None, Field(description="null: given durations, transfers and gaps, by class.")]
    device: Annotated[str | None, Field(description="That the program is priced on.")]
    class_: Annotated[str, Field(alias="class")]
    nodes: int
    runs: Annotated[int, Field(description="Runs of the program; of other things, how many.")]
    seconds: float
    share: Annotated[float, Field(description="Of the makespan.")]


class StreamAnswer(Closed):
    """A stream; busy and idle make the makespan."""

    device: str
    stream: str
    busy_s: float
    idle_s: float
    nodes: int


class DeviceAnswer(Closed):
    """A device of the graph."""

    device: str
    exposed_comm_s: Annotated[float, Field(description="Seconds in which it transfers and does not compute itself.")]


class NodeAnswer(Closed):
    """When a node ran."""

    id: str
    device: str
    stream: str
    class_: Annotated[str, Field(alias="class")]
    start_s: float
    end_s: float


class WhatIfAnswer(OverrideForm):
    """A what-if: the override, and the makespan with it."""

    nodes: Annotated[int, Field(description="How many nodes match.")]
    makespan_s: float
    saving_s: Annotated[float, Field(description="Makespan less this one; negative: it gets longer.")]


class TraceAnswer(Closed):
    """Chrome trace events, times in µs."""

    trace_events: Annotated[list[dict[str, Any]], Field(alias="traceEvents")]
    display_time_unit: Annotated[Literal["ms"], Field(alias="displayTimeUnit")]


class ReplayAnswer(Explained):
    """When everything ran, what the whole waited for, and how sure that is."""

    makespan_s: float
    lower_bound_s: Annotated[float, Field(description="The longer of the longest path and the busiest stream's time.")]
    interval: Annotated[
        IntervalAnswer | None, Field(description="null: samples is 0, and programs were to be predicted.")
    ]
    critical_path: Annotated[list[PathAnswer], Field(description="Each starts when the one before lets it.")]
    by_program: Annotated[
        list[ShareAnswer], Field(description="The critical path by program, largest first; shares sum to 1.")
    ]
    streams: list[StreamAnswer]
    devices: list[DeviceAnswer]
    exposed_comm_s: Annotated[
        float, Field(description="Seconds in which something is transferred and nothing computes anywhere.")
    ]
    what_if: Annotated[list[WhatIfAnswer], Field(description="In the order of overrides.")]
    timeline: Annotated[list[NodeAnswer] | None, Field(description="In the order of nodes.")]
    missing: Annotated[list[MissingForm], Field(description="Of the model, and not in the makespan.")]
    remarks: Annotated[list[str], Field(description="Figures that lie outside of what was measured.")]
    trace: TraceAnswer | None
