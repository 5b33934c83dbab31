"""Kernel Tuner's 2D convolution of an image, brute-forced in two versions: one scheduled program per configuration.

output[y, x] = sum over i, j of input[y + i, x + j] * filter[i, j] in float32. The input has a border of filter - 1.

==========================  =============================================================================
parameter                   in the program
==========================  =============================================================================
block_size_x, block_size_y  extents of ``threadIdx.x`` and ``threadIdx.y``
tile_size_x, tile_size_y    sums of a thread along x and y, a block's width apart from each other
use_shmem                   1: the block's input with its border is staged in shared memory
use_padding                 1: columns of padding in the shared array, where its rows would conflict in the banks
read_only                   1: the input is read through the read-only cache (``__ldg``)
use_cmem                    1. TensorIR has no constant memory: the filter is a parameter in global memory
filter_height, filter_width odd
==========================  =============================================================================

The older version of the kernel has no ``use_shmem`` and always stages; the programs are the same.

Sources of these facts: Kernel Tuner, ``examples/cuda/convolution.cu``, and the tuning scripts of benchmark_hub. The
newer kernel is not published. Where its tiles do not divide the image and nothing is staged, each sum is guarded.
"""

from __future__ import annotations

from typing import Any

from cdmpp.data.importers.kernel_tuner.template import Builder, LaunchShape, Parameters, PrimFunc, TunedKernel

#: Rows and columns of the image in the public tables.
SIZE = 4096
#: Memory banks that the kernel's padding assumes.
BANKS = 32
PARAMETERS = (
    *("block_size_x", "block_size_y", "tile_size_x", "tile_size_y"),
    *("use_shmem", "use_padding", "read_only", "use_cmem", "filter_height", "filter_width"),
)
_SWITCHES = ("use_shmem", "use_padding", "read_only", "use_cmem")


def padding_columns(parameters: Parameters) -> int:
    """Compute the columns of padding in the shared array.

    The kernel pads where a row of threads spans a part of the banks, so that the next row starts at another bank.
    """
    p = parameters
    if not (p["use_shmem"] and p["use_padding"]) or p["block_size_x"] % BANKS == 0:
        return 0
    return -(_staged(p, "x") - p["block_size_x"]) % BANKS


def inexpressible(parameters: Parameters) -> str:
    """Return why a configuration is not one of the kernel; "" if it is one."""
    p = parameters
    if any(p[name] not in (0, 1) for name in _SWITCHES):
        return "switch other than 0 and 1"
    if any(p[name] < 1 for name in PARAMETERS if name not in _SWITCHES):
        return "size below 1"
    if not p["use_cmem"]:
        return "filter outside of constant memory"
    if p["filter_height"] % 2 == 0 or p["filter_width"] % 2 == 0:
        return "filter of even size"
    return ""


def launch(parameters: Parameters, size: int = SIZE) -> LaunchShape:
    """Compute blocks, threads and shared memory of a configuration."""
    p = parameters
    grid = (-(-size // _tile(p, "x")), -(-size // _tile(p, "y")), 1)
    shared = _staged(p, "y") * (_staged(p, "x") + padding_columns(p)) if p["use_shmem"] else 0
    return LaunchShape(grid, (p["block_size_x"], p["block_size_y"], 1), 4 * shared)


def canonical(parameters: Parameters) -> Parameters:
    """Set ``use_padding`` to 0 where it adds no columns."""
    return {**parameters, "use_padding": int(padding_columns(parameters) > 0)}


def build(parameters: Parameters, size: int = SIZE) -> PrimFunc:
    """Build the program of a configuration for which :func:`inexpressible` returns "". ``size``: rows and columns of
    the output image; tests use small ones."""
    with Builder("convolution") as ir:
        _ConvolutionProgram(ir, parameters, size).write()
    return ir.function


def _tile(parameters: Parameters, axis: str) -> int:
    """Outputs of a block along x or y."""
    return parameters[f"block_size_{axis}"] * parameters[f"tile_size_{axis}"]


def _staged(parameters: Parameters, axis: str) -> int:
    """Inputs of a block along x or y."""
    return _tile(parameters, axis) + parameters["filter_width" if axis == "x" else "filter_height"] - 1


class _ConvolutionProgram:
    """The statements of one configuration."""

    def __init__(self, ir: Builder, parameters: Parameters, size: int) -> None:
        p = parameters
        self.ir, self.p, self.size = ir, p, size
        self.tile_y, self.tile_x = _tile(p, "y"), _tile(p, "x")
        self.whole = size % self.tile_y == 0 and size % self.tile_x == 0
        self.output = ir.parameter("output", (size, size))
        self.input = ir.parameter("input", (size + p["filter_height"] - 1, size + p["filter_width"] - 1))
        self.filter = ir.parameter("filter", (p["filter_height"], p["filter_width"]))
        self.sums = ir.allocate("sums", (p["tile_size_y"], p["tile_size_x"]), "local")
        if p["use_shmem"]:
            shape = (_staged(p, "y"), _staged(p, "x") + padding_columns(p))
            self.shared = ir.allocate("input_shared", shape, "shared")

    def write(self) -> None:
        """Write the program."""
        shape = launch(self.p, self.size)
        threads = (
            *(("bx", "blockIdx.x", shape.grid[0]), ("by", "blockIdx.y", shape.grid[1])),
            *(("tx", "threadIdx.x", shape.block[0]), ("ty", "threadIdx.y", shape.block[1])),
        )
        with self.ir.loops(*threads) as (bx, by, tx, ty):
            if self.p["use_shmem"]:
                self._stage(bx, by, tx, ty)
            with self._tile_loops() as (yi, xi), self.ir.block("sums_init", *self._tile_axes(yi, xi)) as at:
                self.ir.store(self.sums, at, self.ir.zero())
            self._accumulate(bx, by, tx, ty)
            self._write_back(bx, by, tx, ty)

    def _tile_loops(self) -> Any:
        return self.ir.loops(("yi", "unroll", self.p["tile_size_y"]), ("xi", "unroll", self.p["tile_size_x"]))

    def _tile_axes(self, yi: Any, xi: Any) -> tuple[Any, Any]:
        return ("S", self.p["tile_size_y"], yi), ("S", self.p["tile_size_x"], xi)

    def _load(self, y: Any, x: Any) -> Any:
        return self.ir.read_only(self.input, (y, x)) if self.p["read_only"] else self.input[y, x]

    def _stage(self, bx: Any, by: Any, tx: Any, ty: Any) -> None:
        """Copy the block's input and its border to shared memory."""
        p = self.p
        height, width = _staged(p, "y"), _staged(p, "x")
        loops = (("i", "unroll", -(-height // p["block_size_y"])), ("j", "unroll", -(-width // p["block_size_x"])))
        with self.ir.loops(*loops) as (i, j):
            row, column = i * p["block_size_y"] + ty, j * p["block_size_x"] + tx
            inside = []
            if height % p["block_size_y"]:
                inside.append(row < height)
            if width % p["block_size_x"]:
                inside.append(column < width)
            if not self.whole:
                rows, columns = self.input.shape
                inside += [by * self.tile_y + row < rows, bx * self.tile_x + column < columns]
            axes = (*self._group_axes(bx, by), ("S", height, row), ("S", width, column))
            with self.ir.block("input_shared", *axes, where=self.ir.all(*inside)) as (v_by, v_bx, y, x):
                if padding_columns(p):
                    self.ir.align_rows(BANKS, p["block_size_x"] % BANKS)
                value = self._load(v_by * self.tile_y + y, v_bx * self.tile_x + x)
                self.ir.store(self.shared, (y, x), value)

    def _group_axes(self, bx: Any, by: Any) -> tuple[Any, Any]:
        grid = launch(self.p, self.size).grid
        return ("S", grid[1], by), ("S", grid[0], bx)

    def _accumulate(self, bx: Any, by: Any, tx: Any, ty: Any) -> None:
        p = self.p
        with (
            self.ir.loops(("i", "unroll", p["filter_height"]), ("j", "unroll", p["filter_width"])) as (i, j),
            self._tile_loops() as (yi, xi),
        ):
            thread = (("S", p["block_size_y"], ty), ("S", p["block_size_x"], tx))
            window = (("R", p["filter_height"], i), ("R", p["filter_width"], j))
            axes = (*thread, *self._tile_axes(yi, xi), *window)
            if p["use_shmem"]:
                with self.ir.block("sums_update", *axes) as (v_ty, v_tx, v_y, v_x, v_i, v_j):
                    y, x = v_ty + v_y * p["block_size_y"] + v_i, v_tx + v_x * p["block_size_x"] + v_j
                    self._add(v_y, v_x, self.shared[y, x], v_i, v_j)
                return
            with self.ir.block(
                "sums_update", *self._group_axes(bx, by), *axes, where=self._inside(bx, by, tx, ty, yi, xi)
            ) as (v_by, v_bx, v_ty, v_tx, v_y, v_x, v_i, v_j):
                y = v_by * self.tile_y + v_ty + v_y * p["block_size_y"] + v_i
                x = v_bx * self.tile_x + v_tx + v_x * p["block_size_x"] + v_j
                self._add(v_y, v_x, self._load(y, x), v_i, v_j)

    def _add(self, yi: Any, xi: Any, value: Any, i: Any, j: Any) -> None:
        self.ir.store(self.sums, (yi, xi), self.sums[yi, xi] + value * self.filter[i, j])

    def _inside(self, bx: Any, by: Any, tx: Any, ty: Any, yi: Any, xi: Any) -> Any:
        """Condition that an output is one of the image; None if all are."""
        if self.whole:
            return None
        p = self.p
        return self.ir.all(
            by * self.tile_y + (ty + yi * p["block_size_y"]) < self.size,
            bx * self.tile_x + (tx + xi * p["block_size_x"]) < self.size,
        )

    def _write_back(self, bx: Any, by: Any, tx: Any, ty: Any) -> None:
        p = self.p
        with self._tile_loops() as (yi, xi):
            axes = (
                ("S", self.size, by * self.tile_y + (ty + yi * p["block_size_y"])),
                ("S", self.size, bx * self.tile_x + (tx + xi * p["block_size_x"])),
                *self._tile_axes(yi, xi),
            )
            with self.ir.block("output", *axes, where=self._inside(bx, by, tx, ty, yi, xi)) as (y, x, v_y, v_x):
                self.ir.store(self.output, (y, x), self.sums[v_y, v_x])


KERNEL = TunedKernel(
    name=f"convolution:h={SIZE},w={SIZE},kh=15,kw=15",
    parameters=PARAMETERS,
    build=build,
    inexpressible=inexpressible,
    canonical=canonical,
)
