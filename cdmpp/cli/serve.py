"""``cdmpp serve``."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from cdmpp.cli.errors import FAILED
from cdmpp.cli.output import ModelOption


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port. Default: 8000; 0: any.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=256, help="Processes that answer. Default: 1.")] = None,
    model: ModelOption = None,
    database: Annotated[
        str | None,
        typer.Option(
            help="SQLite file or postgresql+psycopg://... of observations, programs and jobs. Default: a file for each "
            "model folder, in the user's state folder."
        ),
    ] = None,
) -> None:
    """Serve predictions over HTTP until interrupted.

    Further settings come from CDMPP_... variables or the TOML file that CDMPP_SETTINGS_FILE names:
    docs/server.md.
    """
    chosen = {"--host": host, "--port": port, "--workers": workers, "--model": model, "--database": database}
    arguments = [text for name, value in chosen.items() if value is not None for text in (name, str(value))]
    # By name, as uvicorn loads its application: cdmpp must not import the server.
    serve_forever = importlib.import_module("cdmpp_server.__main__").main
    try:
        code: int = serve_forever(arguments)
    except SystemExit as error:  # uvicorn printed the reason and chose a status
        code = FAILED if error.code else 0
    raise typer.Exit(code)
