"""Check that a template's lowered program does the configured work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from cdmpp.data.importers.kernel_tuner.template import Launch, Parameters, PrimFunc, TunedKernel
from cdmpp.errors import DataError
from cdmpp.programs.frontends.tir import import_tvm

#: TVM's default lowering of scheduled TensorIR, up to the program without blocks (tvm.s_tir.pipeline, 0.27).
_PASSES = (
    "CanonicalizeLoop",
    "LowerInitBlock",
    "PlanAndUpdateBufferAllocationLocation",
    "ConvertBlocksToOpaque",
    "LiftThreadBinding",
    "CompactBufferAllocation",
    "UnifyThreadBinding",
    "LowerOpaqueBlock",
)


@dataclass(frozen=True)
class LoweredWork:
    """Work of a lowered program.

    Attributes
    ----------
    launch : Launch
    accumulators : int
        Elements of the thread-local buffers that stores to global memory read.
    """

    launch: Launch
    accumulators: int


@cache
def _lowering() -> Any:
    tvm = import_tvm()
    from tvm.s_tir import transform

    return tvm.transform.Sequential([getattr(transform, name)() for name in _PASSES])


def lower(function: PrimFunc) -> PrimFunc:
    """Lower a scheduled PrimFunc to loops over compact buffers."""
    tvm = import_tvm()
    return _lowering()(tvm.IRModule({"main": function}))["main"]


def lowered_work(function: PrimFunc) -> LoweredWork:
    """Read threads, blocks, shared memory and accumulators of a scheduled PrimFunc after lowering."""
    extents: dict[str, int] = {}
    shared_bytes, accumulators = 0, set()
    for node in _nodes(lower(function).body):
        kind = type(node).__name__
        if kind == "AttrStmt" and node.attr_key == "thread_extent":
            extents[str(node.node.thread_tag)] = int(node.value)
        elif kind == "AllocBuffer" and node.buffer.scope() == "shared":
            shared_bytes += _elements(node.buffer) * int(node.buffer.dtype.itemsize)
        elif kind == "BufferStore" and node.buffer.scope() == "global":
            loads = (load for load in _nodes(node.value) if type(load).__name__ == "TensorLoad")
            accumulators |= {load.source for load in loads if load.source.scope() == "local"}
    gx, gy, gz, bx, by, bz = (extents.get(f"{kind}.{axis}", 1) for kind in ("blockIdx", "threadIdx") for axis in "xyz")
    return LoweredWork(Launch((gx, gy, gz), (bx, by, bz), shared_bytes), sum(map(_elements, accumulators)))


def check_program(kernel: TunedKernel, parameters: Parameters, function: PrimFunc | None = None) -> None:
    """Compare a lowered program with the launch that its parameters state.

    Parameters
    ----------
    kernel : TunedKernel
    parameters : mapping
        A configuration that ``kernel`` can express.
    function : tvm.tirx.PrimFunc, optional
        Its program; default: built here.

    Raises
    ------
    DataError
        Blocks, threads, shared memory or accumulators differ.
    """
    work = lowered_work(kernel.build(parameters) if function is None else function)
    stated = kernel.launch(parameters)
    pairs = {
        "blocks": (work.launch.grid, stated.grid),
        "threads of a block": (work.launch.block, stated.block),
        "shared bytes": (work.launch.shared_bytes, stated.shared_bytes),
    }
    if kernel.accumulators is not None:
        pairs["accumulators of a thread"] = (work.accumulators, kernel.accumulators(parameters))
    for what, (lowered, expected) in pairs.items():
        if lowered != expected:
            configuration = ", ".join(f"{name}={parameters[name]}" for name in kernel.parameters)
            raise DataError(
                f"{kernel.name}, {configuration}: the lowered program has {what} {lowered}, not {expected}",
                hint="the template's build and launch contradict each other: correct one of them",
            )


def _nodes(root: Any) -> list[Any]:
    """Every node under a statement or expression."""
    import tvm_ffi

    nodes: list[Any] = []
    tvm_ffi.structural_walk(root, (tvm_ffi.Object, nodes.append), order="pre")
    return nodes


def _elements(buffer: Any) -> int:
    """Elements that a buffer allocates; padded rows have strides."""
    shape = [int(extent) for extent in buffer.shape]
    return shape[0] * int(buffer.strides[0]) if len(buffer.strides) else prod(shape)
