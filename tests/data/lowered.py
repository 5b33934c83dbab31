"""Lowered programs of Kernel Tuner's templates, and the launch that they do."""

from functools import cache
from math import prod
from typing import Any

from cdmpp.data.importers.kernel_tuner.template import LaunchShape

#: TVM's default lowering of scheduled TensorIR, up to the program without blocks (tvm.s_tir.pipeline, 0.27).
_PASSES = (
    *("CanonicalizeLoop", "LowerInitBlock", "PlanAndUpdateBufferAllocationLocation", "ConvertBlocksToOpaque"),
    *("LiftThreadBinding", "CompactBufferAllocation", "UnifyThreadBinding", "LowerOpaqueBlock"),
)


@cache
def _lowering() -> Any:
    import tvm
    from tvm.s_tir import transform

    return tvm.transform.Sequential([getattr(transform, name)() for name in _PASSES])


def lower(function: Any) -> Any:
    """Lower a scheduled PrimFunc to loops over compact buffers."""
    import tvm

    return _lowering()(tvm.IRModule({"main": function}))["main"]


def lowered_work(function: Any) -> tuple[LaunchShape, int]:
    """Return the launch of a scheduled PrimFunc, and its accumulators.

    These are the elements of the thread-local buffers that stores to global memory read.
    """
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
    return LaunchShape((gx, gy, gz), (bx, by, bz), shared_bytes), sum(map(_elements, accumulators))


def _nodes(root: Any) -> list[Any]:
    """Return every node under a statement or expression."""
    import tvm_ffi

    nodes: list[Any] = []
    tvm_ffi.structural_walk(root, (tvm_ffi.Object, nodes.append), order="pre")
    return nodes


def _elements(buffer: Any) -> int:
    """Return the elements that a buffer allocates; padded rows have strides."""
    shape = [int(extent) for extent in buffer.shape]
    return shape[0] * int(buffer.strides[0]) if len(buffer.strides) else prod(shape)
