"""The option ``--ray [ADDRESS]``, whose value may be left out."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

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

    Examples
    --------
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
