"""Costs that a request gives as numbers: they have no interval."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from cdmpp.predict.requests.pricing import PredictedCost

#: Names of fields in seconds, seconds per unit, or units per second.
_COST = re.compile(r"(^|_)(s|seconds)(_per_\w+)?$|_per_s$")
#: Fields with such names that are no costs: goals, limits, arrivals and what-ifs.
_OTHER = frozenset({"budget_s", "tpot_s", "tokens_per_s", "iteration_limit_s", "most_step_s", "arrivals_s", "delay_s"})


def given_costs(request: BaseModel) -> list[str]:
    """Paths of the costs that a request gives, in the order of its fields; ``*`` stands for the indices of a list.

    A cost of 0 and a cost that has its default do not count.
    """
    return list(dict.fromkeys(_given(request, "")))


def _given(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        for name, is_cost in _fields(type(value)):
            item = getattr(value, name)
            field = f"{path}.{name}" if path else name
            if is_cost and _is_number(item) and name in value.model_fields_set:
                yield field
            else:
                yield from _given(item, field)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _given(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _given(item, f"{path}.*")


def _is_number(value: Any) -> bool:
    """Whether a value is a positive number, or has some."""
    if isinstance(value, Mapping):
        return any(map(_is_number, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_number, value))
    return isinstance(value, int | float) and value > 0


@cache
def _fields(model: type[BaseModel]) -> tuple[tuple[str, bool], ...]:
    """Fields that are costs or may hold some, and whether they are: long lists of numbers are not walked."""
    fields = []
    for name, field in model.model_fields.items():
        types = set(_types(field.annotation))
        is_cost = name not in _OTHER and (_COST.search(name) is not None or PredictedCost in types)
        if is_cost or any(issubclass(part, BaseModel) and _fields(part) for part in types):
            fields.append((name, is_cost))
    return tuple(fields)


def _types(annotation: Any) -> Iterator[type]:
    """Classes in an annotation."""
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from _types(part)
