"""Plans and jobs of a service as steps, shared by the sync and the async client."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from cdmpp.errors import CdmppError, DataError, FieldError, InvalidProgramError, ServiceError
from cdmpp.predict.client.answers import check, content, listed, place_of, problem_of, understood
from cdmpp.predict.client.queries import to_json
from cdmpp.predict.client.transport import Answer, Call, by_code
from cdmpp.predict.llm.read import with_configs

T = TypeVar("T")
Steps = Generator[Call, Answer, T]
#: First and longest interval between two queries of a job's state, in seconds.
FIRST_LOOK_S, LONGEST_LOOK_S = 0.1, 2.0
FINAL = ("done", "cancelled", "failed")
_ASYNC = (("prefer", "respond-async"),)


class Plans:
    """Steps of plans and jobs; caches the planners of the service.

    Parameters
    ----------
    model : str, optional
        The client's model; plans are priced by the loaded one.
    """

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._paths: dict[str, str] = {}

    def plan(self, kind: str, request: Mapping[str, Any]) -> Steps[dict[str, Any]]:
        """The answer, directly or from the job that the request became."""
        answer = yield from self._post(kind, request, wait=True)
        answer_value: dict[str, Any] = _content(answer)
        if answer.status != 202:
            return answer_value
        with understood():
            id = str(answer_value["job_id"])
        wait_s = FIRST_LOOK_S
        while True:
            job = yield from self.job(id, wait_s)
            with understood():
                if job["state"] in FINAL:
                    return answer_of(job)
            wait_s = min(LONGEST_LOOK_S, 1.5 * wait_s)

    def submit(self, kind: str, request: Mapping[str, Any]) -> Steps[str]:
        """Id of the job."""
        submitted = _content((yield from self._post(kind, request, wait=False)))
        with understood():
            return str(submitted["job_id"])

    def job(self, id: str, after_s: float = 0.0) -> Steps[dict[str, Any]]:
        """``GET /jobs/{id}``."""
        state: dict[str, Any] = content((yield Call("GET", f"/jobs/{_word(id)}", after_s=after_s)))
        return state

    def jobs(self, limit: int) -> Steps[list[dict[str, Any]]]:
        """``GET /jobs``."""
        return list(listed(content((yield Call("GET", "/jobs", params=(("limit", str(limit)),)))), "jobs"))

    def cancel(self, id: str) -> Steps[dict[str, Any]]:
        """``POST /jobs/{id}/cancel``."""
        job: dict[str, Any] = content((yield Call("POST", f"/jobs/{_word(id)}/cancel")))
        return job

    def remove(self, id: str) -> Steps[None]:
        """``DELETE /jobs/{id}``."""
        # Not retried after it may have been received: the second attempt would find no job.
        check((yield Call("DELETE", f"/jobs/{_word(id)}", once=True)))

    def _post(self, kind: str, request: Mapping[str, Any], *, wait: bool) -> Steps[Answer]:
        if self._model is not None:
            raise DataError(
                "the service prices plans with the model that is loaded",
                hint="a client without `model`; or cdmpp.make_plan with this client as the predictor",
            )
        path = yield from self._path(kind)
        try:
            body = to_json(with_configs(request)).encode()
        except InvalidProgramError as error:
            raise FieldError(f"the request: {error.message}", hint="plain JSON values") from None
        # Not retried: a job that is submitted twice would run twice.
        call = Call("POST", path, body, once=not wait, headers=() if wait else _ASYNC)
        answer = yield call
        return answer

    def _path(self, kind: str) -> Steps[str]:
        if kind not in self._paths:
            planners = listed(content((yield Call("GET", "/plans"))), "kinds")
            with understood():
                self._paths = {str(planner["kind"]): str(planner["path"]) for planner in planners}
        if kind not in self._paths:
            raise FieldError(f"no plan is called {kind!r}", hint="one of: " + ", ".join(self._paths))
        return self._paths[kind]


def answer_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a finished job.

    Raises
    ------
    CdmppError
        The class whose code the job's error has; ServiceError where somebody cancelled it.
    """
    if job["state"] == "cancelled":
        raise ServiceError("the job was cancelled", hint="its best answer so far: client.job(id)", problem="cancelled")
    error = job["error"]
    if error is not None:
        raise _raised(error["code"], error["message"], error["hint"], error["path"])
    answer: dict[str, Any] = job["answer"]
    return answer


def seconds_of(request: Mapping[str, Any]) -> float:
    """Seconds that a search may take; 0 where the request has no valid budget."""
    budget = request.get("budget_s")
    return max(0.0, min(float(budget), 3600.0)) if isinstance(budget, int | float) else 0.0


def _content(answer: Answer) -> Any:
    """As :func:`cdmpp.predict.client.answers.content`; a violation of the schema becomes a :class:`FieldError`."""
    if answer.status == 422:
        problem = problem_of(answer)
        if problem.get("code") == "invalid_request":
            raise FieldError(str(problem.get("detail", "")), hint=str(problem.get("hint", "")), path=place_of(problem))
    return content(answer)


def _raised(code: str, message: str, hint: str, path: str) -> CdmppError:
    kind = by_code().get(code)
    if kind is not None and issubclass(kind, FieldError):
        return kind(message, hint=hint, path=path)
    if kind is not None and kind is not ServiceError:
        return kind(message, hint=hint)
    return ServiceError(message, hint=hint, problem=code)


def _word(id: str) -> str:
    """An id as part of a path."""
    if not id.isalnum() or not id.isascii():
        raise ServiceError(f"{id[:80]!r} names no job", status=404, problem="unknown_job")
    return id
