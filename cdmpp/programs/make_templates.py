"""Make ``templates.json.gz``: lower every structural class once with symbolic sizes. Needs TVM.

Run as ``python -m cdmpp.programs.make_templates``.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from cdmpp.programs.lowering import lower_class, to_json
from cdmpp.programs.templates import FILE_NAME, all_classes, class_name, stored_class, symbols

#: Node fields that no feature reads; dropping them (and what only they refer to) halves the file.
_UNREAD = frozenset({"span", "reads", "writes", "source_map", "global_infos", "ret_type", "layout", "elem_offset"})
_UNREAD_OF = {
    "tirx.PrimFunc": {"ty", "attrs"},
    "ir.GlobalVar": {"ty"},
    "ir.IRModule": {"attrs", "global_var_map_"},
    "tirx.BufferType": {"strides", "data_alignment", "offset_factor", "allocated_addr"},
    "tirx.IterVar": {"dom", "thread_tag"},
    "tirx.SBlock": {"annotations"},
}
#: Nodes that are known by where they stand and not by what they say.
_IDENTITIES = frozenset({"ir.Var"})
#: Integer fields that are values and not references.
_VALUES = frozenset({"iter_type", "kind", "data_alignment", "offset_factor", "ndim"})


def prune(text: str) -> str:
    """TVM JSON with the unread fields dropped, equal nodes merged and the rest renumbered."""
    document = json.loads(text)
    nodes: list[dict[str, Any]] = document["nodes"]
    kept: dict[int, int] = {}
    same: dict[str, int] = {}
    out: list[dict[str, Any]] = []

    def copy(index: int) -> int:
        if index in kept:
            return kept[index]
        me: dict[str, Any] = {"type": nodes[index]["type"]}
        data = nodes[index].get("data")
        if isinstance(data, dict):
            skip = _UNREAD | _UNREAD_OF.get(me["type"], set())
            me["data"] = {
                key: value if key in _VALUES or type(value) is not int else copy(value)
                for key, value in data.items()
                if key not in skip
            }
        elif isinstance(data, list):
            me["data"] = [copy(i) for i in data]
        elif data is not None:
            me["data"] = data
        text = f"{len(out)}" if me["type"] in _IDENTITIES else json.dumps(me)
        kept[index] = same.setdefault(text, len(out))
        if kept[index] == len(out):
            out.append(me)
        return kept[index]

    root = copy(document["root_index"])
    return json.dumps({"root_index": root, "nodes": out}, separators=(",", ":"))


def main() -> None:
    """Lower all classes and write the file beside this module."""
    classes: dict[str, str] = {}
    for op, element_type, all_flags in all_classes():
        dtype, flags, _ = stored_class(op, element_type, all_flags)
        name = class_name(op, dtype, flags)
        if name not in classes:
            classes[name] = prune(to_json(lower_class(op, dtype, flags, list(symbols(op)))))
    path = Path(__file__).with_name(FILE_NAME)
    packed = gzip.compress(json.dumps({"classes": classes}).encode(), compresslevel=9, mtime=0)
    aside = path.with_suffix(".tmp")
    aside.write_bytes(packed)
    aside.replace(path)
    print(f"{len(classes)} classes, {len(packed) / 1e3:.0f} kB -> {path.name}")


if __name__ == "__main__":
    main()
