"""Nodes of a request as plain records: a graph of a million nodes fits into memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetPydanticSchema, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, core_schema

from cdmpp.predict.requests.request import ProgramForm, Work
from cdmpp.simulate.replay.forms import CollectiveForm, NodeForm, PredictedCollectiveForm

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
    collective: CollectiveForm | PredictedCollectiveForm | None = None
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
