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
from cdmpp.programs.frontends.tvmscript_check import MAX_CHARS
from cdmpp.programs.tvm_json import MAX_BYTES

_INFIX = {
    **{"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%"},
    **{"LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!="},
}
#: Nodes that become calls, and their operands.
_CALLS = {
    **{"And": ("And", "a", "b"), "Or": ("Or", "a", "b"), "Not": ("Not", "a"), "Div": ("Div", "a", "b")},
    **{"Min": ("min", "a", "b"), "Max": ("max", "a", "b"), "Mod": ("truncmod", "a", "b")},
    "Select": ("Select", "condition", "true_value", "false_value"),
}
#: Kind of a block's iterator (``IterVarType``).
_AXES = {"0": "spatial", "2": "reduce"}
#: Names of TVM before 0.27.
_FORMER = {"Block": "SBlock", "BlockRealize": "SBlockRealize", "BufferLoad": "TensorLoad"}


def tvmscript_of_json(text: str) -> str:
    """TVMScript of a module of PrimFuncs, or of one PrimFunc.

    Raises InvalidProgramError: not such a module, or with constructs that a workload before tuning does not have.
    """
    if len(text) > MAX_BYTES:
        raise InvalidProgramError(f"TVM JSON of {len(text) / 1e6:.0f} MB is too large", hint="at most 32 MB")
    try:
        document = json.loads(text)
        return _Printer(document["nodes"]).module(document["root" if "root" in document else "root_index"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidProgramError(
            f"the workload's TVM JSON cannot be read ({type(error).__name__}: {str(error)[:100]})",
            hint="a workload is a module before tuning, with serial loops and blocks",
        ) from None


class _Printer:
    """Writes nodes, which refer to each other by index.

    TVM 0.27 has ``type`` and ``data``, and types of values are nodes. Before, a node had ``type_key``, ``attrs`` whose
    values are texts, ``repr_str`` for a string, ``keys`` for a mapping, and a function had a map from parameters to
    buffers.
    """

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self._nodes = nodes
        self._names: dict[int, str] = {}
        self._visits = 0

    def _kind(self, index: int) -> str:
        self._visits += 1
        if self._visits > MAX_CHARS:  # nodes that share their children can stand for endless text
            raise ValueError("too many nodes")
        node = self._nodes[index]
        kind = str(node["type_key"] if "type_key" in node else node["type"]).rpartition(".")[2]
        return _FORMER.get(kind, kind)

    def _text(self, index: int) -> str:
        node = self._nodes[index]
        return str(node.get("repr_str", "") if "type_key" in node else node["data"])

    def _fields(self, index: int) -> dict[str, Any]:
        node = self._nodes[index]
        return dict(node["attrs"] if "type_key" in node else node["data"])

    def _node(self, index: int, name: str) -> int:
        return int(self._fields(index)[name])

    def _items(self, index: int) -> list[int]:
        return [int(i) for i in self._nodes[index].get("data") or []]

    def _children(self, index: int, name: str) -> list[int]:
        fields = self._fields(index)
        return self._items(int(fields[name])) if name in fields else self._children(fields["ty"], name)

    def _number(self, index: int) -> str:
        value = self._fields(index)["value"]
        return self._text(value) if self._kind(index) == "IntImm" and type(value) is int else str(value)

    def _dtype(self, index: int) -> str:
        fields = self._fields(index)
        dtype: Any = fields["dtype"] if "dtype" in fields else fields["ty"]
        return dtype if isinstance(dtype, str) else self._dtype(int(dtype))

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

    def module(self, root: int) -> str:
        """The script of a module, or of one PrimFunc."""
        if self._kind(root) != "IRModule":
            return self._function("main", root)
        items = self._children(root, "functions")
        functions = [(self._text(self._node(v, "name_hint")), f) for v, f in zip(items[::2], items[1::2], strict=True)]
        return "\n".join(self._function(name, f) for name, f in functions if self._kind(f) == "PrimFunc")

    def _function(self, name: str, function: int) -> str:
        if not name.isidentifier():
            raise ValueError(f"a function {name[:80]!r}")
        parameters = self._children(function, "params")
        if "buffer_map" in self._fields(function):
            pairs = self._children(function, "buffer_map")
            buffers = dict(zip(pairs[::2], pairs[1::2], strict=True))
            parameters = [buffers[p] for p in parameters]
        block = self._node(self._node(function, "body"), "block")
        if self._children(block, "iter_vars"):
            raise ValueError("the function has no root block")
        signature = ", ".join(f"{self._name(b)}: T.Buffer({self._buffer_type(b)})" for b in parameters)
        lines = ['T.func_attr({"tirx.noalias": True})', *self._allocations(block)]
        lines += self._statement(self._node(block, "body"))
        return "\n".join(["@T.prim_func(s_tir=True)", f"def {name}({signature}):", *_indented(lines)])

    def _buffer_type(self, buffer: int) -> str:
        if self._children(buffer, "strides"):
            raise ValueError("a buffer with strides")
        shape = "".join(f"{self._expression(i)}, " for i in self._children(buffer, "shape"))
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
            if self._node(index, "kind") != 0 or self._number(self._node(index, "min")) != "0":
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
            axis = _AXES[str(self._fields(iterator)["iter_type"])]
            extent = self._expression(self._node(self._node(iterator, "dom"), "extent"))
            yield f"{self._name(self._node(iterator, 'var'))} = T.axis.{axis}({extent}, {self._expression(value)})"
        predicate = self._expression(self._node(realize, "predicate"))
        if predicate != "T.bool(True)":
            yield f"T.where({predicate})"
        annotations = self._literal(self._node(block, "annotations"))
        if annotations:
            yield f"T.sblock_attr({annotations})"
        yield from self._allocations(block)
        if self._node(block, "init"):
            yield "with T.init():"
            yield from _indented(self._statement(self._node(block, "init")))
        yield from self._statement(self._node(block, "body"))

    def _literal(self, index: int) -> Any:
        """Value of an annotation."""
        kind, items = self._kind(index), self._items(index) if self._kind(index) in ("Map", "Array") else []
        if kind == "Map":
            keys = self._nodes[index].get("keys") or list(map(self._text, items[::2]))
            values = items if "keys" in self._nodes[index] else items[1::2]
            return dict(zip(keys, map(self._literal, values), strict=True))
        if kind == "Array":
            return list(map(self._literal, items))
        if kind == "String":
            return self._text(index)
        return int(self._number(index)) if kind == "IntImm" else self._nodes[index]["data"]

    def _access(self, index: int, tensor: str) -> str:
        indices = ", ".join(map(self._expression, self._children(index, "indices")))
        return f"{self._name(self._node(index, tensor))}[{indices or '()'}]"

    def _expression(self, index: int) -> str:
        kind = self._kind(index)
        if kind in ("Var", "SizeVar"):
            return self._name(index)
        if kind in ("IntImm", "FloatImm"):
            value, dtype = self._number(index), self._dtype(index)
            number = float(value)
            if dtype == "bool":
                return f"T.bool({number != 0})"
            return f"T.{dtype}({value})" if abs(number) < float("inf") else f'T.{dtype}("{number}")'
        if kind == "TensorLoad":
            return self._access(index, "buffer" if "buffer" in self._fields(index) else "source")
        if kind in _INFIX:
            a, b = (self._expression(self._node(index, side)) for side in "ab")
            return f"({a} {_INFIX[kind]} {b})"
        if kind == "Cast":
            return f'T.Cast("{self._dtype(index)}", {self._expression(self._node(index, "value"))})'
        if kind in _CALLS:
            name, *operands = _CALLS[kind]
            return f"T.{name}({', '.join(self._expression(self._node(index, operand)) for operand in operands)})"
        if kind == "Call":
            name = self._text(self._node(index, "op")).rpartition(".")[2]
            return f"T.{name}({', '.join(map(self._expression, self._children(index, 'args')))})"
        raise ValueError(f"a {kind}")


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)
