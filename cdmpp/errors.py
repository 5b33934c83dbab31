"""Errors that a caller can act on.

Each class has a stable ``code`` for machines and also derives from the matching builtin exception. Each error has a
``hint``: the next step for the caller, in one sentence. Any other exception is a bug.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Self


class CdmppError(Exception):
    """Base of every expected error.

    Parameters
    ----------
    message : str
        What is wrong, with the value, in one line.
    hint : str, optional
        What the caller can do.

    Attributes
    ----------
    code : str
        Stable identifier of the class, lower_snake; part of the HTTP and JSON interfaces.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        # The builtin bases KeyError and OSError would format their argument differently.
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Keeps the hint between processes; BaseException would pass only the message.
        return (type(self), (self.message,), self.__dict__.copy())


class InvalidProgramError(CdmppError, ValueError):
    """The program is malformed: unreadable text, missing or impossible sizes."""

    code = "invalid_program"


class UnsupportedOperatorError(CdmppError, ValueError):
    """The program is well formed, but uses an operator that is not supported."""

    code = "unsupported_operator"


class UnknownDeviceError(CdmppError, LookupError):
    """No device has this name; the message lists the nearest names."""

    code = "unknown_device"


class InvalidDeviceError(CdmppError, ValueError):
    """A device specification is incomplete, misspelled or physically impossible."""

    code = "invalid_device"


class ArtifactError(CdmppError, ValueError):
    """A model folder cannot be used: wrong format, checksum, feature schema or option."""

    code = "artifact_error"


class DataError(CdmppError, ValueError):
    """A table of records is missing, unreadable or lacks columns."""

    code = "data_error"


class MeasurementError(CdmppError, RuntimeError):
    """Measuring a program failed.

    Parameters
    ----------
    transient : bool
        True when a second try may succeed (a busy device), False when the program is at fault.
    """

    code = "measurement_error"

    def __init__(self, message: str, *, hint: str = "", transient: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.transient = transient


class OverloadedError(CdmppError, RuntimeError):
    """The queue of the service is full; retry later."""

    code = "overloaded"


class DeadlineExceededError(CdmppError, RuntimeError):
    """There was no response within the request's time limit."""

    code = "deadline_exceeded"


class FieldError(CdmppError, ValueError):
    """A field of a replay or plan request is wrong, or contradicts another field.

    Parameters
    ----------
    path : str
        The field, such as ``nodes.3.deps.0``; may be empty.
    """

    code = "invalid_field"

    def __init__(self, message: str, *, hint: str = "", path: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path

    @classmethod
    def at(cls, path: str, problem: str, *, hint: str = "") -> Self:
        """The error of one field: its message is ``path: problem``."""
        return cls(f"{path}: {problem}", hint=hint, path=path)

    @classmethod
    def not_allowed(cls, path: str, value: object, *, hint: str) -> Self:
        """The error of a value; ``hint`` says which are allowed."""
        return cls.at(path, f"{str(value)[:80]!r} is not allowed", hint=hint)


class InfeasibleError(FieldError):
    """No plan meets the limits of the request; the message gives the smallest limit that one would meet."""

    code = "infeasible"


def violation_text(kind: str, message: str) -> str:
    """Message of a schema violation: pydantic's own, but shorter for missing and unknown fields.

    Parameters
    ----------
    kind : str
        pydantic's type of the violation, such as "missing".
    message : str
        pydantic's message.
    """
    if kind == "missing":
        return "missing"
    # The names of pydantic's classes mean nothing to a caller.
    plain = re.sub(r" or instance of \w+$", "", message.removeprefix("Value error, "))
    return "unknown field" if kind == "extra_forbidden" else plain


class MissingDependencyError(CdmppError, ImportError):
    """An optional package is missing; the hint names the extra to install."""

    code = "missing_dependency"


def install_hint(extra: str) -> str:
    """Return the command that installs an extra: from the checkout, or from the wheel that installed cdmpp.

    Parameters
    ----------
    extra : str
        Names of extras, separated by commas, such as "predict,tvm".
    """
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install '.[{extra}]' in {checkout}"
    wheel = f"cdmpp-{version('cdmpp')}-py3-none-any.whl"
    return f"pip install './{wheel}[{extra}]' (the wheel that cdmpp was installed from)"


class ServiceError(CdmppError, ConnectionError):
    """A service cannot be reached, or refuses a request for a reason without its own class.

    Parameters
    ----------
    status : int, optional
        HTTP status of the response, where there was one.
    problem : str
        The code of the response, such as "unauthorized"; may be empty.
    """

    code = "service_error"

    def __init__(self, message: str, *, hint: str = "", status: int | None = None, problem: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.problem = problem
