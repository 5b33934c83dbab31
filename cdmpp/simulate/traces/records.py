"""Records of a profiler trace: what one process ran on its threads and its devices' streams.

The collectives among them are NCCL kernels, gloo work, and the operators that record their sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

#: "op": a framework operator on a thread; "annotation": a named range; "runtime": a call into the device's runtime;
#: "kernel", "copy": work on a device (copy: memcpy and memset); "sync": a synchronisation that the device reports.
EventKind = Literal["op", "annotation", "runtime", "kernel", "copy", "sync"]


@dataclass(frozen=True, slots=True)
class TraceLane:
    """A thread of the host, or a stream of a device."""

    where: Literal["host", "device"]
    owner: str  # process id, or number of the device
    name: str  # thread id, or number of the stream


@dataclass(frozen=True, slots=True)
class Arguments:
    """Recorded inputs of an operator (``record_shapes=True``). Tuples have one entry for each input."""

    dims: tuple[object, ...]  # shape of each tensor; a tuple of shapes for a list of tensors; empty for other inputs
    # Element types as the profiler writes them ("float", "c10::BFloat16", "Scalar", "TensorList").
    types: tuple[str, ...]
    # Values of numbers and lists as text; empty for tensors, and in traces that lack them.
    concrete: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective operation of one rank."""

    kind: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast", ...
    bytes: float | None = None  # the larger buffer of one rank; None where the trace does not have the size
    ranks: int | None = None  # size of the process group
    group: str = ""  # name of the process group; empty where the trace does not have it
    dtype: str = ""  # element type, such as "float32"; empty where it is not known

    @property
    def signature(self) -> tuple[object, ...]:
        """What the calls of all ranks have in common."""
        return self.kind, self.bytes, self.group


@dataclass(frozen=True, slots=True)
class Sync:
    """A synchronisation that the device's profiler reports."""

    # "stream_wait": a stream waits for an event; the others block the host.
    kind: Literal["stream", "device", "event", "stream_wait"]
    stream: str = ""  # stream that is waited for, or that waits ("stream_wait"); empty for a device
    wait_on_stream: str = ""  # stream that recorded the event; empty where it is not known
    record: int = -1  # correlation id of the call that recorded the event; -1 where it is not known


@dataclass(slots=True)
class TraceEvent:
    """One event."""

    kind: EventKind
    name: str
    lane: TraceLane
    # Seconds; ``start_s`` from :attr:`RankTrace.origin_s`.
    start_s: float
    duration_s: float
    correlation: int = -1  # connects a runtime call with the work that it launched; -1: none
    detail: Arguments | CollectiveCall | Sync | None = None

    @property
    def end_s(self) -> float:
        """End in seconds from the same origin."""
        return self.start_s + self.duration_s


@dataclass
class RankTrace:
    """Events of one process."""

    path: str  # file that they come from
    source: Literal["torch", "nsys"]
    events: list[TraceEvent] = field(default_factory=list)  # not sorted
    # Rank and number of ranks as the trace has them; None where it does not.
    rank: int | None = None
    world_size: int | None = None
    origin_s: float = 0.0  # time of ``start_s`` 0 on the clock of the trace, in seconds
    host: str = ""  # name of the machine
    devices: dict[str, str] = field(default_factory=dict)  # number of a device to its marketing name
    threads: dict[TraceLane, str] = field(default_factory=dict)  # names of threads
    remarks: list[str] = field(default_factory=list)  # what the reader had to assume

    @property
    def has_shapes(self) -> bool:
        """Whether operators have their inputs' shapes."""
        return any(isinstance(event.detail, Arguments) for event in self.events)

    @property
    def on_device(self) -> bool:
        """Whether work ran on a device."""
        return any(event.kind == "kernel" for event in self.events)


#: Parts of names, most specific first -> kind. Compared without punctuation and case.
_KINDS = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
)
#: Element types as profilers write them -> ours.
_DTYPES = {
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "double": "float64",
    "long": "int64",
    "longint": "int64",
    "int": "int32",
    "short": "int16",
    "shortint": "int16",
    "byte": "uint8",
    "unsignedchar": "uint8",
    "char": "int8",
    "signedchar": "int8",
    "bool": "bool",
    "float8e4m3fn": "float8_e4m3fn",
    "float8e5m2": "float8_e5m2",
}
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
#: Libraries whose work runs on threads of the host, as ``gloo:all_reduce``.
_HOST_WORK = ("gloo:", "mpi:", "ucc:")
_KERNEL = re.compile(r"\b(nccl|rccl|oneccl|msccl)", re.IGNORECASE)


def dtype_name(text: str) -> str:
    """Our name of an element type: ``"c10::BFloat16"`` is ``"bfloat16"``; empty for what is no type."""
    return _DTYPES.get(re.sub(r"[^a-z0-9]", "", text.rpartition("::")[2].casefold()), "")


def dtype_bytes(dtype: str) -> int:
    """Bytes of an element; 1 for types of 8 bits and less."""
    return _BYTES.get(dtype, 1)


def kind_of(name: str) -> str:
    """Kind of collective that a name states; empty if none."""
    plain = re.sub(r"[^a-z0-9]", "", name.casefold())
    return next((kind for part, kind in _KINDS if part in plain), "")


def is_host_work(name: str) -> bool:
    """Whether an event is a collective that a library runs on the host."""
    return name.startswith(_HOST_WORK)


def is_communication_kernel(name: str) -> bool:
    """Whether a kernel is one of a communication library."""
    return bool(_KERNEL.search(name))


def issues_work(name: str) -> bool:
    """Whether an operator hands a collective to a library."""
    return name.startswith("c10d::") and bool(kind_of(name))


def recorded_call(name: str, values: Mapping[str, Any]) -> CollectiveCall | None:
    """The call in the arguments of an event ("Collective name", "In msg nelems", ...); None without them."""
    stated = values.get("Collective name")
    if not isinstance(stated, str) or not stated:
        return None
    dtype = dtype_name(str(values.get("dtype", "")))
    sizes = [values.get("In msg nelems"), values.get("Out msg nelems")]
    elements = [float(size) for size in sizes if isinstance(size, int | float) and size >= 0]
    ranks = values.get("Group size")
    return CollectiveCall(
        kind_of(stated) or kind_of(name) or stated,
        max(elements) * dtype_bytes(dtype) if elements and dtype else None,
        int(ranks) if isinstance(ranks, int) and ranks > 0 else None,
        f"{values.get('Process Group Name', '')} {values.get('Process Group Ranks', '')}".strip(),
        dtype,
    )


def shaped_call(name: str, arguments: Arguments | None, ranks: int | None) -> CollectiveCall:
    """The call of an event whose inputs are recorded, such as ``gloo:all_reduce``.

    ``ranks``: size of the job: an all-gather's output is that many times its input.
    """
    kind = kind_of(name)
    if arguments is None:
        return CollectiveCall(kind, None, ranks)
    moved, dtypes = 0.0, set()
    for dims, type_ in zip(arguments.dims, arguments.types, strict=False):
        shapes = dims if isinstance(dims, tuple) and dims and isinstance(dims[0], tuple) else (dims,)
        # Lists of tensors do not state their elements' type: gradients are float32 unless something else is said.
        dtype = "float32" if type_ == "TensorList" else dtype_name(type_)
        if not dtype:
            continue
        dtypes.add(dtype)
        moved += sum(_elements(shape) for shape in shapes) * dtype_bytes(dtype)
    if kind == "all_gather" and ranks:
        moved *= ranks
    return CollectiveCall(kind, moved or None, ranks, "", dtypes.pop() if len(dtypes) == 1 else "")


def _elements(shape: Any) -> float:
    if not isinstance(shape, Sequence) or not all(isinstance(extent, int) for extent in shape):
        return 0.0
    return float(math.prod(shape)) if shape else 0.0
