"""Workloads of MetaSchedule, which databases keep as TVM JSON of any version, written as TVMScript.

The nodes of a module before tuning are few: a function, blocks, serial loops, stores and expressions. No byte of a
database reaches TVM's own JSON parser, which crashes on damaged text, and
:mod:`cdmpp.programs.frontends.tvmscript_check` checks the script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.tvm_json import MAX_BYTES

_INFIX = {
    **{"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%"},
    **{"LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!="},
}
_CALLED = {"And": "And", "Or": "Or", "Div": "Div", "Mod": "truncmod", "Min": "min", "Max": "max"}
#: Kind of a block's iterator (``IterVarType``).
_AXES = {"0": "spatial", "2": "reduce"}
#: Names of TVM before 0.27.
_FORMER = {"Block": "SBlock", "BlockRealize": "SBlockRealize", "BufferLoad": "TensorLoad"}


def tvmscript_of_json(text: str) -> str:
    """TVMScript of a module with one PrimFunc.

    Raises
    ------
    InvalidProgramError
        Not such a module, or with constructs that a workload before tuning does not have.
    """
    if len(text) > MAX_BYTES:
        raise InvalidProgramError(f"TVM JSON of {len(text) / 1e6:.0f} MB is too large", hint="at most 32 MB")
    try:
        document = json.loads(text)
        former = "root" in document
        printer = (_FormerPrinter if former else _Printer)(document["nodes"])
        return printer.module(int(document["root" if former else "root_index"]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidProgramError(
            f"the workload's TVM JSON cannot be read ({type(error).__name__}: {str(error)[:100]})",
            hint="a workload is a module before tuning, with serial loops and blocks",
        ) from None


class _Printer:
    """Writes nodes, which refer to each other by index, in the layout of TVM 0.27."""

    fields_key = "data"

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self._nodes = nodes
        self._names: dict[int, str] = {}

    # -- layout -------------------------------------------------------------------------------------------------------
    def _kind(self, index: int) -> str:
        return str(self._nodes[index]["type"]).rpartition(".")[2]

    def _text(self, index: int) -> str:
        return str(self._nodes[index]["data"])

    def _number(self, index: int) -> str:
        """Value of an IntImm or FloatImm."""
        value = self._value(index, "value")
        return self._text(value) if self._kind(index) == "IntImm" else str(value)

    def _dtype(self, index: int) -> str:
        """Element type of an immediate, a cast or a buffer."""
        kind = self._value(index, "ty")
        if self._kind(kind) == "BufferType":
            kind = self._value(kind, "dtype")
        return str(self._value(kind, "dtype"))

    def _shape(self, buffer: int, field: str = "shape") -> list[int]:
        return self._items(self._value(self._value(buffer, "ty"), field))

    def _parameters(self, function: int) -> list[int]:
        return self._items(self._value(function, "params"))

    def _mapping(self, index: int) -> dict[str, int]:
        items = self._items(index)
        return {self._text(key): value for key, value in zip(items[::2], items[1::2], strict=True)}

    def _value(self, index: int, name: str) -> Any:
        return self._nodes[index][self.fields_key][name]

    def _items(self, index: int) -> list[int]:
        return [int(i) for i in self._nodes[int(index)].get("data") or []]

    def _node(self, index: int, name: str) -> int:
        return int(self._value(index, name))

    def _children(self, index: int, name: str) -> list[int]:
        return self._items(self._node(index, name))

    # -- statements ---------------------------------------------------------------------------------------------------
    def module(self, root: int) -> str:
        """The script of a module."""
        if self._kind(root) == "IRModule":
            functions = self._children(root, "functions")[1::2]
            (root,) = [f for f in functions if self._kind(f) == "PrimFunc"]
        signature = ", ".join(f"{self._name(b)}: T.Buffer({self._buffer_type(b)})" for b in self._parameters(root))
        realize = self._node(root, "body")
        block = self._node(realize, "block")
        if self._children(block, "iter_vars"):
            raise ValueError("the function has no root block")
        lines = ['T.func_attr({"tirx.noalias": True})', *self._allocations(block)]
        lines += self._statement(self._node(block, "body"))
        return "\n".join(["@T.prim_func(s_tir=True)", f"def main({signature}):", *_indented(lines)])

    def _name(self, index: int) -> str:
        """A distinct identifier for a variable or buffer."""
        if index not in self._names:
            base = re.sub(r"\W", "_", self._text(self._node(index, "name")))
            base = base if re.match(r"[A-Za-z_]", base) and base != "T" else f"v_{base}"
            taken, number = set(self._names.values()), 0
            while (name := f"{base}_{number}" if number else base) in taken:
                number += 1
            self._names[index] = name
        return self._names[index]

    def _buffer_type(self, buffer: int) -> str:
        if self._shape(buffer, "strides"):
            raise ValueError("a buffer with strides")
        shape = "".join(f"{self._expression(i)}, " for i in self._shape(buffer))
        return f'({shape}), "{self._dtype(buffer)}"'

    def _allocations(self, block: int) -> Iterator[str]:
        if self._children(block, "match_buffers"):
            raise ValueError("a block with matched buffers")
        for buffer in self._children(block, "alloc_buffers"):
            yield f"{self._name(buffer)} = T.sblock_alloc_buffer({self._buffer_type(buffer)})"

    def _statement(self, index: int) -> Iterator[str]:
        kind = self._kind(index)
        if kind == "SeqStmt":
            for part in self._children(index, "seq"):
                yield from self._statement(part)
        elif kind == "For":
            if str(self._value(index, "kind")) != "0" or self._number(self._node(index, "min")) != "0":
                raise ValueError("a loop that is scheduled")
            extent = self._expression(self._node(index, "extent"))
            yield f"for {self._name(self._node(index, 'loop_var'))} in range({extent}):"
            yield from _indented(self._statement(self._node(index, "body")))
        elif kind == "SBlockRealize":
            block = self._node(index, "block")
            yield f"with T.sblock({json.dumps(self._text(self._node(block, 'name_hint')))}):"
            yield from _indented(self._block(index, block))
        elif kind == "BufferStore":
            yield f"{self._access(index, 'buffer')} = {self._expression(self._node(index, 'value'))}"
        else:
            raise ValueError(f"a {kind}")

    def _block(self, realize: int, block: int) -> Iterator[str]:
        values = self._children(realize, "iter_values")
        for iterator, value in zip(self._children(block, "iter_vars"), values, strict=True):
            axis = _AXES[str(self._value(iterator, "iter_type"))]
            extent = self._expression(self._node(self._node(iterator, "dom"), "extent"))
            yield f"{self._name(self._node(iterator, 'var'))} = T.axis.{axis}({extent}, {self._expression(value)})"
        predicate = self._expression(self._node(realize, "predicate"))
        if predicate != "T.bool(True)":
            yield f"T.where({predicate})"
        annotations = self._mapping(self._node(block, "annotations"))
        if annotations:
            yield f"T.sblock_attr({ {key: self._literal(value) for key, value in annotations.items()} })"
        yield from self._allocations(block)
        if self._node(block, "init"):
            yield "with T.init():"
            yield from _indented(self._statement(self._node(block, "init")))
        yield from self._statement(self._node(block, "body"))

    def _literal(self, index: int) -> Any:
        kind = self._kind(index)
        if kind == "Array":
            return [self._literal(i) for i in self._items(index)]
        if kind == "String":
            return self._text(index)
        return int(self._number(index)) if kind == "IntImm" else self._nodes[index]["data"]

    # -- expressions --------------------------------------------------------------------------------------------------
    def _access(self, index: int, tensor: str) -> str:
        indices = ", ".join(map(self._expression, self._children(index, "indices")))
        return f"{self._name(self._node(index, tensor))}[{indices or '()'}]"

    def _expression(self, index: int) -> str:
        kind = self._kind(index)
        if kind in ("Var", "SizeVar"):
            return self._name(index)
        if kind in ("IntImm", "FloatImm"):
            return self._immediate(self._dtype(index), self._number(index))
        if kind == "TensorLoad":
            return self._access(index, "buffer" if "buffer" in self._nodes[index][self.fields_key] else "source")
        if kind in _INFIX or kind in _CALLED:
            a, b = self._expression(self._node(index, "a")), self._expression(self._node(index, "b"))
            return f"({a} {_INFIX[kind]} {b})" if kind in _INFIX else f"T.{_CALLED[kind]}({a}, {b})"
        if kind == "Not":
            return f"T.Not({self._expression(self._node(index, 'a'))})"
        if kind == "Cast":
            return f'T.Cast("{self._dtype(index)}", {self._expression(self._node(index, "value"))})'
        if kind == "Select":
            parts = ("condition", "true_value", "false_value")
            return f"T.Select({', '.join(self._expression(self._node(index, part)) for part in parts)})"
        if kind == "Call":
            name = self._text(self._node(index, "op")).rpartition(".")[2]
            return f"T.{name}({', '.join(map(self._expression, self._children(index, 'args')))})"
        raise ValueError(f"a {kind}")

    @staticmethod
    def _immediate(dtype: str, value: str) -> str:
        float(value)
        if dtype == "bool":
            return f"T.bool({value != '0'})"
        return f"T.{dtype}({value})" if value.lstrip("-")[:1].isdigit() else f'T.{dtype}("{value}")'


class _FormerPrinter(_Printer):
    """Nodes in the layout of TVM before 0.27: fields are texts, and buffers are nodes."""

    fields_key = "attrs"

    def _kind(self, index: int) -> str:
        kind = str(self._nodes[index]["type_key"]).rpartition(".")[2]
        return _FORMER.get(kind, kind)

    def _text(self, index: int) -> str:
        return str(self._nodes[index].get("repr_str", ""))

    def _number(self, index: int) -> str:
        return str(self._value(index, "value"))

    def _dtype(self, index: int) -> str:
        return str(self._value(index, "dtype"))

    def _shape(self, buffer: int, field: str = "shape") -> list[int]:
        return self._children(buffer, field)

    def _parameters(self, function: int) -> list[int]:
        pairs = self._children(function, "buffer_map")
        buffers = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return [buffers[p] for p in self._children(function, "params")]

    def _mapping(self, index: int) -> dict[str, int]:
        node = self._nodes[index]
        return dict(zip(node.get("keys", ()), self._items(index), strict=True))


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)
