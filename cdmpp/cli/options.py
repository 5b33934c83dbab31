"""Options of commands, made from the declarations of :mod:`cdmpp.llm.options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import typer

from cdmpp.llm.options import REQUIRED, RequestOption

Command = TypeVar("Command", bound=Callable[..., None])


def with_options(options: Mapping[str, RequestOption]) -> Callable[[Command], Command]:
    """Replace the parameter ``**options`` of a command by one parameter for each option, behind the required ones."""

    def replaced(command: Command) -> Command:
        *stated, _ = inspect.signature(command, eval_str=True).parameters.values()
        made = [_parameter(name, option) for name, option in options.items()]
        # Help has this order.
        first = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in stated if p.default is p.empty]
        rest = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in stated if p.default is not p.empty]
        parameters = [*first, *made, *rest]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return replaced


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
