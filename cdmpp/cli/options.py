"""Options of commands that are declared in :mod:`cdmpp.llm.options` or as fields of a data class, and ``--ray``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from cdmpp.llm.options import REQUIRED, RequestOption

Command = TypeVar("Command", bound=Callable[..., None])
T = TypeVar("T")


def option(default: T, help: str, *flags: str, **settings: Any) -> T:
    """A field of a data class of options; ``settings`` are those of :func:`typer.Option`."""
    field: Any = dataclasses.field(default=default, metadata={"option": typer.Option(*flags, help=help, **settings)})
    return field  # type: ignore[no-any-return]


def with_fields(*classes: type, options: Mapping[str, RequestOption] | None = None) -> Callable[[Command], Command]:
    """Replace the parameter ``**options`` of a command by one parameter for each field of data classes of options.

    ``options``: further parameters, before them.
    """
    made = [_parameter(name, declared) for name, declared in (options or {}).items()]
    for declaring in classes:
        types = get_type_hints(declaring, include_extras=True)
        for field in dataclasses.fields(declaring):
            own: Any = types[field.name]
            if "option" in field.metadata:
                own = Annotated[own, field.metadata["option"]]
            made.append(
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=own)
            )
    return lambda command: _with_parameters(command, [*_stated(command), *made])


def taken(declaring: type[T], options: dict[str, Any]) -> T:
    """The data class of its options, which are removed from ``options``."""
    return declaring(**{field.name: options.pop(field.name) for field in dataclasses.fields(declaring)})  # type: ignore[arg-type]


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


#: What follows ``--ray`` and is its value; anything else is another argument.
_ADDRESS = re.compile(r"auto|local|(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}")

RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Work on all cores with Ray: of this machine, or of the cluster at HOST:PORT or auto (extra `ray`).",
    ),
]


class RayCommand(TyperCommand):
    """A command whose ``--ray`` is empty where no address follows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Complete ``--ray``, then parse."""
        return super().parse_args(ctx, complete(args))


def complete(args: list[str]) -> list[str]:
    """Arguments with a value behind ``--ray``.

    >>> complete(["--ray", "table.csv"])
    ['--ray=', 'table.csv']
    >>> complete(["--ray", "10.0.0.1:6379"])
    ['--ray', '10.0.0.1:6379']
    """
    out = []
    for at, argument in enumerate(args):
        following = args[at + 1] if at + 1 < len(args) else ""
        bare = argument == "--ray" and not _ADDRESS.fullmatch(following)
        out.append("--ray=" if bare else argument)
    return out
