"""``python -m server``: the service under uvicorn."""

from __future__ import annotations

import argparse
import os
import sys

from pydantic import ValidationError


def main(arguments: list[str] | None = None) -> int:
    """Serve until interrupted; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m server",
        description="Serve latency predictions over HTTP. More settings: CDMPP_... (server/settings.py).",
        epilog="example: python -m server --port 8080",
    )
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8000)")
    parser.add_argument("--model", help="model folder (default: the one that ships with the package)")
    chosen = {key: value for key, value in vars(parser.parse_args(arguments)).items() if value is not None}

    import uvicorn

    from server.settings import Settings

    try:
        settings = Settings(**chosen)
    except (ValidationError, OSError, ValueError) as error:
        print(f"error: settings: {_one_line(error)}", file=sys.stderr)
        return 2
    if settings.model is not None:
        # The factory reads its settings from the environment, also in a worker of uvicorn's.
        os.environ["CDMPP_MODEL"] = str(settings.model)
    uvicorn.run("server.app:create_app", factory=True, host=settings.host, port=settings.port)
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return str(error).replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
