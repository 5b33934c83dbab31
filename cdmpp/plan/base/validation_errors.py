"""Locations of schema violations, by the fields of the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cdmpp.errors import violation_text


def places(error: ValidationError, value: Any) -> list[tuple[str, str]]:
    """Path and message of each violation.

    Parameters
    ----------
    error : ValidationError
    value : JSON value
        What was checked.

    Returns
    -------
    list of (str, str)
        Paths as ``stages.0.forward_s``: without the union branches that
        pydantic inserts. Violations that only exclude other branches of a union are left out.
    """
    violations = [
        (_path(problem["loc"], problem["type"], value), problem["type"], problem["msg"])
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    return [
        (".".join(path), violation_text(kind, message))
        for path, kind, message in violations
        if not _beside(path, kind, violations)
    ]


def faults(error: ValidationError, most: int) -> list[str]:
    """The first ``most`` violations of an answer's schema as lines of text, with the path of each."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    return [
        f"{'.'.join(map(str, p['loc'])) or 'answer'}: {violation_text(p['type'], p['msg'])}" for p in problems[:most]
    ]


def _path(loc: tuple[int | str, ...], kind: str, value: Any) -> list[str]:
    parts: list[str] = []
    at = value
    for number, part in enumerate(loc):
        inside = isinstance(at, Mapping) and part in at
        if isinstance(at, list) and isinstance(part, int):
            inside = part < len(at)
        if inside:
            at = at[part]
        elif not (kind == "missing" and number == len(loc) - 1):
            continue  # a branch of a union
        parts.append(str(part)[:80])
    return parts


def _beside(path: list[str], kind: str, violations: list[tuple[list[str], str, str]]) -> bool:
    """Whether a violation belongs to another branch of a union than the value's."""
    for other, other_kind, _ in violations:
        deeper = len(other) > len(path) and other[: len(path)] == path
        if deeper and (kind.endswith("_type") or kind == "literal_error"):
            return True
        if other == path and kind.endswith("_type") and not other_kind.endswith("_type"):
            return True
    return False
