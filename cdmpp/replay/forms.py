"""The parts of a replay request, as JSON has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from cdmpp.compose.request import (
    MAX_COUNT,
    MAX_SECONDS,
    Closed,
    DeviceForm,
    Name,
    ProgramForm,
    Seconds,
    WholeNumber,
    Work,
)
from cdmpp.replay.links import Algorithm, Collective

MAX_NODES, MAX_DEPS, MAX_EVENTS, MAX_PARTS = 200_000, 200_000, 1000, 256
MAX_DEVICES, MAX_LINKS, MAX_ROWS, MAX_RANKS = 10_000, 10_000, 1000, 1024
MAX_WHAT_IFS, MAX_SAMPLES = 256, 10_000
MAX_BYTES = 1e18

#: Streams are numbered in many traces: 0 is "0".
StreamName = Name | Annotated[int, Field(ge=0, le=MAX_COUNT), WholeNumber]
Bytes = Annotated[float, Field(ge=0, le=MAX_BYTES)]


class CollectiveForm(Closed):
    """A transfer between ranks that starts when all of them are ready, and holds a stream on each."""

    op: Collective
    ranks: Annotated[list[Name], Field(min_length=1, max_length=MAX_RANKS, description="Devices.")]
    bytes: Annotated[Bytes, Field(description="Of the whole buffer.")]
    link: Annotated[Name, Field(description="A name of links: between neighbours.")]
    algorithm: Annotated[
        Algorithm, Field(description='"measured": the link\'s figures are of the whole operation, not of a message.')
    ] = "ring"


class NodeForm(Closed):
    """One thing that takes time: exactly one of duration_s, program, programs, bytes and collective."""

    id: Name
    device: Annotated[Name | None, Field(description="Where it runs; a collective has ranks instead.")] = None
    stream: Annotated[StreamName | None, Field(description='Default: "0"; of a collective "comm", on each rank.')] = (
        None
    )
    duration_s: Seconds | None = None
    program: ProgramForm | None = None
    count: Annotated[
        Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber] | None,
        Field(description="How often program runs; default: once."),
    ] = None
    programs: Annotated[
        list[Work] | None, Field(min_length=1, max_length=MAX_PARTS, description="Several, one after the other.")
    ] = None
    bytes: Bytes | None = None
    link: Annotated[Name | None, Field(description="A name of links; comes with bytes.")] = None
    collective: CollectiveForm | None = None
    deps: Annotated[
        list[Name], Field(max_length=MAX_DEPS, description="Ids of nodes that must have ended.", default_factory=list)
    ]
    records: Annotated[
        list[Name], Field(max_length=MAX_EVENTS, description="Events that its end records.", default_factory=list)
    ]
    waits: Annotated[
        list[Name], Field(max_length=MAX_EVENTS, description="Events that it waits for.", default_factory=list)
    ]
    gap_s: Annotated[
        Seconds | None,
        Field(description="Idle time after it, for its stream and what depends on it; default: its device's."),
    ] = None
    class_: Annotated[
        Name | None,
        Field(
            alias="class",
            description='For overrides. "comm" counts as communication, as do bytes and collectives; "gap" '
            'as idle time; all else as computation. Default: "compute" or "comm".',
        ),
    ] = None


class DeviceEntry(Closed):
    """What a device of the graph is."""

    device: Annotated[
        DeviceForm | None, Field(description="The device that its programs are priced on; default: its name.")
    ] = None
    parallel: Annotated[bool, Field(description="Runs everything at once that is ready.")] = False
    gap_s: Annotated[Seconds, Field(description="Idle time after each of its nodes.")] = 0.0


Row = Annotated[
    list[Annotated[float, Field(gt=0, le=MAX_BYTES)]], Field(min_length=2, max_length=2, description="[bytes, seconds]")
]


class LinkForm(Closed):
    """Either a table, or alpha_s with at most one of beta_s_per_byte and bandwidth_bytes_per_s."""

    alpha_s: Annotated[Seconds | None, Field(description="Seconds of a message without bytes; default 0.")] = None
    beta_s_per_byte: Annotated[float, Field(ge=0, le=MAX_SECONDS)] | None = None
    bandwidth_bytes_per_s: Annotated[float, Field(ge=1, le=MAX_BYTES)] | None = None
    table: Annotated[
        list[Row] | None,
        Field(
            min_length=2,
            max_length=MAX_ROWS,
            description="Measured [bytes, seconds], bytes rising; straight in logarithms between the rows.",
        ),
    ] = None
    exclusive: Annotated[bool, Field(description="Carries one transfer at a time.")] = False


class OverrideForm(Closed):
    """A what-if: the nodes that match every selector given take ratio x max(duration + delay_s, 0)."""

    node: Annotated[Name | None, Field(description="Id of a node.")] = None
    device: Annotated[Name | None, Field(description="Device of the graph; ranks of collectives too.")] = None
    stream: StreamName | None = None
    class_: Annotated[Name | None, Field(alias="class")] = None
    ratio: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    delay_s: Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS)] = 0.0

    def selectors(self) -> dict[str, str]:
        """Those that are given, by their JSON names."""
        named = {"node": self.node, "device": self.device, "stream": self.stream, "class": self.class_}
        return {name: str(value) for name, value in named.items() if value is not None}


class MissingForm(Closed):
    """Operators of a model that the graph leaves out: they have no program."""

    operator: Annotated[str, Field(max_length=2000)]
    count: Annotated[int, Field(ge=1, le=10**9), WholeNumber]
    reason: Annotated[str, Field(max_length=2000)]


def as_json(form: Closed) -> dict[str, Any]:
    """The fields that were given, with their JSON names."""
    return form.model_dump(mode="json", by_alias=True, exclude_unset=True)
