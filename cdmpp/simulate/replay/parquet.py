"""Requests as Parquet files: a row for each node, the other fields as JSON in the metadata of the file.

A column has the name of a field of a node. ``program``, ``programs`` and ``collective`` are JSON text; ``deps``,
``records`` and ``waits`` are lists of text. Columns that no node uses are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from cdmpp.errors import DataError, FieldError
from cdmpp.simulate.replay.forms import NodeForm
from cdmpp.simulate.replay.records import FIELDS, NodeRecord, Nodes, paused_collector
from cdmpp.utils.files import check_parquet, parse_json
from cdmpp.utils.writing import replacing

#: Key of the metadata with the other fields of the request.
METADATA = b"cdmpp.simulate.replay"
#: Columns of JSON text.
_JSON = ("program", "programs", "collective")
_LISTS = ("deps", "records", "waits")
_COLUMN = {name: NodeForm.model_fields[name].alias or name for name in FIELDS}
_DEFAULTS = {field.name: field.default for field in fields(NodeRecord)}
_TEXT: TypeAdapter[Any] = TypeAdapter(Any)
_HINT = "docs/replay.md lists the columns"


def _check(name: str) -> TypeAdapter[list[Any]]:
    """Validator of a column of one field."""
    field = NodeForm.model_fields[name]
    item_type: Any = field.annotation
    if field.metadata:
        item_type = Annotated[(item_type, *field.metadata)]
    return TypeAdapter(list[item_type], config=ConfigDict(strict=True, allow_inf_nan=False))


_CHECKS = {name: _check(name) for name in FIELDS}


def read_parquet(path: str | Path) -> dict[str, Any]:
    """A request from a file; its nodes are checked like those of a JSON request.

    Raises DataError: the file is not Parquet, or its metadata is not JSON.
    Raises FieldError: a column is unknown or missing, or a value is wrong.
    """
    try:
        check_parquet(path)
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: not a Parquet file: {error}", hint="give a file of cdmpp replay --save-graph"
        ) from None
    try:
        rest = parse_json((table.schema.metadata or {}).get(METADATA, b"{}"))
    except ValueError as error:
        raise DataError(f"{path}: metadata {METADATA.decode()!r} is not JSON: {error}", hint=_HINT) from None
    if not isinstance(rest, dict) or "nodes" in rest:
        raise DataError(f"{path}: metadata {METADATA.decode()!r} must be an object without nodes", hint=_HINT)
    unknown = sorted(set(table.column_names) - set(_COLUMN.values()))
    if unknown:
        raise FieldError(f"{path}: no field of a node is called {unknown[0]!r}", path="nodes", hint=_HINT)
    if "id" not in table.column_names or not table.num_rows:
        what = "no rows" if "id" in table.column_names else "no column 'id'"
        raise FieldError(f"{path}: {what}", path="nodes", hint=_HINT)
    with paused_collector():
        given = {name: _column(table, name) for name in FIELDS if _COLUMN[name] in table.column_names}
        columns = [given.get(name) or repeat(_DEFAULTS[name], table.num_rows) for name in FIELDS]
        return {**rest, "nodes": Nodes(map(NodeRecord, *columns))}


def write_parquet(path: str | Path, request: Mapping[str, Any], nodes: Nodes) -> None:
    """Write a request with its checked nodes. Raises DataError: the file cannot be written."""
    columns: dict[str, pa.Array] = {}
    for name in FIELDS:
        values = [getattr(node, name) for node in nodes]
        if name in _JSON:
            values = [None if value is None else _TEXT.dump_json(value).decode() for value in values]
        elif name == "stream":
            values = [None if value is None else str(value) for value in values]
        if name in _LISTS and any(values):
            columns[_COLUMN[name]] = pa.array(values, pa.list_(pa.string()))
        elif name not in _LISTS and any(value is not None for value in values):
            columns[_COLUMN[name]] = pa.array(values)
    rest = {name: value for name, value in request.items() if name != "nodes"}
    table = pa.table(columns).replace_schema_metadata({METADATA: json.dumps(rest, allow_nan=False).encode()})
    with replacing(path) as aside:
        pq.write_table(table, aside)


def _column(table: pa.Table, name: str) -> list[Any]:
    """The checked values of a column; equal texts are one object."""
    arrow = table.column(_COLUMN[name]).combine_chunks()
    if pa.types.is_dictionary(arrow.type):
        arrow = arrow.dictionary_decode()
    rows = None
    if pa.types.is_string(arrow.type) and (name != "id"):
        coded = arrow.dictionary_encode(null_encoding="encode")
        arrow, rows = coded.dictionary, coded.indices.to_pylist()
    values = arrow.to_pylist()
    if name in _LISTS:
        values = [[] if value is None else value for value in values]
    elif name in _JSON:
        values = [None if value is None else _parsed(value, name) for value in values]
    try:
        values = _CHECKS[name].validate_python(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        at, *inside = problem["loc"]
        row = at if rows is None else rows.index(at)
        where = ".".join(map(str, ("nodes", row, _COLUMN[name], *inside)))
        raise FieldError.at(where, f"{problem['msg']}: {problem['input']!r}", hint=_HINT) from None
    return values if rows is None else [values[at] for at in rows]


def _parsed(text: Any, name: str) -> Any:
    """JSON text as a value; what is not JSON stays text, such as that of an operator."""
    try:
        return from_json(text, allow_inf_nan=False)
    except (TypeError, ValueError):
        return text
