"""Dedispersion of radio-telescope samples: the kernel of AMBER as Kernel Tuner's benchmark measures it.

For every dispersion measure, the kernel sums the samples of all channels; each channel is read with a delay that
grows with the measure. Sizes and parameters: AutoTuningAssociation/benchmark_hub, ``kernels/dedisp_milo``
(MIT): 25,000 samples, 2,048 measures, 1,536 channels, input in bytes, delays of at most 650 samples.

A thread computes ``tile_size_x`` samples of ``tile_size_y`` measures, one after the other. With a stride of 0 they
are neighbours; with 1 they are one block of threads apart. Nothing is staged and one sum is live at a time.
``loop_unroll_factor_channel`` is 0 in all rows: the compiler chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from cdmpp.data.importers.kernel_tuner.blocks import thread_loop
from cdmpp.data.importers.kernel_tuner.template import Launch, Parameters, PrimFunc, TunedKernel

PARAMETERS = (
    "block_size_x",
    "block_size_y",
    "block_size_z",
    "tile_size_x",
    "tile_size_y",
    "tile_stride_x",
    "tile_stride_y",
    "loop_unroll_factor_channel",
)
#: Difference of two neighbouring dispersion measures, in the unit of the delays' factor.
STEP = 0.02


@dataclass(frozen=True)
class Sizes:
    """Extents of the problem."""

    samples: int = 25_000
    measures: int = 2_048
    channels: int = 1_536
    longest_delay: int = 650


def inexpressible(parameters: Parameters) -> str:
    """Why a configuration cannot be expressed; "" where it can."""
    if parameters["block_size_z"] != 1:
        return "block_size_z is not 1"
    factor = parameters["loop_unroll_factor_channel"]
    return "" if factor == 0 or Sizes.channels % factor == 0 else "loop_unroll_factor_channel does not divide channels"


def launch(parameters: Parameters) -> Launch:
    """Blocks, threads and shared bytes from the parameters alone."""
    return _launch(parameters, Sizes())


def _launch(parameters: Parameters, sizes: Sizes) -> Launch:
    block = parameters["block_size_x"], parameters["block_size_y"]
    tile = parameters["tile_size_x"], parameters["tile_size_y"]
    grid = (-(-sizes.samples // (block[0] * tile[0])), -(-sizes.measures // (block[1] * tile[1])), 1)
    return Launch(grid, (*block, 1), 0)


def accumulators(parameters: Parameters) -> int:
    """Sums that a thread holds at a time: one, for it finishes one before the next."""
    return 1


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

    block_x, block_y = parameters["block_size_x"], parameters["block_size_y"]
    tile_x, tile_y = parameters["tile_size_x"], parameters["tile_size_y"]
    grid = _launch(parameters, sizes).grid
    unroll = parameters["loop_unroll_factor_channel"]

    threads = partial(thread_loop, bound=bound)

    def index(block: Any, thread: Any, item: Any, axis: str) -> Any:
        size, tile = parameters[f"block_size_{axis}"], parameters[f"tile_size_{axis}"]
        own = thread + item * size if parameters[f"tile_stride_{axis}"] else thread * tile + item
        return block * (size * tile) + own

    with IRBuilder() as builder, ir.prim_func():
        ir.func_name("main")
        samples = ir.arg("samples", ir.buffer((sizes.channels, sizes.samples + sizes.longest_delay), "uint8"))
        factors = ir.arg("factors", ir.buffer((sizes.channels,), "float32"))
        output = ir.arg("output", ir.buffer((sizes.measures, sizes.samples), "float32"))
        with (
            threads(grid[1], "blockIdx.y") as block_of_measures,
            threads(grid[0], "blockIdx.x") as block_of_samples,
            threads(block_y, "threadIdx.y") as thread_y,
            threads(block_x, "threadIdx.x") as thread_x,
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


KERNEL = TunedKernel(
    name="dedispersion:samples={0.samples},measures={0.measures},channels={0.channels}".format(Sizes()),
    parameters=PARAMETERS,
    build=build,
    launch=launch,
    inexpressible=inexpressible,
    accumulators=accumulators,
)
