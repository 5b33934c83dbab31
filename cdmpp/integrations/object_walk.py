"""Compact ASTs of TVM's objects.

The walk is that of :mod:`cdmpp.features.walk`. Loops, the values of blocks' variables and index arithmetic, which are
most of a scheduled program, are read directly; all else is read as nodes (:mod:`cdmpp.integrations.object_nodes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.features.affine import AffineRange
from cdmpp.features.ast import CompactAST
from cdmpp.features.expressions import INTEGER, MAX_VALUE
from cdmpp.features.walk import LOOP_KINDS, MAX_NESTING, UNROLLS, Walker
from cdmpp.integrations.needed import tvm
from cdmpp.integrations.object_nodes import ObjectNodes, elements, type_name
from cdmpp.programs.tvm_json import HINT


def build_asts(functions: Sequence[Any]) -> list[CompactAST | InvalidProgramError]:
    """Compact ASTs of PrimFuncs, each as :func:`cdmpp.features.walk.build_ast` gives it for the function's JSON.

    Parameters
    ----------
    functions : sequence of tvm.tirx.PrimFunc

    Returns
    -------
    list, in the order of ``functions``
        An error in place of a program that cannot be encoded.
    """
    nodes = ObjectNodes()
    asts: list[CompactAST | InvalidProgramError] = []
    for function in functions:
        try:
            asts.append(_ObjectWalker(nodes).build(nodes.key(function)))
        except InvalidProgramError as error:
            asts.append(error)
    return asts


class _ObjectWalker(Walker):
    """One pass over the statements of a PrimFunc."""

    nodes: ObjectNodes

    def __init__(self, nodes: ObjectNodes) -> None:
        super().__init__(nodes, {})

    def statement(self, index: int) -> None:
        """Walk one statement."""
        value = self.nodes.value(index)
        handler = _STATEMENTS.get(type(value))
        if handler is None:
            super().statement(index)
            return
        self.spend(1)
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise InvalidProgramError(f"statements nest deeper than {MAX_NESTING}", hint=HINT)
        handler(self, value)
        self._nesting -= 1

    def for_object(self, value: Any) -> None:
        """For, as :meth:`for_loop` reads it from nodes."""
        kind, key = LOOP_KINDS[value.kind], self.nodes.key
        if kind == "thread" or value.step is not None:
            self.for_loop(self.nodes[key(value)]["data"])
            return
        unroll, annotations = 0, self.array(key(value.annotations))
        for name, number in zip(annotations[::2], annotations[1::2], strict=True):
            if self.data(name) in UNROLLS:
                unroll = int(self.expression(number).high)
        extent, start, var = self._of(value.extent).high, self._of(value.min).low, value.loop_var
        self.loop(key(var), str(var.name), extent, kind, key(value.body), unroll, start)

    def realize_object(self, value: Any) -> None:
        """SBlockRealize, as :meth:`block_realize` reads it from nodes."""
        key, block = self.nodes.key, value.block
        bound = [
            (key(iter_var.var), self._of(part), iter_var.iter_type)
            for iter_var, part in zip(elements(block.iter_vars), elements(value.iter_values), strict=True)
        ]
        self.block(self.nodes[key(block)]["data"], bound, key(value.predicate))

    def expression(self, index: int) -> AffineRange:
        """Value of an index, extent or bound."""
        return self._of(self.nodes.value(index)) if type(index) is int else super().expression(index)

    def _of(self, value: Any) -> AffineRange:
        """:meth:`expression` of an object."""
        kind = type(value)
        if kind is tvm.tirx.IntImm:
            self.spend(1)
            number = value.value
            if not -MAX_VALUE < number < MAX_VALUE:
                raise InvalidProgramError("an integer is not a whole number, or too large", hint=HINT)
            return AffineRange(number, number)
        operation = _OPERATIONS[kind]
        if operation:
            self.spend(1)
            return self._checked(self._integer(operation, self._of(value.a), self._of(value.b)))
        known = self.env.get(value.__chandle__())
        return super().expression(self.nodes.key(value)) if known is None else known


class _Operations(dict[type, str]):
    """Name of the index arithmetic of a class; "" for every other class."""

    def __missing__(self, kind: type) -> str:
        name = type_name(kind).rpartition(".")[2]
        self[kind] = name if name in INTEGER else ""
        return self[kind]


_OPERATIONS = _Operations()
_STATEMENTS: dict[type, Callable[[_ObjectWalker, Any], None]] = {
    tvm.tirx.For: _ObjectWalker.for_object,
    tvm.s_tir.SBlockRealize: _ObjectWalker.realize_object,
}
