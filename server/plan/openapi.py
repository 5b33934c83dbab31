"""What the endpoints of plans add to the published schema."""

from __future__ import annotations

from typing import Any

from cdmpp.planning.kinds import KINDS
from server.deadline import DESCRIPTION
from server.jobs.wire import Submitted
from server.openapi import BODY_PROBLEMS, add_answer, add_body, add_models, add_problems, ref
from server.room import Schema
from server.settings import Settings

_MEANING = {
    404: "The model is not loaded (unknown_model).",
    409: "The request fits the schema, but parts of it do not fit together, or a program or device is none "
    "(invalid_field); no plan keeps its limits (infeasible); or it needs more memory than a plan may use "
    "(plan_too_large). `errors` names the field.",
    503: "Too much work waits (overloaded), or the database of jobs or programs cannot be used "
    "(store_unavailable); retry later.",
}
_PARAMETERS: list[dict[str, Any]] = [
    {
        "name": "model",
        "in": "query",
        "required": False,
        "description": "Which model prices the programs: a `model_id` of GET /models.",
        "schema": {"type": "string"},
    },
    {
        "name": "Prefer",
        "in": "header",
        "required": False,
        "description": "`respond-async`: make it a job, whatever its budget (RFC 7240).",
        "schema": {"type": "string"},
    },
]


def describe_plan(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Bodies, answers and problems of every kind."""
    add_models(schemas, Submitted)
    for kind in KINDS.values():
        models = kind.models()
        answers = list(dict.fromkeys(model.answer_model for model in models))
        add_models(schemas, *models, *answers)
        operation = document["paths"][kind.path]["post"]
        operation["operationId"] = f"plan_{kind.name.replace('-', '_')}"
        operation["description"] += (
            f"\n\nAnswered at once where there is no search or `budget_s` is at most "
            f"{settings.max_inline_s:g}; else, and with `Prefer: respond-async`, it becomes a job. "
            f"{DESCRIPTION}"
        )
        operation["parameters"] = [dict(each) for each in _PARAMETERS]
        add_body(operation, _any_of([model.__name__ for model in models]))
        add_answer(operation, _any_of([model.__name__ for model in answers]), "The answer.")
        add_answer(operation, ref("Submitted"), "A job: see GET /jobs/{job_id}.", status=202)
        operation["responses"]["202"]["headers"] = {
            "Location": {"description": "Of the job.", "schema": {"type": "string"}}
        }
        add_problems(operation, 404, 409, *BODY_PROBLEMS, meaning=_MEANING)


def _any_of(names: list[str]) -> Schema:
    return ref(names[0]) if len(names) == 1 else {"anyOf": [ref(name) for name in names]}
