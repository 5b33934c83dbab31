"""Compact ASTs of TVM's objects.

The walk is that of :mod:`cdmpp.features.walk`, which reads nodes as :func:`cdmpp.programs.tvm_json.load` returns them.
TVM takes longer to write a candidate as JSON than the extraction takes to compute its features. Loops, the values of
blocks' variables and index arithmetic, which are most of a scheduled program, are read directly. :class:`ObjectNodes`
reads all other nodes from memory: only those that the extraction uses, and those that candidates share only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.features.affine import AffineRange
from cdmpp.features.ast import CompactAST
from cdmpp.features.expressions import INTEGER, MAX_VALUE
from cdmpp.features.walk import LOOP_KINDS, MAX_NESTING, UNROLLS, Walker
from cdmpp.integrations.needed import tvm, tvm_ffi
from cdmpp.programs.tvm_json import HINT

_INFO = "__tvm_ffi_type_info__"
#: Fields that the extraction does not read.
_UNREAD = frozenset({"span", "dom", "attrs", "ret_type", "source_map", "strides", "elem_offset", "layout"})
#: Numbers, which JSON writes into the fields of a node as it does element types.
_NUMBERS, _DTYPE = frozenset({int, float, bool}), type(tvm.ir.PrimType("int32").dtype)
_element, _length = tvm_ffi.get_global_func("ffi.ArrayGetItem"), tvm_ffi.get_global_func("ffi.ArraySize")
_pairs = tvm_ffi.get_global_func("ffi.MapSize")


class ObjectNodes(dict[Any, dict[str, Any]]):
    """Nodes by key, in place of :data:`cdmpp.programs.tvm_json.Nodes`.

    The key of an object is its address, and the key of None is None. A key of texts and numbers is a tuple of their
    node's type and their value. The instance keeps the objects alive, so that an address identifies one object.
    """

    def __init__(self) -> None:
        super().__init__({None: {"type": "None"}})
        self._objects: dict[int, Any] = {}

    def key(self, value: Any) -> Any:
        """Return the key of an object, a text, a number or None."""
        return _keys[type(value)](self, value)

    def value(self, key: Any) -> Any:
        """Return the object with this address; None for any other key."""
        return self._objects.get(key)

    def object_key(self, value: Any) -> int:
        """Return the key of an object: its address."""
        address: int = value.__chandle__()
        self._objects[address] = value
        return address

    def value_key(self, kind: str, value: Any, data: Any) -> tuple[str, Any]:
        """Return the key of a value, and add its node."""
        key = (kind, value)
        if key not in self:
            self[key] = {"type": kind, "data": data}
        return key

    def __missing__(self, key: int) -> dict[str, Any]:
        value = self._objects[key]
        kind, read = _readers[type(value)]
        node = self[key] = {"type": kind, "data": read(self, value)}
        return node


def elements(array: Any) -> list[Any]:
    """Elements of TVM's array."""
    return [_element(array, i) for i in range(_length(array))]


def type_name(kind: type) -> str:
    """Name of a TVM class as JSON has it; "" for other classes."""
    return _readers[kind][0] if hasattr(kind, _INFO) else ""


def _integer(nodes: ObjectNodes, value: Any) -> Any:
    """Key of an integer literal."""
    number = value.value
    key = ("ir.IntImm", number)
    if key not in nodes:
        nodes[key] = {"type": "ir.IntImm", "data": {"value": nodes.value_key("int", number, number)}}
    return key


def _map(nodes: ObjectNodes, value: Any) -> Any:
    """Key of a map; all empty maps have one."""
    return nodes.object_key(value) if _pairs(value) else nodes.value_key("ffi.Map", 0, [])


class _Keys(dict[type, Callable[[ObjectNodes, Any], Any]]):
    """Function that gives the key of a value, by type."""

    def __missing__(self, kind: type) -> Callable[[ObjectNodes, Any], Any]:
        if kind is type(None):
            self[kind] = lambda _, __: None
        elif issubclass(kind, str):
            self[kind] = lambda nodes, value: nodes.value_key("ffi.String", value, str(value))
        elif issubclass(kind, int | float):
            self[kind] = lambda nodes, value: nodes.value_key(kind.__name__, value, value)
        else:
            name = _readers[kind][0]
            self[kind] = {"ir.IntImm": _integer, "ffi.Map": _map}.get(name, ObjectNodes.object_key)
        return self[kind]


class _Readers(dict[type, tuple[str, Callable[[ObjectNodes, Any], Any]]]):
    """Type of a node as JSON names it, and a function that reads its data, by class."""

    def __missing__(self, kind: type) -> tuple[str, Callable[[ObjectNodes, Any], Any]]:
        about = [vars(base)[_INFO] for base in kind.__mro__ if _INFO in vars(base)]
        name = str(about[0].type_key)
        fields = [field.name for info in about for field in info.fields if field.name not in _UNREAD]
        special: dict[str, Callable[[ObjectNodes, Any], Any]] = {
            "ffi.Array": lambda nodes, value: [nodes.key(element) for element in elements(value)],
            "ffi.Map": lambda nodes, value: [nodes.key(part) for pair in value.items() for part in pair],
            "ir.Op": lambda _, value: value.name,
        }
        self[kind] = name, special.get(name) or _field_reader(fields)
        return self[kind]


def _field_reader(names: list[str]) -> Callable[[ObjectNodes, Any], dict[str, Any]]:
    """Function that reads the fields of an object: numbers and element types as they are, all else as keys."""
    together = attrgetter(*names, "__class__")

    def read(nodes: ObjectNodes, value: Any) -> dict[str, Any]:
        data = {}
        for name, part in zip(names, together(value), strict=False):
            kind = type(part)
            data[name] = part if kind in _NUMBERS else str(part) if kind is _DTYPE else _keys[kind](nodes, part)
        return data

    return read


_keys, _readers = _Keys(), _Readers()


def build_asts(functions: Sequence[Any]) -> list[CompactAST | InvalidProgramError]:
    """Compact ASTs of PrimFuncs, each as :func:`cdmpp.features.walk.build_ast` gives it for the function's JSON.

    An error stands in place of a program that cannot be encoded.
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
