"""Options that define which latency is predicted: backend, measuring protocol, framework.

The same operator takes another time as a library kernel than as a TVM program, and another inside a
CUDA graph than from an eager framework. A query states which one is meant.
"""

from __future__ import annotations

from typing import Literal, get_args

#: "library": the kernel that a vendor library picks. "tvm": the program run exactly as scheduled.
Backend = Literal["library", "tvm"]
#: "kernel": device time alone. "graph": inside a captured graph (a few microseconds of launch cost).
#: "eager": one call from the host, launch cost inside.
Protocol = Literal["kernel", "graph", "eager"]
#: Library or serving stack that launches; None where it is not known. New names are appended: their order is stored.
ProgramFramework = Literal[
    "pytorch",
    "vllm",
    "sglang",
    "trtllm",
    "miopen",
    "vendor",
    "triton",
    "aiter",
    "rocblas",
    "hipblaslt",
    "flashinfer",
    "deepgemm",
]
#: Frameworks of collectives alone: the default of their ``library``.
CollectiveFramework = Literal["nccl", "rccl", "oneccl", "gloo"]
Framework = Literal[ProgramFramework, CollectiveFramework]

BACKENDS: tuple[str, ...] = get_args(Backend)
PROTOCOLS: tuple[str, ...] = get_args(Protocol)
#: Frameworks of tensor programs: inputs of the network, in the order of their columns.
FRAMEWORKS: tuple[str, ...] = get_args(ProgramFramework)
COLLECTIVE_FRAMEWORKS: tuple[str, ...] = get_args(CollectiveFramework)
ALL_FRAMEWORKS: tuple[str, ...] = get_args(Framework)
DEFAULT_PROTOCOL: Protocol = "kernel"

#: Seconds added to a program's roofline by launch and measurement: the head's starting point per
#: protocol (accuracy grows from here; the network corrects it per device and program).
FLOOR_S: dict[str, float] = {"kernel": 3e-6, "graph": 2e-6, "eager": 20e-6}
