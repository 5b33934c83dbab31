"""Collective operations in traces: NCCL kernels, gloo work, and the operators that record their sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cdmpp.simulate.traces.records import Arguments, CollectiveCall

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

    Parameters
    ----------
    name : str
    arguments : Arguments or None
    ranks : int or None
        Size of the job: an all-gather's output is that many times its input.
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
