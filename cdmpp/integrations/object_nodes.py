"""Nodes of TVM objects, for the feature extraction.

:func:`cdmpp.features.walk.build_ast` reads nodes as :func:`cdmpp.programs.tvm_json.load` returns them. TVM takes
longer to write a candidate as JSON than the extraction takes to compute its features. :class:`ObjectNodes` reads the
same nodes from memory: only those that the extraction uses, and those that candidates share only once.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from cdmpp.integrations.needed import tvm, tvm_ffi

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
