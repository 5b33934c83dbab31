"""Exit codes: 0 done, 1 expected failure (one line and a hint on stderr), 2 wrong usage, 3 incomplete (--strict)."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from cdmpp.errors import CdmppError, MissingDependencyError, install_hint

DEBUG_VARIABLE = "CDMPP_DEBUG"
FAILED, INCOMPLETE = 1, 3
INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143  # as a shell reports SIGINT, SIGPIPE and SIGTERM

#: Optional packages -> the extra that brings them.
_EXTRAS = {
    "onnxruntime": "predict",
    "onnx": "predict",
    "torch": "train",
    "pyarrow": "plan",
    "scipy": "train",
    "sklearn": "train",
    "xgboost": "train",
    "matplotlib": "plan",
    "numba": "plan",
    "highspy": "plan",
    "tvm": "tvm",
    "tvm_ffi": "tvm",
    "httpx2": "client",
    "fastapi": "server",
    "uvicorn": "server",
    "pydantic_settings": "server",
    "starlette": "server",
    "sqlalchemy": "server",
    "prometheus_client": "server",
    "psycopg": "postgres",
    "anyio": "server",
    "ray": "ray",
}


def report(message: str, hint: str = "") -> None:
    """Say what is wrong on stderr, on one line each."""
    print(f"error: {_one_line(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {_one_line(hint)}", file=sys.stderr)


class CdmppGroup(TyperGroup):
    """The root command: turns exceptions of all commands below it into messages and exit codes.

    A command's name may have two words, of which the first is a command as well.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first words, and the other words."""
        if " ".join(args[:2]) in self.commands:
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        debug = bool(ctx.params.get("verbose")) or bool(os.environ.get(DEBUG_VARIABLE))
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except CdmppError as error:
            if debug:
                traceback.print_exc()
            report(error.message, error.hint)
            raise typer.Exit(FAILED) from None
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            silence_stdout()
            raise typer.Exit(PIPE_CLOSED) from None
        except Exception as error:
            if hasattr(error, "exit_code"):  # wrong usage: typer prints it and exits with 2
                raise
            known = _missing(error)
            if debug:
                traceback.print_exc()
            if known is not None:
                report(known.message, known.hint)
            else:
                report(
                    f"internal error: {type(error).__name__}: {error}",
                    "please report it with the command and the output of: cdmpp -v ...",
                )
            raise typer.Exit(FAILED) from None


def _missing(error: Exception) -> CdmppError | None:
    """Report an optional package that is not installed."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    extra = _EXTRAS.get(error.name.partition(".")[0])
    if extra is None:
        return None
    return MissingDependencyError(f"this needs the package {error.name}", hint=install_hint(extra))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def silence_stdout() -> None:
    """Discard the output from now on, so that Python reports no closed pipe at exit."""
    with contextlib.suppress(OSError, ValueError):  # stdout is no file (tests), or closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
