"""Two kernels whose threads loop over their results: dedispersion of AMBER, and Kernel Tuner's point in polygon.

Sizes and parameters: AutoTuningAssociation/benchmark_hub, ``kernels/dedisp_milo`` and ``kernels/pnpoly`` (MIT).

Dedispersion of radio-telescope samples: for every dispersion measure, the kernel sums the samples of all channels; each
channel is read with a delay that grows with the measure. It has 25,000 samples, 2,048 measures, 1,536 channels, input
in bytes, and delays of at most 650 samples. A thread computes ``tile_size_x`` samples of ``tile_size_y`` measures, one
after the other. With a stride of 0 they are neighbours; with 1 they are one block of threads apart. Nothing is staged
and one sum is live at a time. ``loop_unroll_factor_channel`` is 0 in all rows: the compiler chooses.

Point in polygon: the crossing-number kernel, 20 million points against 600 vertices. A thread tests ``tile_size``
points, one block of threads apart, against all edges: it keeps their coordinates and counters in registers, computes
the slope of an edge once, and unrolls the loop over its points. ``between_method`` is the comparison that says whether
an edge passes a point's height: two comparisons that differ (0), the same as conjunctions (1), or a product of
differences, tested for zero before (2) or after (3) its sign. ``use_method`` is what a crossing does: it flips a flag
under a condition (0), adds the condition to a counter (1), or adds one under a condition (2). Constant memory is not
expressed: the polygon is a parameter in global memory, which every thread reads at one address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdmpp.data.importers.kernel_tuner.template import LaunchShape, Parameters, PrimFunc, TunedKernel

#: Difference of two neighbouring dispersion measures, in the unit of the delays' factor.
STEP = 0.02


@dataclass(frozen=True)
class DedispersionSizes:
    """Extents of the dedispersion problem."""

    samples: int = 25_000
    measures: int = 2_048
    channels: int = 1_536
    longest_delay: int = 650


@dataclass(frozen=True)
class PolygonSizes:
    """Extents of the point-in-polygon problem."""

    points: int = 20_000_000
    vertices: int = 600


_DEDISPERSION, _POLYGON = DedispersionSizes(), PolygonSizes()


def _dedispersion_problem(parameters: Parameters) -> str:
    """Return why a configuration cannot be expressed; "" if it can."""
    if parameters["block_size_z"] != 1:
        return "block_size_z is not 1"
    factor = parameters["loop_unroll_factor_channel"]
    divides = factor == 0 or _DEDISPERSION.channels % factor == 0
    return "" if divides else "loop_unroll_factor_channel does not divide channels"


def dedispersion_launch(parameters: Parameters, sizes: DedispersionSizes = _DEDISPERSION) -> LaunchShape:
    """Return blocks, threads and shared bytes from the parameters alone."""
    block = parameters["block_size_x"], parameters["block_size_y"]
    tile = parameters["tile_size_x"], parameters["tile_size_y"]
    grid = (-(-sizes.samples // (block[0] * tile[0])), -(-sizes.measures // (block[1] * tile[1])), 1)
    return LaunchShape(grid, (*block, 1), 0)


def dedispersion_program(parameters: Parameters, sizes: DedispersionSizes = _DEDISPERSION) -> PrimFunc:
    """Return the scheduled program of a configuration."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as ir

    block_x, block_y = parameters["block_size_x"], parameters["block_size_y"]
    tile_x, tile_y = parameters["tile_size_x"], parameters["tile_size_y"]
    grid = dedispersion_launch(parameters, sizes).grid
    unroll = parameters["loop_unroll_factor_channel"]

    def index(block: Any, thread: Any, item: Any, axis: str) -> Any:
        size, tile = parameters[f"block_size_{axis}"], parameters[f"tile_size_{axis}"]
        place = thread + item * size if parameters[f"tile_stride_{axis}"] else thread * tile + item
        return block * (size * tile) + place

    with IRBuilder() as builder, ir.prim_func():
        ir.func_name("main")
        samples = ir.arg("samples", ir.buffer((sizes.channels, sizes.samples + sizes.longest_delay), "uint8"))
        factors = ir.arg("factors", ir.buffer((sizes.channels,), "float32"))
        output = ir.arg("output", ir.buffer((sizes.measures, sizes.samples), "float32"))
        with (
            ir.thread_binding(grid[1], "blockIdx.y") as block_of_measures,
            ir.thread_binding(grid[0], "blockIdx.x") as block_of_samples,
            ir.thread_binding(block_y, "threadIdx.y") as thread_y,
            ir.thread_binding(block_x, "threadIdx.x") as thread_x,
        ):
            total = ir.alloc_buffer((1,), "float32", scope="local")
            delay = ir.alloc_buffer((1,), "int32", scope="local")
            with ir.serial(tile_x) as item_x:
                sample = index(block_of_samples, thread_x, item_x, "x")
                with ir.If(sample < sizes.samples), ir.Then(), ir.serial(tile_y) as item_y:
                    measure = index(block_of_measures, thread_y, item_y, "y")
                    with ir.If(measure < sizes.measures), ir.Then():
                        ir.buffer_store(total, ir.float32(0), [0])
                        annotations = {"pragma_unroll_explicit": 0, "pragma_auto_unroll_max_step": unroll}
                        with ir.serial(sizes.channels, annotations=annotations if unroll else None) as channel:
                            shift = ir.Cast("float32", measure) * ir.float32(STEP) * factors[channel]
                            ir.buffer_store(delay, ir.Cast("int32", shift), [0])
                            value = ir.Cast("float32", samples[channel, sample + delay[0]])
                            ir.buffer_store(total, total[0] + value, [0])
                        ir.buffer_store(output, total[0], [measure, sample])
    return builder.get()


def _pnpoly_problem(parameters: Parameters) -> str:
    """Return why a configuration cannot be expressed; "" if it can."""
    for name, values in (("between_method", range(4)), ("use_method", range(3))):
        if parameters[name] not in values:
            return f"{name} is unknown"
    return ""


def pnpoly_launch(parameters: Parameters, sizes: PolygonSizes = _POLYGON) -> LaunchShape:
    """Return blocks, threads and shared bytes from the parameters alone."""
    block = parameters["block_size_x"]
    return LaunchShape((-(-sizes.points // (block * parameters["tile_size"])), 1, 1), (block, 1, 1), 0)


def pnpoly_program(parameters: Parameters, sizes: PolygonSizes = _POLYGON) -> PrimFunc:
    """Return the scheduled program of a configuration."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as ir

    block, tile = parameters["block_size_x"], parameters["tile_size"]
    grid, method = pnpoly_launch(parameters, sizes).grid[0], parameters["use_method"]

    with IRBuilder() as builder, ir.prim_func():
        ir.func_name("main")
        points = ir.arg("points", ir.buffer((sizes.points, 2), "float32"))
        vertices = ir.arg("vertices", ir.buffer((sizes.vertices, 2), "float32"))
        inside = ir.arg("inside", ir.buffer((sizes.points,), "int32"))
        with ir.thread_binding(grid, "blockIdx.x") as block_index, ir.thread_binding(block, "threadIdx.x") as thread:
            first = block_index * (block * tile) + thread
            sums = ir.alloc_buffer((tile, 2), "float32", scope="local")
            count = ir.alloc_buffer((tile,), "int32", scope="local")
            slope = ir.alloc_buffer((1,), "float32", scope="local")
            crosses = ir.alloc_buffer((1,), "bool", scope="local")
            with ir.unroll(tile) as item:
                ir.buffer_store(count, 0, [item])
                with ir.If(first + item * block < sizes.points), ir.Then(), ir.vectorized(2) as axis:
                    ir.buffer_store(sums, points[first + item * block, axis], [item, axis])
            with ir.serial(sizes.vertices) as j:
                before = (j + sizes.vertices - 1) % sizes.vertices
                x, y, y_before = vertices[j, 0], vertices[j, 1], vertices[before, 1]
                ir.buffer_store(slope, (vertices[before, 0] - x) / (y_before - y), [0])
                with ir.unroll(tile) as item:
                    left = sums[item, 0] < slope[0] * (sums[item, 1] - y) + x
                    between = _between(parameters["between_method"], sums[item, 1], y, y_before)
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


def _between(method: int, height: Any, first: Any, second: Any) -> Any:
    """Whether an edge from one height to the other passes a height."""
    from tvm import tirx

    if method == 0:
        return tirx.NE(tirx.Cast("int32", first > height), tirx.Cast("int32", second > height))
    if method == 1:
        up, down = tirx.And(first <= height, second > height), tirx.And(first > height, second <= height)
        return tirx.Or(up, down)
    touches = tirx.EQ(height - first, tirx.FloatImm("float32", 0.0))
    passes = (height - first) * (height - second) < tirx.FloatImm("float32", 0.0)
    return tirx.Or(touches, passes) if method == 2 else tirx.Or(passes, touches)


DEDISPERSION = TunedKernel(
    name=f"dedispersion:samples={_DEDISPERSION.samples},measures={_DEDISPERSION.measures},channels={_DEDISPERSION.channels}",
    parameters=(
        *("block_size_x", "block_size_y", "block_size_z", "tile_size_x", "tile_size_y"),
        *("tile_stride_x", "tile_stride_y", "loop_unroll_factor_channel"),
    ),
    build=dedispersion_program,
    inexpressible=_dedispersion_problem,
)
PNPOLY = TunedKernel(
    name=f"pnpoly:points={_POLYGON.points},vertices={_POLYGON.vertices}",
    parameters=("between_method", "block_size_x", "tile_size", "use_method"),
    build=pnpoly_program,
    inexpressible=_pnpoly_problem,
)
