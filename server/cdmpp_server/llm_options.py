"""Fields of requests, made from the declarations of :mod:`cdmpp.llm.options`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, create_model

from cdmpp.llm.options import RequestOption
from cdmpp.predict.requests.request import WholeNumber
from cdmpp.programs.elements import canonical_dtype
from cdmpp_server.schema_base import RequestModel

M = TypeVar("M", bound=RequestModel)


def with_options(options: Mapping[str, RequestOption]) -> Callable[[type[M]], type[M]]:
    """Add a field for each option to a request."""

    def extended(model: type[M]) -> type[M]:
        fields: dict[str, Any] = {name: (_annotation(option), option.default) for name, option in options.items()}
        names: dict[str, Any] = {"__doc__": model.__doc__, "__module__": model.__module__}
        return create_model(model.__name__, __base__=model, **names, **fields)

    return extended


def _annotation(option: RequestOption) -> Any:
    limits = Field(ge=option.minimum, le=option.maximum, lt=option.below)
    value: Any = Literal[option.choices] if option.choices else Annotated[option.type, limits]
    if option.type is int:
        value = Annotated[value, WholeNumber]
    if option.is_dtype:
        value = Annotated[value, BeforeValidator(canonical_dtype)]
    text = f"{option.help} null: {option.unset}." if option.unset else option.help
    return Annotated[value | None if option.default is None else value, Field(description=text)]
