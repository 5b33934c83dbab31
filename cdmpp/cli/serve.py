"""``cdmpp serve``."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from cdmpp.cli.output import ModelOption


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port. Default: 8000; 0: any.", show_default=False)
    ] = None,
    model: ModelOption = None,
) -> None:
    """Serve predictions over HTTP until interrupted.

    Further settings come from CDMPP_... variables or the TOML file that CDMPP_SETTINGS_FILE names (see
    docs/server.md).
    """
    chosen = {"--host": host, "--port": port, "--model": model}
    arguments = [text for name, value in chosen.items() if value is not None for text in (name, str(value))]
    # By name, as uvicorn loads its application: the package itself knows nothing of the server's code.
    code: int = importlib.import_module("server.__main__").main(arguments)
    raise typer.Exit(code)
