"""Helper for the request models of several features."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, Field, create_model

Request = TypeVar("Request", bound=BaseModel)


def with_max_items(model: type[Request], field: str, max_items: int) -> type[Request]:
    """Return ``model`` with a list ``field`` of 1 to ``max_items`` elements."""
    return cast("type[Request]", _limited(model, field, max_items))


@lru_cache  # creating a model takes twenty milliseconds
def _limited(model: type[BaseModel], field: str, max_items: int) -> type[BaseModel]:
    elements = model.model_fields[field].annotation
    made: dict[str, Any] = {field: (Annotated[elements, Field(min_length=1, max_length=max_items)], ...)}
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **made)
