"""OpenAPI descriptions of the planners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from cdmpp.plan.registry import PLANNERS
from cdmpp.predict.requests.request import Answer
from cdmpp_server.deadline import DESCRIPTION
from cdmpp_server.feature import Schema
from cdmpp_server.jobs.schema import Submitted
from cdmpp_server.openapi import BODY_PROBLEMS, REF, add_answer, add_body, add_models, add_problems, ref
from cdmpp_server.plan.examples import EXAMPLE_REQUESTS
from cdmpp_server.settings import Settings

_MEANING = {
    409: "The request fits the schema, but its parts contradict each other, or a program or device does not exist "
    "(invalid_field); no plan keeps its limits (infeasible); or it needs more memory than a plan may use "
    "(plan_too_large). `errors` names the field.",
    429: "The sender has as many jobs as one sender may have (quota_exceeded), or exceeds its rate limit "
    "(rate_limited); retry after the seconds in Retry-After.",
    503: "Too much work waits (overloaded), or the database of jobs or programs cannot be used "
    "(store_unavailable); retry later.",
}
_PARAMETERS: list[dict[str, Any]] = [
    {
        "name": "Prefer",
        "in": "header",
        "required": False,
        "description": "`respond-async`: make it a job, independent of its budget (RFC 7240).",
        "schema": {"type": "string"},
    }
]


def describe_plan(document: Schema, schemas: Schema, settings: Settings) -> None:
    """Add bodies, answers and problems of every planner."""
    add_models(schemas, Submitted)
    forms = {spec.name: spec.models() for spec in PLANNERS.values()}
    answers = {name: list(dict.fromkeys(model.answer_model() for model in models)) for name, models in forms.items()}
    refs = _add_apart(schemas, [model for part in (forms, answers) for models in part.values() for model in models])
    links = _job_links(document)
    for spec in PLANNERS.values():
        operation = document["paths"][spec.path]["post"]
        operation["operationId"] = f"plan_{spec.name.replace('-', '_')}"
        operation["description"] += (
            f"\n\nThe response is the plan where there is no search or `budget_s` is at most "
            f"{settings.max_inline_s:g}; otherwise, and with `Prefer: respond-async`, it is a job. "
            f"{DESCRIPTION}"
        )
        operation["parameters"] = [dict(parameter) for parameter in _PARAMETERS]
        add_body(operation, _any_of([refs[model] for model in forms[spec.name]]), EXAMPLE_REQUESTS[spec.name])
        add_answer(operation, _any_of([refs[model] for model in answers[spec.name]]), "The answer.")
        add_answer(operation, ref("Submitted"), "A job: see GET /jobs/{job_id}.", status=202)
        operation["responses"]["202"]["headers"] = {
            "Location": {"description": "URL of the job.", "schema": {"type": "string"}}
        }
        operation["responses"]["202"]["links"] = links
        add_problems(operation, 409, 429, *BODY_PROBLEMS, meaning=_MEANING)


def _job_links(document: Schema) -> Schema:
    """OpenAPI links from a submitted job to the operations on it."""
    paths = document["paths"]
    job_path = paths["/jobs/{job_id}"]
    operations = {
        "job": job_path["get"],
        "cancel": paths["/jobs/{job_id}/cancel"]["post"],
        "remove": job_path["delete"],
    }
    return {
        name: {"operationId": operation["operationId"], "parameters": {"job_id": "$response.body#/job_id"}}
        for name, operation in operations.items()
    }


def _add_apart(schemas: Schema, models: Sequence[type[BaseModel]]) -> dict[type[BaseModel], Schema]:
    """Add models to the components, and return a reference to each. Planners may have models of equal names."""
    # All at once: pydantic then gives different names to models of equal names.
    distinct = list(dict.fromkeys(models))
    made, parts = models_json_schema([(model, _mode(model)) for model in distinct], ref_template="{model}")
    # The other endpoints may have models of these names, too.
    names = {name: name if name not in schemas else f"Plan{name}" for name in parts["$defs"]}

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {
            key: REF.format(model=names[item])
            if key == "$ref"
            else {value: REF.format(model=names[to]) for value, to in item.items()}
            if key == "mapping" and all(isinstance(to, str) for to in item.values())
            else renamed(item)
            for key, item in value.items()
        }

    schemas.update({names[name]: renamed(schema) for name, schema in parts["$defs"].items()})
    return {model: renamed(made[model, _mode(model)]) for model in distinct}


def _mode(model: type[BaseModel]) -> JsonSchemaMode:
    """Answers are described as they are serialized, computed fields included."""
    return "serialization" if issubclass(model, Answer) else "validation"


def _any_of(choices: list[Schema]) -> Schema:
    return choices[0] if len(choices) == 1 else {"anyOf": choices}
