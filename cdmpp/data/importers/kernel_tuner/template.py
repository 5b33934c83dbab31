"""Templates of Kernel Tuner's kernels: their contract, and the builder of their programs.

A kernel of the public tables has a fixed problem and a set of tuning parameters. Its template builds the same schedule
as a TensorIR program, so that each measured configuration becomes a scheduled program.

Programs are built with TVM's IR builder. It is faster than schedule primitives (milliseconds a program) and gives the
loop nest as written, so that the program is the configuration's by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

#: Values of a kernel's tuning parameters by name.
Parameters: TypeAlias = Mapping[str, int]
#: A ``tvm.tirx.PrimFunc``.
PrimFunc: TypeAlias = Any
#: (name, kind, extent) of a loop; kind is ``serial``, ``unroll``, ``vectorized`` or a thread tag.
Loop = tuple[str, str, int]
#: (kind, extent, value) of a block's iteration variable; kind is "S" (spatial) or "R" (reduction).
Axis = tuple[str, int, Any]


@dataclass(frozen=True)
class LaunchShape:
    """Launch of a configuration, computed from its parameters alone."""

    grid: tuple[int, int, int]  # blocks along x, y and z
    block: tuple[int, int, int]  # threads of a block along x, y and z
    shared_bytes: int  # of a block


@dataclass(frozen=True)
class TunedKernel:
    """A kernel with its tuning parameters."""

    name: str  # kernel and problem size; the task of the imported programs
    parameters: tuple[str, ...]  # columns of the table that :attr:`build` and :attr:`inexpressible` read
    # Builds the scheduled ``tvm.tirx.PrimFunc`` of a configuration: thread bindings, storage scopes, vector widths,
    # unroll annotations. Its lowered form does the configured work.
    build: Callable[[Parameters], PrimFunc]
    # Returns "" for a configuration that :attr:`build` can express, else a short reason by which rows are counted.
    inexpressible: Callable[[Parameters], str]
    # Sets parameters that have no effect in a configuration to one value: configurations that become equal are one
    # program, which is built once.
    canonical: Callable[[Parameters], Parameters] = lambda parameters: parameters


class Builder:
    """TVM's IR builder with names.

    Use as a context manager; :attr:`function` holds the program afterwards.
    """

    function: PrimFunc

    def __init__(self, name: str) -> None:
        _tvm()
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as tirx

        self._t, self._builder, self._name, self._stack = tirx, IRBuilder(), name, ExitStack()

    def __enter__(self) -> Builder:
        self._stack.enter_context(self._builder)
        self._stack.enter_context(self._t.prim_func(s_tir=True))
        self._t.func_name(self._name)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        if error[0] is None:
            self.function = self._builder.get()

    def parameter(self, name: str, shape: Sequence[int]) -> Any:
        """Declare a float32 tensor in global memory as the next parameter."""
        return self._t.arg(name, self._t.buffer(tuple(shape), "float32", layout=None, buffer_name=name))

    def scalar(self, name: str) -> Any:
        """Declare a float32 number as the next parameter."""
        return self._t.arg(name, self._t.float32())

    def allocate(self, name: str, shape: Sequence[int], scope: str) -> Any:
        """Allocate a float32 buffer of a block (``shared``) or a thread (``local``)."""
        buffer = self._t.sblock_alloc_buffer(tuple(shape), "float32", scope=scope, layout=None)
        return self._builder.name(name, buffer)

    @contextmanager
    def loops(self, *loops: Loop) -> Iterator[list[Any]]:
        """Open loops, outermost first; yields their variables."""
        with ExitStack() as stack:
            variables = []
            for name, kind, extent in loops:
                frame = self._t.thread_binding(extent, thread=kind) if "." in kind else getattr(self._t, kind)(extent)
                variables.append(self._builder.name(name, stack.enter_context(frame)))
            yield variables

    @contextmanager
    def block(self, name: str, *axes: Axis, where: Any = None) -> Iterator[list[Any]]:
        """Open a block, which runs where the condition holds; yields its iteration variables."""
        with self._t.sblock(name):
            variables: list[Any] = []
            for kind, extent, value in axes:
                axis = self._t.axis.reduce if kind == "R" else self._t.axis.spatial
                variables.append(self._builder.name(f"v{len(variables)}", axis(extent, value)))
            if where is not None:
                self._t.where(where)
            yield variables

    def store(self, buffer: Any, indices: Sequence[Any], value: Any) -> None:
        """Store one element."""
        self._t.buffer_store(buffer, value, list(indices))

    def align_rows(self, factor: int, offset: int) -> None:
        """Pad rows of the present block's output to a multiple of ``factor`` elements plus ``offset``.

        TVM drops columns that nothing accesses, so padding has to be stated.
        """
        self._t.sblock_attr({"buffer_dim_align": [[0, 0, factor, offset]]})

    def zero(self) -> Any:
        """Return the float32 constant 0."""
        return self._t.float32(0)

    def read_only(self, buffer: Any, indices: Sequence[Any]) -> Any:
        """Load one element through the read-only cache: CUDA's ``__ldg``."""
        return self._t.call_extern("float32", "__ldg", self._t.address_of(buffer[tuple(indices)]))

    def all(self, *conditions: Any) -> Any:
        """Join conditions; None if there are none."""
        joined = None
        for condition in conditions:
            joined = condition if joined is None else self._t.And(joined, condition)
        return joined


def _tvm() -> Any:
    """The package TVM. The service imports this module, but neither TVM nor what reads its programs."""
    from cdmpp.programs.frontends.tir import import_tvm

    return import_tvm()
