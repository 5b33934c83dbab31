"""``python -m server``: the service under uvicorn."""

from __future__ import annotations

import argparse
import os
import sys

from pydantic import ValidationError


def main(arguments: list[str] | None = None) -> int:
    """Serve until interrupted; returns the exit status. ``hash-key`` makes a key instead."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["hash-key"]:
        return hash_key_command(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m server",
        description="Serve latency predictions over HTTP. More settings: CDMPP_... (server/settings.py).",
        epilog="example: python -m server --port 8080. `python -m server hash-key` makes a key.",
    )
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8000)")
    parser.add_argument("--model", help="model folder (default: the one that ships with the package)")
    chosen = {key: value for key, value in vars(parser.parse_args(arguments)).items() if value is not None}

    import uvicorn

    from server.operate.logs import log_config
    from server.settings import Settings

    try:
        settings = Settings(**chosen)
    except (ValidationError, OSError, ValueError) as error:
        print(f"error: settings: {_one_line(error)}", file=sys.stderr)
        return 2
    if settings.model is not None:
        # The factory reads its settings from the environment, also in a worker of uvicorn's.
        os.environ["CDMPP_MODEL"] = str(settings.model)
    uvicorn.run(
        "server.app:create_app",
        factory=True,
        host=settings.host,
        port=settings.port,
        log_config=log_config(settings.log_format),
    )
    return 0


def hash_key_command(arguments: list[str]) -> int:
    """``python -m server hash-key``: a new key for a client, and the hash of it for the settings."""
    parser = argparse.ArgumentParser(
        prog="python -m server hash-key",
        description="Make a key. The client gets the key, the service's settings only its hash "
        "(api_key_hashes, admin_key_hashes); the key is not kept anywhere.",
        epilog='example: CDMPP_API_KEY_HASHES=\'{"scheduler": "HASH"}\' python -m server',
    )
    parser.parse_args(arguments)
    from server.operate.access import new_key

    key, hash = new_key()
    print(f"key:  {key}\nhash: {hash}")
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return str(error).replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
