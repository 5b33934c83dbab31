"""Options that define which latency is predicted: backend, measuring protocol, framework, implementation.

The same operator takes another time as a library kernel than as a TVM program, another inside a
CUDA graph than from an eager framework, and another as one kernel than as several. A query states which one is meant.
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

#: How the operator is executed, for a row of a table and for an answer. "fused": one kernel of a library or an engine.
#: "composed": several kernels of an eager framework, summed. "compiled": the kernel of a compiler such as Inductor.
#: "tuned": the fastest of many candidates.
Implementation = Literal["fused", "composed", "compiled", "tuned"]

BACKENDS: tuple[str, ...] = get_args(Backend)
PROTOCOLS: tuple[str, ...] = get_args(Protocol)
#: Frameworks of tensor programs: inputs of the network, in the order of their columns.
FRAMEWORKS: tuple[str, ...] = get_args(ProgramFramework)
COLLECTIVE_FRAMEWORKS: tuple[str, ...] = get_args(CollectiveFramework)
ALL_FRAMEWORKS: tuple[str, ...] = get_args(Framework)
DEFAULT_PROTOCOL: Protocol = "kernel"
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
DEFAULT_IMPLEMENTATION: Implementation = "fused"
#: Operators that eager PyTorch, with the modules of Hugging Face, composes of several kernels. Softmax, gelu and
#: layer norm are one kernel there.
COMPOSED_BY_PYTORCH = frozenset(
    {
        *("rmsnorm", "rmsnorm_backward", "fused_add_rms_norm", "rotary_embedding", "silu_and_mul", "moe_gating"),
        "softmax_cross_entropy",
    }
)
#: Serving engines, whose kernels of one operator are alike.
SERVING_ENGINES: tuple[str, ...] = ("vllm", "sglang", "trtllm", "flashinfer", "triton", "aiter")

#: Seconds added to a program's roofline by launch and measurement: the head's starting point per
#: protocol (accuracy grows from here; the network corrects it per device and program).
FLOOR_S: dict[str, float] = {"kernel": 3e-6, "graph": 2e-6, "eager": 20e-6}


def framework_code(name: str | None) -> int:
    """Index of a framework in :data:`FRAMEWORKS`, -1 where it is not known."""
    return FRAMEWORKS.index(name) if name else -1


def framework_name(code: int) -> str:
    """Inverse of :func:`framework_code`; "" where it is not known."""
    return FRAMEWORKS[code] if code >= 0 else ""


def implementation_of(operator: str, framework: str | None, implementation: str | None = None) -> str:
    """The implementation that a query means, or that a row has whose source states none.

    ``implementation``: what the query states. Default: "composed" for what eager PyTorch composes, else "fused".
    "composed" means "fused" for an operator that is one kernel in eager PyTorch.
    """
    if operator in COMPOSED_BY_PYTORCH and (implementation or framework) in ("composed", "pytorch"):
        return "composed"
    return DEFAULT_IMPLEMENTATION if implementation in (None, "composed") else implementation


def launcher_of(operator: str, framework: str | None, implementation: str) -> str | None:
    """The framework whose measured kernels answer a query of this implementation; None where any may.

    What eager PyTorch composes was measured under "pytorch" alone, and under "pytorch" nothing else was.
    """
    if operator not in COMPOSED_BY_PYTORCH:
        return framework
    return "pytorch" if implementation == "composed" else None if framework == "pytorch" else framework
