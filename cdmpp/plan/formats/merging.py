"""Fields of a request that a caller adds to those of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdmpp.errors import FieldError


def merge(request: Any, fields: Any, path: str = "") -> Any:
    """A copy of a request with further fields.

    Objects are merged field by field. An object for a list is merged into each of its items. A list of objects for a
    list of the same length is merged item by item. Any other value replaces the value of the request.

    Parameters
    ----------
    request, fields : JSON values
    path : str
        Dotted path of both, for errors.

    Raises
    ------
    FieldError
        Two lists of objects have different lengths.
    """
    if isinstance(request, Mapping) and isinstance(fields, Mapping):
        merged = dict(request)
        for name, value in fields.items():
            merged[name] = merge(request[name], value, f"{path}{name}.") if name in request else value
        return merged
    if isinstance(request, list) and isinstance(fields, Mapping):
        return [merge(item, fields, f"{path}{index}.") for index, item in enumerate(request)]
    if _objects(request) and _objects(fields):
        if len(request) != len(fields):
            place = path.removesuffix(".")
            raise FieldError(
                f"{place}: {len(fields)} items for the {len(request)} of the file",
                path=place,
                hint="give as many items, or one object for all of them",
            )
        return [merge(one, more, f"{path}{i}.") for i, (one, more) in enumerate(zip(request, fields, strict=True))]
    return fields


def _objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
