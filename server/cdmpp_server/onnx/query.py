"""Query parameters of ``POST /models/predict``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from cdmpp.programs.query_options import DEFAULT_PROTOCOL, FRAMEWORKS, PROTOCOLS, Framework, Protocol
from cdmpp_server.fields import MAX_TEXT
from cdmpp_server.problems import ProblemError, SchemaViolation

#: Maximum number of devices, and of dynamic dimensions, in one request.
MAX_DEVICES, MAX_DIMS = 64, 64
_DIM = r"[^\x00-\x1f]{1,200}=[1-9][0-9]{0,8}"

_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}
PARAMETERS: list[dict[str, Any]] = [
    {
        "name": "device",
        "in": "query",
        "required": True,
        "description": "Name or alias of a known device (GET /devices); repeat it for several. An unknown "
        "device gives an error and does not affect the others.",
        "schema": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_DEVICES},
        "example": ["t4", "l4"],
    },
    {
        "name": "protocol",
        "in": "query",
        "description": "Measurement protocol of the latency, as in /predict.",
        "schema": {"type": "string", "enum": list(PROTOCOLS), "default": DEFAULT_PROTOCOL},
    },
    {
        "name": "framework",
        "in": "query",
        "description": "Framework that launches the kernels, if known.",
        "schema": {"type": "string", "enum": list(FRAMEWORKS)},
    },
    {
        "name": "dim",
        "in": "query",
        "description": "Size of a dynamic dimension of the model, such as `batch=1`; repeat it for several. Two "
        "sizes of one dimension give 409.",
        "schema": {"type": "array", "items": {"type": "string", "pattern": f"^{_DIM}$"}, "maxItems": MAX_DIMS},
        "example": [],
    },
    {
        "name": "model",
        "in": "query",
        "description": "`model_id` of a loaded model (GET /models). Default: the base model.",
        "schema": _TEXT,
    },
]


@dataclass(frozen=True)
class ModelQuery:
    """The validated query parameters.

    Attributes
    ----------
    devices : tuple of str
        1 to 64 names, in the order of the request.
    protocol, framework
        Options that define the latency.
    dims : dict of str to int
        Sizes of dynamic dimensions.
    model : str or None
        Id of the model.
    """

    devices: tuple[str, ...]
    protocol: Protocol
    framework: Framework | None
    dims: dict[str, int]
    model: str | None

    @classmethod
    def read(cls, pairs: Iterable[tuple[str, str]]) -> ModelQuery:
        """Read the pairs of a query string.

        Raises
        ------
        ProblemError
            422 for an unknown parameter, a missing or an invalid value; 409 for a dimension with two sizes.
        """
        given: dict[str, list[str]] = {}
        for name, value in pairs:
            given.setdefault(name, []).append(value)
        known = [str(parameter["name"]) for parameter in PARAMETERS]
        if unknown := next((name for name in given if name not in known), None):
            raise _refused(unknown[:80], f"unknown parameter; allowed are {', '.join(known)}")
        devices = _texts("device", given, MAX_DEVICES, _is_name, f"a text of 1 to {MAX_TEXT} characters")
        if not devices:
            raise _refused("device", "missing: name at least one device, such as device=t4")
        protocol = _single("protocol", given, PROTOCOLS.__contains__, "one of " + ", ".join(PROTOCOLS))
        framework = _single("framework", given, FRAMEWORKS.__contains__, "one of " + ", ".join(FRAMEWORKS))
        return cls(
            tuple(devices),
            cast(Protocol, protocol or DEFAULT_PROTOCOL),
            cast(Framework | None, framework),
            _dims(_texts("dim", given, MAX_DIMS, _is_dim, "NAME=SIZE, such as batch=1")),
            _single("model", given, _is_name, f"a text of 1 to {MAX_TEXT} characters"),
        )


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= MAX_TEXT


def _is_dim(text: str) -> bool:
    return re.fullmatch(_DIM, text) is not None


def _texts(name: str, given: dict[str, list[str]], most: int, fits: Callable[[str], bool], form: str) -> list[str]:
    values = given.get(name, [])
    if len(values) > most:
        raise _refused(name, f"given {len(values)} times; at most {most} are allowed")
    for value in values:
        if not fits(value):
            raise _refused(name, f"{value[:100]!r} should be {form}")
    return values


def _single(name: str, given: dict[str, list[str]], fits: Callable[[str], bool], form: str) -> str | None:
    values = _texts(name, given, 1, fits, form)
    return values[0] if values else None


def _dims(texts: list[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if sizes.setdefault(name, int(size)) != int(size):
            raise ProblemError(
                "invalid_program",
                f"dim: {name[:100]!r} has two sizes, {sizes[name]} and {size}",
                "send one size for each dimension",
                status=409,
            )
    return sizes


def _refused(name: str, message: str) -> ProblemError:
    return ProblemError(
        "invalid_request",
        f"query: {name}: {message}",
        "GET /openapi.json lists the parameters",
        errors=[SchemaViolation(path=f"query.{name}", message=message)],
    )
