"""Point in polygon: Kernel Tuner's crossing-number kernel, 20 million points against 600 vertices.

Sizes and parameters: AutoTuningAssociation/benchmark_hub, ``kernels/pnpoly`` (MIT). A thread tests ``tile_size``
points, one block of threads apart, against all edges: it keeps their coordinates and counters in registers, computes
the slope of an edge once, and unrolls the loop over its points.

``between_method`` is the comparison that says whether an edge passes a point's height: two comparisons that differ
(0), the same as conjunctions (1), or a product of differences, tested for zero before (2) or after (3) its sign.
``use_method`` is what a crossing does: it flips a flag under a condition (0), adds the condition to a counter
(1), or adds one under a condition (2).

Constant memory is not expressed: the polygon is a parameter in global memory, which every thread reads at one address.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from cdmpp.data.importers.kernel_tuner.blocks import thread_loop
from cdmpp.data.importers.kernel_tuner.template import Launch, Parameters, PrimFunc, TunedKernel

PARAMETERS = ("between_method", "block_size_x", "tile_size", "use_method")


@dataclass(frozen=True)
class Sizes:
    """Extents of the problem."""

    points: int = 20_000_000
    vertices: int = 600


def inexpressible(parameters: Parameters) -> str:
    """Why a configuration cannot be expressed; "" where it can."""
    for name, values in (("between_method", range(4)), ("use_method", range(3))):
        if parameters[name] not in values:
            return f"{name} is unknown"
    return ""


def launch(parameters: Parameters) -> Launch:
    """Blocks, threads and shared bytes from the parameters alone."""
    return _launch(parameters, Sizes())


def _launch(parameters: Parameters, sizes: Sizes) -> Launch:
    block = parameters["block_size_x"]
    return Launch((-(-sizes.points // (block * parameters["tile_size"])), 1, 1), (block, 1, 1), 0)


def accumulators(parameters: Parameters) -> int:
    """Counters that a thread holds: one per point."""
    return parameters["tile_size"]


def build(parameters: Parameters) -> PrimFunc:
    """The scheduled program of a configuration."""
    return program(parameters, Sizes())


def program(parameters: Parameters, sizes: Sizes, *, bound: bool = True) -> PrimFunc:
    """The scheduled program for a problem of any size.

    Parameters
    ----------
    parameters : mapping
        Values of :data:`PARAMETERS`.
    sizes : Sizes
    bound : bool
        Bind the loops to hardware threads; False leaves them serial, so that a CPU can run the program.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as ir

    block, tile = parameters["block_size_x"], parameters["tile_size"]
    grid, method = _launch(parameters, sizes).grid[0], parameters["use_method"]

    threads = partial(thread_loop, bound=bound)

    with IRBuilder() as builder, ir.prim_func():
        ir.func_name("main")
        points = ir.arg("points", ir.buffer((sizes.points, 2), "float32"))
        vertices = ir.arg("vertices", ir.buffer((sizes.vertices, 2), "float32"))
        inside = ir.arg("inside", ir.buffer((sizes.points,), "int32"))
        with threads(grid, "blockIdx.x") as block_index, threads(block, "threadIdx.x") as thread:
            first = block_index * (block * tile) + thread
            own = ir.alloc_buffer((tile, 2), "float32", scope="local")
            count = ir.alloc_buffer((tile,), "int32", scope="local")
            slope = ir.alloc_buffer((1,), "float32", scope="local")
            crosses = ir.alloc_buffer((1,), "bool", scope="local")
            with ir.unroll(tile) as item:
                ir.buffer_store(count, 0, [item])
                with ir.If(first + item * block < sizes.points), ir.Then(), ir.vectorized(2) as axis:
                    ir.buffer_store(own, points[first + item * block, axis], [item, axis])
            with ir.serial(sizes.vertices) as j:
                before = (j + sizes.vertices - 1) % sizes.vertices
                x, y, y_before = vertices[j, 0], vertices[j, 1], vertices[before, 1]
                ir.buffer_store(slope, (vertices[before, 0] - x) / (y_before - y), [0])
                with ir.unroll(tile) as item:
                    left = own[item, 0] < slope[0] * (own[item, 1] - y) + x
                    between = _between(parameters["between_method"], own[item, 1], y, y_before)
                    ir.buffer_store(crosses, ir.And(between, left), [0])
                    if method == 1:
                        ir.buffer_store(count, count[item] + ir.Cast("int32", crosses[0]), [item])
                    else:
                        with ir.If(crosses[0]), ir.Then():
                            ir.buffer_store(count, count[item] + 1 if method else 1 - count[item], [item])
            with ir.unroll(tile) as item, ir.If(first + item * block < sizes.points), ir.Then():
                value = ir.bitwise_and(count[item], 1) if method else count[item]
                ir.buffer_store(inside, value, [first + item * block])
    return builder.get()


def _between(method: int, height: Any, one: Any, other: Any) -> Any:
    """Whether an edge from one height to the other passes a height."""
    from tvm import tirx

    if method == 0:
        return tirx.NE(tirx.Cast("int32", one > height), tirx.Cast("int32", other > height))
    if method == 1:
        up, down = tirx.And(one <= height, other > height), tirx.And(one > height, other <= height)
        return tirx.Or(up, down)
    touches = tirx.EQ(height - one, tirx.FloatImm("float32", 0.0))
    passes = (height - one) * (height - other) < tirx.FloatImm("float32", 0.0)
    return tirx.Or(touches, passes) if method == 2 else tirx.Or(passes, touches)


KERNEL = TunedKernel(
    name="pnpoly:points={0.points},vertices={0.vertices}".format(Sizes()),
    parameters=PARAMETERS,
    build=build,
    launch=launch,
    inexpressible=inexpressible,
    accumulators=accumulators,
)
