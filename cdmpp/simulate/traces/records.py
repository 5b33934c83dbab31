"""Records of a profiler trace: what one process ran on its threads and its devices' streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: "op": a framework operator on a thread; "annotation": a named range; "runtime": a call into the device's runtime;
#: "kernel", "copy": work on a device (copy: memcpy and memset); "sync": a synchronisation that the device reports.
EventKind = Literal["op", "annotation", "runtime", "kernel", "copy", "sync"]


@dataclass(frozen=True, slots=True)
class Lane:
    """A thread of the host, or a stream of a device.

    Attributes
    ----------
    where : {"host", "device"}
    owner : str
        Process id, or number of the device.
    name : str
        Thread id, or number of the stream.
    """

    where: Literal["host", "device"]
    owner: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Recorded inputs of an operator (``record_shapes=True``). Tuples have one entry for each input.

    Attributes
    ----------
    dims : tuple
        Shape of each tensor; a tuple of shapes for a list of tensors; empty for other inputs.
    types : tuple of str
        Element types as the profiler writes them ("float", "c10::BFloat16", "Scalar", "TensorList").
    concrete : tuple of str
        Values of numbers and lists as text; empty for tensors, and in traces that lack them.
    """

    dims: tuple[object, ...]
    types: tuple[str, ...]
    concrete: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective operation of one rank.

    Attributes
    ----------
    kind : str
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast", "barrier", ...
    bytes : float or None
        The larger buffer of one rank; None where the trace does not have the size.
    ranks : int or None
        Size of the process group.
    group : str
        Name of the process group; empty where the trace does not have it.
    dtype : str
        Element type, such as "float32"; empty where it is not known.
    """

    kind: str
    bytes: float | None = None
    ranks: int | None = None
    group: str = ""
    dtype: str = ""

    @property
    def signature(self) -> tuple[object, ...]:
        """What the calls of all ranks have in common."""
        return self.kind, self.bytes, self.group


@dataclass(frozen=True, slots=True)
class Sync:
    """A synchronisation that the device's profiler reports.

    Attributes
    ----------
    kind : {"stream", "device", "event", "stream_wait"}
        "stream_wait": a stream waits for an event; the others block the host.
    stream : str
        Stream that is waited for, or that waits ("stream_wait"); empty for a device.
    wait_on_stream : str
        Stream that recorded the event; empty where it is not known.
    record : int
        Correlation id of the call that recorded the event; -1 where it is not known.
    """

    kind: Literal["stream", "device", "event", "stream_wait"]
    stream: str = ""
    wait_on_stream: str = ""
    record: int = -1


@dataclass(slots=True)
class TraceEvent:
    """One event.

    Attributes
    ----------
    kind : EventKind
    name : str
    lane : Lane
    start_s, duration_s : float
        Seconds; ``start_s`` from :attr:`RankTrace.origin_s`.
    correlation : int
        Connects a runtime call with the work that it launched; -1: none.
    external : int
        Id of the operator that launched the work; -1: none.
    detail : Arguments, CollectiveCall, Sync or None
    """

    kind: EventKind
    name: str
    lane: Lane
    start_s: float
    duration_s: float
    correlation: int = -1
    external: int = -1
    detail: Arguments | CollectiveCall | Sync | None = None

    @property
    def end_s(self) -> float:
        """End in seconds from the same origin."""
        return self.start_s + self.duration_s


@dataclass
class RankTrace:
    """Events of one process.

    Attributes
    ----------
    path : str
        File that they come from.
    source : {"torch", "nsys"}
    events : list of TraceEvent
        Not sorted.
    rank, world_size : int or None
        From the trace.
    origin_s : float
        Time of ``start_s`` 0 on the clock of the trace, in seconds.
    host : str
        Name of the machine.
    devices : dict of str to str
        Number of a device to its marketing name.
    threads : dict of Lane to str
        Names of threads.
    remarks : list of str
        What the reader had to assume.
    """

    path: str
    source: Literal["torch", "nsys"]
    events: list[TraceEvent] = field(default_factory=list)
    rank: int | None = None
    world_size: int | None = None
    origin_s: float = 0.0
    host: str = ""
    devices: dict[str, str] = field(default_factory=dict)
    threads: dict[Lane, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def has_shapes(self) -> bool:
        """Whether operators have their inputs' shapes."""
        return any(isinstance(event.detail, Arguments) for event in self.events)

    @property
    def on_device(self) -> bool:
        """Whether work ran on a device."""
        return any(event.kind == "kernel" for event in self.events)
