"""What every answer must be, whatever was sent."""

from __future__ import annotations

import json
import math
from typing import Any

#: Statuses that a request may be answered with, and those of a service that is busy.
STATUSES = frozenset({200, 400, 404, 408, 409, 413, 415, 422, 429})
BUSY = frozenset({503, 504})
#: Seconds past the service's own deadline within which the answer must have come.
GRACE_S = 5.0


def problems(status: int, media: str, body: bytes, cases: int) -> list[str]:
    """What is wrong with an answer; nothing where all is well."""
    if status not in STATUSES | BUSY:
        return [f"status {status}: {body[:300]!r}"]
    if media == "application/vnd.safetensors" and status == 200:
        return []
    try:
        said = json.loads(body, parse_constant=_refuse)
    except ValueError as error:
        return [f"status {status}, not JSON ({error}): {body[:200]!r}"]
    if status != 200:
        fields = ("status", "code", "detail")
        good = media == "application/problem+json" and all(field in said for field in fields)
        return [] if good and said["status"] == status else [f"status {status}, no problem: {body[:300]!r}"]
    results = said.get("results")
    if cases > 1 and (not isinstance(results, list) or len(results) != cases):
        return [f"{cases} items, other results: {body[:200]!r}"]
    return [wrong for result in results or [] if (wrong := _result(result))]


def _result(result: dict[str, Any]) -> str:
    if "error" in result:
        error = result["error"]
        code = error.get("code")
        if not code or code == "internal_error" or not error.get("message") or len(error["message"]) > 2000:
            return f"an error without a reason: {str(error)[:300]}"
        if "Traceback" in error["message"]:
            return f"a traceback: {str(error)[:300]}"
        return ""
    if "latency_s" in result:
        figures = [result[key] for key in ("lower_s", "latency_s", "upper_s")]
        if not all(math.isfinite(f) and f > 0 for f in figures) or figures != sorted(figures):
            return f"figures that are none: {figures}"
    return ""


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
