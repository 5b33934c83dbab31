"""``python -m cdmpp_server``: the service under uvicorn."""

from __future__ import annotations

import argparse
import sys

from pydantic import ValidationError


def main(arguments: list[str] | None = None) -> int:
    """Serve until interrupted and return the exit status; ``hash-key`` creates an API key instead."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["hash-key"]:
        return hash_key_command(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m cdmpp_server",
        description="Serve latency predictions over HTTP. docs/server.md lists further settings (CDMPP_...).",
        epilog="example: python -m cdmpp_server --port 8080. `python -m cdmpp_server hash-key` creates an API key.",
    )
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8000)")
    parser.add_argument("--model", help="model folder (default: the model in the package)")
    parser.add_argument("--workers", type=int, help="number of processes that serve requests (default 1)")
    parser.add_argument(
        "--database",
        help="SQLite file or postgresql+psycopg://... of observations, programs and jobs (default: a file per model)",
    )
    chosen = {key: value for key, value in vars(parser.parse_args(arguments)).items() if value is not None}

    from cdmpp.errors import ArtifactError
    from cdmpp.model.artifact.folder import default_model, read_manifest
    from cdmpp_server.database import default_database
    from cdmpp_server.serving import ListenError, serve
    from cdmpp_server.settings import Settings

    try:
        settings = Settings(**chosen)
        if settings.database is None:
            default_database(settings.model)  # there must be a home folder
    except (ValidationError, OSError, ValueError) as error:
        print(f"error: settings: {_one_line(error)}", file=sys.stderr)
        return 2
    try:
        read_manifest(settings.model or default_model())  # a wrong path is one line, not the log of a start
        return 0 if serve(settings) else 1
    except (ArtifactError, ListenError) as error:
        print(f"error: {error}", file=sys.stderr)
        if hint := getattr(error, "hint", ""):
            print(f"hint: {hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def hash_key_command(arguments: list[str]) -> int:
    """``python -m cdmpp_server hash-key``: print a new key for a client, and its hash for the settings."""
    parser = argparse.ArgumentParser(
        prog="python -m cdmpp_server hash-key",
        description="Create a key. Give the key to the client and put its hash into the settings "
        "(api_key_hashes, admin_key_hashes). The key itself is not stored.",
        epilog='example: CDMPP_API_KEY_HASHES=\'{"scheduler": "HASH"}\' python -m cdmpp_server',
    )
    parser.parse_args(arguments)
    from cdmpp_server.operate.access import new_key

    key, hash = new_key()
    print(f"key:  {key}\nhash: {hash}")
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return str(error).replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
