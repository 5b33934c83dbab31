"""problem+json (RFC 9457): how every refusal of a whole request looks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

MEDIA_TYPE = "application/problem+json"
_log = logging.getLogger(__name__)

#: Where the code of a refused request stands in its ASGI scope, for the log and the metrics.
CODE_OF_PROBLEM = "cdmpp.problem"

#: Status of a refused request by error code. In a batch the same code stands in the item instead.
STATUS_BY_CODE = {
    "malformed_json": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "unknown_device": 404,
    "unknown_model": 404,
    "unknown_program": 404,
    "unknown_job": 404,
    "method_not_allowed": 405,
    "body_timeout": 408,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "invalid_request": 422,
    "invalid_program": 422,
    "unsupported_operator": 422,
    "invalid_device": 422,
    "rate_limited": 429,
    "internal_error": 500,
    "overloaded": 503,
    "not_ready": 503,
    "store_unavailable": 503,
    "deadline_exceeded": 504,
}


class SchemaViolation(BaseModel):
    """One place where a body departs from the published schema."""

    model_config = ConfigDict(extra="forbid")

    path: Annotated[str, Field(description="Where, such as items.3.program.")]
    message: Annotated[str, Field(description="What is wrong there.")]


class Problem(BaseModel):
    """Why a whole request was refused (RFC 9457)."""

    model_config = ConfigDict(extra="forbid")

    type: Annotated[str, Field(description="Always about:blank; `code` tells kinds apart.")] = "about:blank"
    title: Annotated[str, Field(description="The status in words.")]
    status: Annotated[int, Field(ge=400, le=599)]
    code: Annotated[str, Field(description="Stable identifier for machines.", pattern="^[a-z_]+$")]
    detail: Annotated[str, Field(description="What is wrong, in one line.")]
    hint: Annotated[str, Field(description="What to do about it; may be empty.")] = ""
    errors: Annotated[
        list[SchemaViolation] | None, Field(description="Of a request that is wrong: the first few places.")
    ] = None
    item: Annotated[int | None, Field(ge=0, description="With strict: position of the failed item.")] = None
    id: Annotated[str | None, Field(description="With strict: id of the failed item.")] = None


class ProblemError(Exception):
    """Raised anywhere below a route; becomes a problem+json answer.

    Parameters
    ----------
    code : str
        A key of :data:`STATUS_BY_CODE`, or any other together with ``status``.
    detail, hint : str
    status : int, optional
        Another status than the code's usual one.
    headers : mapping, optional
    errors, item, id
        As in :class:`Problem`.
    """

    def __init__(
        self,
        code: str,
        detail: str,
        hint: str = "",
        *,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        errors: list[SchemaViolation] | None = None,
        item: int | None = None,
        id: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status if status is not None else STATUS_BY_CODE[code]
        self.headers = {name.lower(): value for name, value in (headers or {}).items()}
        self.problem = Problem(
            title=_phrase(self.status),
            status=self.status,
            code=code,
            detail=detail,
            hint=hint,
            errors=errors,
            item=item,
            id=id,
        )

    def response(self) -> Response:
        """The answer to send."""
        return Response(
            self.problem.model_dump_json(exclude_none=True), self.status, headers=self.headers, media_type=MEDIA_TYPE
        )


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def install(app: FastAPI) -> None:
    """Make every error of the application a problem+json."""

    async def on_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)
        return answer(request, error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        codes = {404: "not_found", 405: "method_not_allowed"}
        hints = {404: "GET /openapi.json lists the paths", 405: "the Allow header lists the methods"}
        problem = ProblemError(
            codes.get(error.status_code, "http_error"),
            f"{request.method} {request.url.path[:200]}: {error.detail}",
            hints.get(error.status_code, ""),
            status=error.status_code,
            headers=error.headers,
        )
        if error.status_code == 405:
            problem.headers |= _allowed(request)
        return answer(request, problem)

    async def on_bug(request: Request, error: Exception) -> Response:
        # Starlette logs nothing itself and raises again after the answer: uvicorn logs the traceback.
        return answer(request, internal_error())

    def answer(request: Request, problem: ProblemError) -> Response:
        request.scope[CODE_OF_PROBLEM] = problem.problem.code
        return problem.response()

    app.add_exception_handler(ProblemError, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)


def _allowed(request: Request) -> dict[str, str]:
    """The Allow header of a path with several methods; the routing names those of one route alone."""
    path = getattr(request.scope.get("route"), "path", None)
    methods = request.app.openapi()["paths"].get(path, {})
    return {"allow": ", ".join(sorted(method.upper() for method in methods))} if methods else {}


def internal_error() -> ProblemError:
    """What a client hears of a bug: nothing about the inside."""
    return ProblemError(
        "internal_error", "the service failed on this request", "this is a bug; the service's log says more"
    )
