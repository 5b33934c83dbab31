"""Checks that hold for every answer, whatever the request was."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from cdmpp.errors import DataError
from cdmpp.predict.bulk import MEDIA_TYPE, FeatureAnswers

#: Statuses that a request may be answered with, and those of a service that is busy.
STATUSES = frozenset({200, 202, 400, 404, 408, 409, 413, 415, 422, 429})
BUSY = frozenset({503, 504})
#: Seconds past the service's own deadline within which the answer must have come.
GRACE_S = 5.0


def problems(status: int, media: str, body: bytes, cases: int) -> list[str]:
    """Problems of an answer; empty if there are none."""
    if status not in STATUSES | BUSY:
        return [f"status {status}: {body[:300]!r}"]
    if media == MEDIA_TYPE and status == 200:
        return _features(body)
    try:
        reply = json.loads(body, parse_constant=_refuse)
    except ValueError as error:
        return [f"status {status}, not JSON ({error}): {body[:200]!r}"]
    if status not in (200, 202):
        fields = ("status", "code", "detail")
        good = media == "application/problem+json" and all(field in reply for field in fields)
        return [] if good and reply["status"] == status else [f"status {status}, no problem: {body[:300]!r}"]
    if "model_id" in reply and "explanation" in reply:
        return []  # a plan, which its own tests check
    results = reply.get("results")
    if cases > 1 and (not isinstance(results, list) or len(results) != cases):
        return [f"{cases} items, other results: {body[:200]!r}"]
    answers = [*(results or []), *(reply.get("points") or [])]
    programs = reply.get("programs")  # of /adapt: a number
    for program in programs if isinstance(programs, list) else []:
        answers += program.get("answers") or []
    return [wrong for answer in answers if (wrong := _result(answer))]


def _features(body: bytes) -> list[str]:
    try:
        answers = FeatureAnswers.from_bytes(body)
    except DataError as error:
        return [f"an invalid binary answer: {error.message}"]
    figures = np.stack([answers.lower_s, answers.latency_s, answers.upper_s])
    if not (np.isfinite(figures) & (figures > 0)).all() or (np.diff(figures, axis=0) < 0).any():
        return [f"invalid figures: {figures.T.tolist()[:4]}"]
    return []


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
            return f"invalid figures: {figures}"
    return ""


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
