"""TVM's JSON, read in plain Python: no TVM, no C++ parser for a stranger's bytes.

``tvm.ir.save_json`` writes a flat list of nodes that refer to each other by index; an object that is
shared (a loop variable, a buffer) is written once, so its index identifies it. Here the list is checked
once (:func:`load`), PrimFuncs are found, and a structural hash is made that sees neither names nor spans.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from cdmpp.errors import InvalidProgramError

Nodes = list[dict[str, Any]]

#: A scheduled GPU program has some thousand nodes; a hundred times more is not a tensor program.
MAX_NODES = 200_000
MAX_BYTES = 32 * 1024 * 1024

HINT = "pass what tvm.ir.save_json(IRModule or PrimFunc) of apache-tvm 0.27 writes"


def load(text: str | bytes) -> tuple[Nodes, int]:
    """Parse and check TVM JSON.

    Returns
    -------
    nodes, root
        The node list and the index of the root. Every node has a ``type``; references are checked
        where they are followed.

    Raises
    ------
    InvalidProgramError
        Not JSON, not TVM's layout, or too large.
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
    return nodes, root


def prim_funcs(nodes: Nodes, root: int) -> dict[str, int]:
    """Name -> node index of every PrimFunc under the root (an IRModule or one PrimFunc)."""
    kind = nodes[root]["type"]
    if kind.endswith("PrimFunc"):
        return {"main": root}
    if kind != "ir.IRModule":
        raise InvalidProgramError(f"the root is a {kind}, neither an IRModule nor a PrimFunc", hint=HINT)
    try:
        pairs = nodes[nodes[root]["data"]["functions"]]["data"]
        found = {}
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if nodes[value]["type"].endswith("PrimFunc"):
                found[nodes[nodes[key]["data"]["name_hint"]]["data"]] = value
    except (KeyError, IndexError, TypeError, ValueError):
        raise InvalidProgramError("the IRModule's function table is broken", hint=HINT) from None
    return found


_NAMES = frozenset({"span", "name", "name_hint", "source_map", "global_infos"})


def structural_hash(nodes: Nodes, func: int) -> str:
    """Hash (hex, 32 characters) of a PrimFunc: blind to names, spans and node order, not to sharing.

    Equal programs written as TVMScript, JSON or objects give one hash; variables count by their order
    of first use.
    """
    body = nodes[func]["data"]
    out: list[str] = []
    seen: dict[int, int] = {}

    def visit(index: Any) -> None:
        # Iterative: hostile JSON can nest (or loop) deeper than Python's stack.
        stack: list[Any] = [index]
        steps = 0
        while stack:
            item = stack.pop()
            steps += 1
            if steps > 20 * MAX_NODES:
                raise InvalidProgramError("the program's nodes refer to each other without end", hint=HINT)
            if type(item) is not int:
                out.append(str(item))
                continue
            node = nodes[item]
            kind, data = node["type"], node.get("data")
            if type(data) is dict:
                if item in seen and kind not in ("ir.IntImm", "ir.PrimType"):
                    out.append(f"#{seen[item]}")
                    continue
                seen[item] = len(seen)
                out.append(kind)
                for key in sorted(data, reverse=True):
                    if key in _NAMES:
                        continue
                    value = data[key]
                    scalar = type(value) is not int or (kind, key) in _SCALARS or key in _SCALAR_KEYS
                    stack.append(f"{key}={value}" if scalar else value)
            elif type(data) is list:
                out.append(f"{kind}{len(data)}")
                stack.extend(reversed(data))
            else:
                out.append(f"{kind}:{data}")

    try:
        visit(body["params"])
        visit(body["body"])
    except (KeyError, IndexError, TypeError):
        raise InvalidProgramError("a node refers to one that is not there", hint=HINT) from None
    return hashlib.sha256(b"tir\0" + "\n".join(out).encode()).hexdigest()[:32]


#: Integer fields that are values, not references to nodes.
_SCALAR_KEYS = frozenset({"iter_type", "kind", "data_alignment", "offset_factor", "ndim", "dtype_lanes"})
_SCALARS = frozenset({("ir.FloatImm", "value")})
