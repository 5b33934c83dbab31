"""problem+json (RFC 9457): the form of every error response."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException

from cdmpp_server.schema_base import AnswerModel

MEDIA_TYPE = "application/problem+json"

#: Key of the ASGI scope that holds the code of a refused request, for the log and the metrics.
CODE_OF_PROBLEM = "cdmpp.problem"

#: Key of the ASGI scope that holds the :class:`ProblemError` of a request that its connection must not serve.
REFUSED = "cdmpp.refused"

#: Status of a refused request by error code. The error of one item in a batch has the same code.
STATUS_BY_CODE = {
    code: status
    for status, codes in {
        400: ("malformed_json",),
        401: ("unauthorized",),
        403: ("forbidden",),
        404: ("not_found", "unknown_device", "unknown_model", "unknown_program", "unknown_job"),
        405: ("method_not_allowed",),
        408: ("body_timeout", "header_timeout"),
        413: ("body_too_large",),
        415: ("unsupported_media_type",),
        421: ("unknown_host",),
        422: ("invalid_request", "invalid_program", "unsupported_operator", "invalid_device"),
        429: ("rate_limited", "quota_exceeded"),
        431: ("headers_too_large",),
        500: ("internal_error",),
        503: ("overloaded", "not_ready", "store_unavailable"),
        504: ("deadline_exceeded",),
    }.items()
    for code in codes
}
#: Default Retry-After of a 503 in seconds.
_RETRY_S = {"store_unavailable": 5}


class SchemaViolation(AnswerModel):
    """A part of the body that violates the published schema."""

    path: str = Field(description="Path of the value, such as items.3.program.")
    message: str = Field(description="What is wrong with the value.")


class Problem(AnswerModel):
    """Reason for which a whole request was refused (RFC 9457)."""

    type: str = Field("about:blank", description="Always about:blank; `code` identifies the kind of problem.")
    title: str = Field(description="The standard phrase of the status.")
    status: int = Field(ge=400, le=599)
    code: str = Field(description="Stable identifier for programs.", pattern="^[a-z_]+$")
    detail: str = Field(description="What is wrong, in one line.")
    hint: str = Field("", description="What to do; may be empty.")
    errors: list[SchemaViolation] | None = Field(
        None, description="The first few schema violations of an invalid request."
    )
    item: int | None = Field(None, ge=0, description="With strict: position of the failed item.")
    id: str | None = Field(None, description="With strict: id of the failed item.")


class ProblemError(Exception):
    """An error that becomes a problem+json response; raise it anywhere below a route.

    A ``code`` that is no key of :data:`STATUS_BY_CODE` needs ``status``. A 503 gets Retry-After if ``headers`` lack it.
    ``errors``, ``item``, ``id``: as in :class:`Problem`.
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
        if self.status == 503:
            self.headers.setdefault("retry-after", str(_RETRY_S.get(code, 1)))
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

    def refusal(self) -> dict[str, Any]:
        """The problem in a process's reply, as :mod:`cdmpp_server.processes` reads it."""
        problem = self.problem
        errors = [violation.model_dump() for violation in problem.errors or ()]
        fields = {"code": problem.code, "message": problem.detail, "hint": problem.hint}
        return {**fields, "status": self.status, "errors": errors}

    def response(self) -> Response:
        """Return the HTTP response."""
        return Response(
            self.problem.model_dump_json(exclude_none=True), self.status, headers=self.headers, media_type=MEDIA_TYPE
        )


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def install(app: FastAPI) -> None:
    """Convert every error of the application to a problem+json response."""

    async def on_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)
        return respond(request, error)

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
        return respond(request, problem)

    async def on_parameters(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        places = [
            SchemaViolation(path=".".join(map(str, fault["loc"][1:])), message=fault["msg"]) for fault in error.errors()
        ]
        line = f"{places[0].path}: {places[0].message}"
        hint = "GET /openapi.json has the parameters of a request"
        return respond(request, ProblemError("invalid_request", line, hint, errors=places))

    async def on_bug(request: Request, error: Exception) -> Response:
        # Starlette raises the error again after this response, and uvicorn logs the traceback.
        return respond(request, internal_error())

    def respond(request: Request, problem: ProblemError) -> Response:
        request.scope[CODE_OF_PROBLEM] = problem.problem.code
        return problem.response()

    app.add_exception_handler(ProblemError, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_parameters)
    app.add_exception_handler(Exception, on_bug)


def _allowed(request: Request) -> dict[str, str]:
    """Return the Allow header with all methods of a path; routing lists those of one route only."""
    path = getattr(request.scope.get("route"), "path", None)
    methods = request.app.openapi()["paths"].get(path, {})
    return {"allow": ", ".join(sorted(method.upper() for method in methods))} if methods else {}


def internal_error() -> ProblemError:
    """Problem of a bug, without internal details (500)."""
    return ProblemError(
        "internal_error", "the service failed on this request", "this is a bug; the service's log has the details"
    )
