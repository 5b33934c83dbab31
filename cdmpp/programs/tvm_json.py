"""TVM's JSON, read in plain Python: no TVM, and no C++ parser on untrusted bytes.

``tvm.ir.save_json`` writes a flat list of nodes that refer to each other by index; an object that is
shared (a loop variable, a buffer) is written once, so its index identifies it. Here the list is checked
once (:func:`load`), PrimFuncs are found, and a structural hash is made that sees neither names nor spans.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from cdmpp.errors import InvalidProgramError

#: Node index -> node. A dictionary and not a list, so that a negative index is an error like any other.
Nodes = dict[int, dict[str, Any]]

#: A scheduled GPU program has some thousand nodes; a hundred times more is not a tensor program.
MAX_NODES = 200_000
MAX_BYTES = 32 * 1024 * 1024

HINT = "pass what tvm.ir.save_json(IRModule or PrimFunc) of apache-tvm 0.27 writes"


def load(text: str | bytes) -> tuple[Nodes, int]:
    """Parse and check TVM JSON.

    Returns the nodes by index and the index of the root. Every node has a ``type``; references are checked where they
    are followed.
    Raises InvalidProgramError: not JSON, not TVM's layout, or too large.
    """
    if len(text) > MAX_BYTES:
        raise InvalidProgramError(f"TVM JSON of {len(text) / 1e6:.0f} MB is too large", hint="at most 32 MB")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidProgramError(f"not JSON: {error}", hint=HINT) from None
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        raise InvalidProgramError("JSON without a list of nodes is not a TVM program", hint=HINT)
    nodes, root = document["nodes"], document.get("root_index")
    if len(nodes) > MAX_NODES:
        raise InvalidProgramError(f"{len(nodes)} nodes are too many", hint=f"at most {MAX_NODES}")
    if type(root) is not int or not 0 <= root < len(nodes):
        raise InvalidProgramError("root_index does not name a node", hint=HINT)
    for node in nodes:
        if type(node) is not dict or type(node.get("type")) is not str:
            raise InvalidProgramError("a node has no type", hint=HINT)
    return dict(enumerate(nodes)), root


def prim_funcs(nodes: Nodes, root: int) -> dict[str, int]:
    """Name -> node index of every PrimFunc under the root (an IRModule or one PrimFunc)."""
    return _functions(nodes, root, "PrimFunc")


def has_relax_main(nodes: Nodes, root: int) -> bool:
    """Whether the root is a module with a Relax function ``main``: a network, not a set of programs."""
    return nodes[root]["type"] == "ir.IRModule" and "main" in _functions(nodes, root, "relax.expr.Function")


def _functions(nodes: Nodes, root: int, of_type: str) -> dict[str, int]:
    kind = nodes[root]["type"]
    if kind.endswith("PrimFunc"):
        return {"main": root}
    if kind != "ir.IRModule":
        raise InvalidProgramError(f"the root is a {kind[:80]}, neither an IRModule nor a PrimFunc", hint=HINT)
    try:
        pairs = nodes[nodes[root]["data"]["functions"]]["data"]
        functions: dict[str, int] = {}
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if nodes[value]["type"].endswith(of_type):
                name = nodes[nodes[key]["data"]["name_hint"]]["data"]
                functions[name if type(name) is str else str(name)[:80]] = value
    except (KeyError, TypeError, ValueError):
        raise InvalidProgramError("the IRModule's function table is broken", hint=HINT) from None
    return functions


def find_prim_func(nodes: Nodes, root: int, function: str | None = None) -> int:
    """Node index of the only PrimFunc, or of the one with this name.

    Raises InvalidProgramError: no PrimFunc, several without ``function``, or none of this name.
    """
    functions = prim_funcs(nodes, root)
    if function is None and len(functions) != 1:
        raise InvalidProgramError(
            f"the module has {len(functions)} PrimFuncs: {', '.join(sorted(functions)[:8]) or 'none'}",
            hint="pass one PrimFunc, or name the function",
        )
    name = function if function is not None else next(iter(functions))
    if name not in functions:
        raise InvalidProgramError(
            f"no PrimFunc {name!r} in the module", hint="it has " + ", ".join(sorted(functions)[:8])
        )
    return functions[name]


#: Fields that do not change what a program computes: names, and access regions that follow from the body.
_UNREAD = frozenset({"span", "name", "name_hint", "source_map", "global_infos", "reads", "writes"})
#: Integer fields that are values, not references to nodes.
_VALUES = frozenset({"iter_type", "kind", "data_alignment", "offset_factor", "ndim", "dtype_lanes"})
#: A float that JSON writes without a point.
_FLOAT = ("ir.FloatImm", "value")
#: Objects that are compared by identity; all others are compared by content.
_VARIABLES = frozenset({"ir.Var", "tirx.Var", "tirx.SizeVar"})


def structural_hash(nodes: Nodes, func: int) -> str:
    """Hash (hex, 32 characters) of a PrimFunc: blind to names, spans, node order and sharing.

    Equal programs written as TVMScript, JSON or objects give one hash; variables count by their order
    of first use. Each distinct structure gets a number when its children have theirs, so that the time is
    linear in the nodes however often they are shared.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    done: dict[int, int] = {}
    unfinished: set[int] = set()
    variables = 0
    try:
        body = nodes[func]["data"]
        stack = [body["body"], body["params"]]
        while stack:
            index = stack[-1]
            if index in done:
                stack.pop()
                continue
            node = nodes[index]
            kind, data = node["type"], node.get("data")
            fields, children = _fields(kind, data)
            if kind == "ffi.Map":  # maps are not ordered: keys and values are sorted by key
                keys = sorted(
                    zip(children[::2], children[1::2], strict=False), key=lambda p: str(nodes[p[0]].get("data"))
                )
                children = [index for pair in keys for index in pair]
            missing = [child for child in children if child not in done]
            if missing:
                if index in unfinished:
                    raise InvalidProgramError("the program's nodes form a cycle", hint=HINT)
                unfinished.add(index)
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if kind in _VARIABLES:
                fields = (*fields, str(variables))
                variables += 1
            key = (kind, *fields, *(done[child] for child in children))
            done[index] = numbers.setdefault(key, len(numbers))
    except (KeyError, TypeError):
        raise InvalidProgramError("a node refers to a node that does not exist", hint=HINT) from None
    text = "\n".join(map(repr, numbers))
    return hashlib.sha256(b"tir\0" + text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _fields(kind: str, data: Any) -> tuple[tuple[str, ...], list[int]]:
    """Data of a node, and the nodes that it refers to."""
    if type(data) is dict:
        values: list[str] = []
        children: list[int] = []
        for key in sorted(data):
            if key in _UNREAD and kind != "ir.GlobalVar":
                continue
            value = data[key]
            if type(value) is not int or key in _VALUES or (kind, key) == _FLOAT:
                values.append(f"{key}={value}")
            else:
                values.append(key)
                children.append(value)
        return tuple(values), children
    if type(data) is list:
        return (), data
    return (str(data),), []
