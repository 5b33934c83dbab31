"""Named loops, buffers and blocks of a TensorIR program under construction.

The templates build programs with TVM's IR builder. It is faster than schedule primitives (milliseconds a program) and
gives the loop nest as written, so that the program is the configuration's by construction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from cdmpp.data.importers.kernel_tuner.template import PrimFunc

#: (name, kind, extent) of a loop; kind is ``serial``, ``unroll``, ``vectorized`` or a thread tag.
Loop = tuple[str, str, int]
#: (kind, extent, value) of a block's iteration variable; kind is "S" (spatial) or "R" (reduction).
Axis = tuple[str, int, Any]


def thread_loop(extent: int, tag: str, *, bound: bool) -> Any:
    """Open a loop over a hardware thread such as ``threadIdx.x``; not ``bound``, a serial loop, which a CPU can run."""
    from tvm.script.ir_builder import tirx

    return tirx.thread_binding(extent, thread=tag) if bound else tirx.serial(extent)


class Builder:
    """TVM's IR builder with names.

    Use as a context manager; :attr:`function` holds the program afterwards.
    """

    function: PrimFunc

    def __init__(self, name: str) -> None:
        from cdmpp.programs.frontends.tir import import_tvm

        import_tvm()
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
