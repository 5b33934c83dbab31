"""Nodes of a request and rows of a plan in compact form: a graph of a million nodes fits into memory.

Rows of the timeline are held as columns: a row object takes ten times their memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Annotated, Any, overload

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
)
from pydantic_core import CoreSchema, core_schema

from cdmpp.predict.requests.request import ProgramForm, Row, Work
from cdmpp.simulate.replay.forms import CollectiveNodeForm, NodeForm, PredictedCollectiveForm

#: Nodes that are validated at a time: the checked forms of all nodes would take 1.5 kB each.
_CHUNK = 10_000


@dataclass(slots=True)
class NodeRecord:
    """A node that was checked against :class:`cdmpp.simulate.replay.forms.NodeForm`; the fields are the same."""

    id: str
    device: str | None = None
    stream: str | int | None = None
    duration_s: float | None = None
    program: ProgramForm | None = None
    count: int | None = None
    programs: list[Work] | None = None
    bytes: float | None = None
    link: str | None = None
    collective: CollectiveNodeForm | PredictedCollectiveForm | None = None
    deps: list[str] | tuple[str, ...] = ()
    records: list[str] | tuple[str, ...] = ()
    waits: list[str] | tuple[str, ...] = ()
    gap_s: float | None = None
    class_: str | None = None


class Nodes(list[NodeRecord]):
    """Nodes that were checked already."""


FIELDS = tuple(field.name for field in fields(NodeRecord))
_values = attrgetter(*FIELDS)


def _checked(value: Any, check: ValidatorFunctionWrapHandler) -> Nodes:
    if isinstance(value, Nodes):
        return value
    if not isinstance(value, list) or len(value) <= _CHUNK:
        return Nodes(NodeRecord(*_values(form)) for form in check(value))
    nodes = Nodes()
    try:
        for at in range(0, len(value), _CHUNK):
            nodes += (NodeRecord(*_values(form)) for form in check(value[at : at + _CHUNK]))
    except ValidationError:
        check(value)  # again, for the positions in the whole list
        raise
    return nodes


def as_json(nodes: Any) -> Any:
    """Checked nodes as JSON values; other values as they are."""
    if not isinstance(nodes, Nodes):
        return nodes
    forms = (NodeForm.model_validate(dict(zip(FIELDS, _values(node), strict=True)), by_name=True) for node in nodes)
    return [form.model_dump(by_alias=True, exclude_defaults=True) for form in forms]


def _schema(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    forms = handler.generate_schema(Annotated[list[NodeForm], Field(min_length=1)])
    return core_schema.no_info_wrap_validator_function(_checked, forms)


#: The field ``nodes`` of a request: JSON as a list of :class:`cdmpp.simulate.replay.forms.NodeForm`.
NodeList = Annotated[Nodes, GetPydanticSchema(_schema)]


class NodeRow(Row):
    """Start and end of a node."""

    id: str
    device: str
    stream: str
    class_: str = Field(alias="class")
    start_s: float
    end_s: float


_NAMES = tuple(NodeRow.model_fields)


class NodeRows(Sequence[NodeRow]):
    """Rows of :class:`NodeRow`, which are made when they are read, from one list for each field in its order."""

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


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause cyclic garbage collection, if it is on.

    Reading a graph makes hundreds of thousands of objects and no garbage. The collector, which runs again and again
    as objects are made, took three quarters of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
