"""Contract of the TensorIR templates of Kernel Tuner's kernels.

A kernel of the public tables has a fixed problem and a set of tuning parameters. Its template builds the same schedule
as a TensorIR program, so that each measured configuration becomes a scheduled program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

#: Values of a kernel's tuning parameters by name.
Parameters: TypeAlias = Mapping[str, int]
#: A ``tvm.tirx.PrimFunc``.
PrimFunc: TypeAlias = Any


@dataclass(frozen=True)
class Launch:
    """Launch of a configuration, computed from its parameters alone.

    Attributes
    ----------
    grid, block : tuple of int
        Blocks, and threads of a block, along x, y and z.
    shared_bytes : int
        Shared memory of a block in bytes.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return prod(self.grid)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return prod(self.block)

    @property
    def work_items(self) -> int:
        """Threads of the whole launch."""
        return self.blocks * self.threads


def nothing_inexpressible(parameters: Parameters) -> str:
    """Accept every configuration."""
    return ""


def as_given(parameters: Parameters) -> Parameters:
    """Return a configuration unchanged."""
    return parameters


@dataclass(frozen=True)
class TunedKernel:
    """A kernel with its tuning parameters.

    Attributes
    ----------
    name : str
        Kernel and problem size; the task of the imported programs.
    parameters : tuple of str
        Columns of the table that :attr:`build`, :attr:`launch` and :attr:`inexpressible` read.
    build : callable
        Builds the scheduled ``tvm.tirx.PrimFunc`` of a configuration: thread bindings, storage scopes, vector widths,
        unroll annotations. Its lowered form does the configured work.
    launch : callable
        Computes the launch of a configuration.
    inexpressible : callable
        Returns "" for a configuration that :attr:`build` can express, else a short reason by which rows are counted.
    accumulators : callable, optional
        Computes the registers (32-bit values) that hold a thread's results, where the kernel states them.
    canonical : callable
        Sets parameters that have no effect in a configuration to one value: configurations that become equal are one
        program, which is built once.
    """

    name: str
    parameters: tuple[str, ...]
    build: Callable[[Parameters], PrimFunc]
    launch: Callable[[Parameters], Launch]
    inexpressible: Callable[[Parameters], str] = nothing_inexpressible
    accumulators: Callable[[Parameters], int] | None = None
    canonical: Callable[[Parameters], Parameters] = as_given
