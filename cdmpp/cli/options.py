"""Options of commands that are declared elsewhere: in :mod:`cdmpp.llm.options`, or as fields of a data class."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from cdmpp.llm.options import REQUIRED, RequestOption

Command = TypeVar("Command", bound=Callable[..., None])


def with_options(options: Mapping[str, RequestOption]) -> Callable[[Command], Command]:
    """Replace the parameter ``**options`` of a command by one parameter for each option, behind the required ones."""
    made = [_parameter(name, option) for name, option in options.items()]

    def replaced(command: Command) -> Command:
        stated = _stated(command)
        # Help has this order.
        first = [p for p in stated if p.default is p.empty]
        return _with_parameters(command, [*first, *made, *(p for p in stated if p.default is not p.empty)])

    return replaced


def with_fields(fields: type, options: Mapping[str, RequestOption] | None = None) -> Callable[[Command], Command]:
    """Replace the parameter ``**options`` of a command by one parameter for each field of a data class of options.

    ``options``: further parameters, before them.
    """
    types = get_type_hints(fields, include_extras=True)
    made = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
        for f in dataclasses.fields(fields)
    ]
    more = [_parameter(name, option) for name, option in (options or {}).items()]
    return lambda command: _with_parameters(command, [*_stated(command), *more, *made])


def _stated(command: Callable[..., None]) -> list[inspect.Parameter]:
    """The parameters of a command except ``**options``, as keywords."""
    *stated, _ = inspect.signature(command, eval_str=True).parameters.values()
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in stated]


def _with_parameters(command: Command, parameters: Sequence[inspect.Parameter]) -> Command:
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameter(name: str, option: RequestOption) -> inspect.Parameter:
    text = option.help
    if option.is_dtype:
        text = f"{text.removesuffix('.')}: {', '.join(option.choices)}."
    if option.unset:
        text += f" Default: {option.unset}."
    kind: Any = Literal[option.choices] if option.choices and not option.is_dtype else option.type
    flags = [f"--{name.replace('_', '-')}/--no-{name.replace('_', '-')}"] if option.type is bool else []
    info = typer.Option(*flags, help=text, show_default=option.default not in (None, REQUIRED))
    default = inspect.Parameter.empty if option.default is REQUIRED else option.default
    value: Any = kind | None if option.default is None else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value, info])
