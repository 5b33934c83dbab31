"""Rows of the timeline of a plan, held as columns: a row object takes ten times their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, overload

from pydantic import Field, SerializerFunctionWrapHandler, ValidatorFunctionWrapHandler, WrapSerializer, WrapValidator

from cdmpp.predict.requests.request import Row


class NodeRow(Row):
    """Start and end of a node."""

    id: str
    device: str
    stream: str
    class_: Annotated[str, Field(alias="class")]
    start_s: float
    end_s: float


_NAMES = tuple(NodeRow.model_fields)


class NodeRows(Sequence[NodeRow]):
    """Rows of :class:`NodeRow`, which are made when they are read.

    Parameters
    ----------
    *columns : list
        One for each field of a row, in its order.
    """

    def __init__(self, *columns: list[Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, at: int) -> NodeRow: ...

    @overload
    def __getitem__(self, at: slice) -> NodeRows: ...

    def __getitem__(self, at: int | slice) -> NodeRow | NodeRows:
        if isinstance(at, slice):
            return NodeRows(*(column[at] for column in self.columns))
        return NodeRow.model_construct(**{name: column[at] for name, column in zip(_NAMES, self.columns, strict=True)})

    def __iter__(self) -> Iterator[NodeRow]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return self.columns == other.columns if isinstance(other, NodeRows) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def column(self, name: str) -> list[Any]:
        """The values of one field."""
        return self.columns[_NAMES.index(name)]

    def dicts(self) -> list[dict[str, Any]]:
        """The rows as JSON objects."""
        return [
            {"id": id, "device": device, "stream": stream, "class": class_, "start_s": start_s, "end_s": end_s}
            for id, device, stream, class_, start_s, end_s in zip(*self.columns, strict=True)
        ]


def _read(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    if value is None or isinstance(value, NodeRows):
        return value
    rows = check(value)
    return NodeRows(*([getattr(row, name) for row in rows] for name in _NAMES))


def _write(value: Any, plain: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
    # Without a type of the result: the JSON schema is that of the field.
    return value.dicts() if isinstance(value, NodeRows) else plain(value)


#: The field ``timeline`` of a plan: JSON as a list of :class:`NodeRow`.
NodeTimeline = Annotated[Sequence[NodeRow] | None, WrapValidator(_read), WrapSerializer(_write)]
