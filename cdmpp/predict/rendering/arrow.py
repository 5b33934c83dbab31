"""Arrow tables whose columns state their units. pyarrow is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cdmpp.errors import MissingDependencyError, install_hint

ColumnType = Literal["string", "float64", "int64", "bool", "levels"]


@dataclass(frozen=True)
class Column:
    """A column of an Arrow table.

    Attributes
    ----------
    type : {"string", "float64", "int64", "bool", "levels"}
        ``levels`` is a map of text to float64, for quantiles.
    values : sequence
        One per row; None becomes null.
    unit : str
        Stored as ``unit`` in the metadata of the field; empty for none.
    """

    type: ColumnType
    values: Sequence[Any]
    unit: str = ""


def arrow_table(columns: Mapping[str, Column], metadata: Mapping[str, str] | None = None) -> Any:
    """A ``pyarrow.Table`` of columns of equal length.

    Raises
    ------
    MissingDependencyError
        pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingDependencyError("an Arrow table needs pyarrow", hint=install_hint("plan")) from None
    types = {"levels": pa.map_(pa.string(), pa.float64())}
    fields, arrays = [], []
    for name, column in columns.items():
        kind = types.get(column.type) or pa.type_for_alias(column.type)
        fields.append(pa.field(name, kind, metadata={"unit": column.unit} if column.unit else None))
        arrays.append(pa.array(column.values, type=kind))
    return pa.table(arrays, schema=pa.schema(fields, metadata=dict(metadata) if metadata else None))
