"""``strict: true``: one faulty item refuses the whole request.

Without ``strict``, a program is any operator object, and faults are errors of items. With it, the published schema
has a model of every operator and of the device specification, and a body that violates it gets 422. A schema cannot
express two kinds of fault: an unknown device name or program hash (404), and an item whose fields contradict each
other or whose TIR cannot be read (409).
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, InvalidDeviceError, InvalidProgramError, violation_text
from cdmpp.predict.predictor import ErrorInfo
from cdmpp.programs.operators import SPEC_TYPES, make_operator, operator_types
from cdmpp_server.fields import TextProgram
from cdmpp_server.openapi import REF
from cdmpp_server.predict.schema import Item
from cdmpp_server.problems import ProblemError

_BOUNDS = {
    "integer": (("ge", "minimum"), ("le", "maximum")),
    "number": (("ge", "minimum"), ("le", "maximum")),
    "array": (("minLength", "minItems"), ("maxLength", "maxItems")),
}


def check_item(position: int, item: Item) -> None:
    """Raise :class:`ProblemError` (422) when an item violates the strict schema."""
    try:
        if isinstance(item.program, dict):
            _check_operator(item.program)
        if isinstance(item.device, dict):
            _check_device(item.device)
    except CdmppError as error:
        raise refusal(position, item.id, ErrorInfo.of(error), 422) from None


def refusal(position: int, id: str | None, error: ErrorInfo, status: int | None = None) -> ProblemError:
    """The problem for the error of an item."""
    if status is None:
        status = 404 if error.code in ("unknown_device", "unknown_program") else 409
    return ProblemError(
        error.code, f"items.{position}: {error.message}", error.hint, status=status, item=position, id=id
    )


def _check_operator(fields: dict[str, Any]) -> None:
    kind = operator_types().get(fields["operator"])
    if kind is None:
        make_operator(fields)  # raises, with the list of operators
        return
    try:
        kind.model_validate(fields, strict=True)
    except ValidationError as error:
        make_operator(fields)  # raises, with the fields of the operator
        # Here only values remain that lax validation accepts (1 for true).
        raise InvalidProgramError(f"{fields['operator']}: {_first(error)}") from None


def _check_device(fields: dict[str, Any]) -> None:
    try:
        DeviceSpec.model_validate(fields)
    except ValidationError as error:
        # An error without a location is the rule between fields: 409, from `predict`.
        if any(problem["loc"] for problem in error.errors(include_url=False, include_input=False)):
            raise InvalidDeviceError(
                f"device: {_first(error)}", hint="see DeviceSpecification in /openapi.json"
            ) from None


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {violation_text(problem['type'], problem['msg'])}"


def strict_schemas() -> dict[str, Any]:
    """Component schemas of the strict programs and of a device specification, by name."""
    schemas: dict[str, Any] = {}
    for kind in SPEC_TYPES:
        schema = kind.model_json_schema(ref_template=REF)
        # It identifies the form of the program, so it is required even with one possible value.
        schema["required"] = ["operator", *(f for f in schema["required"] if f != "operator")]
        schema["properties"]["operator"].pop("default", None)
        schemas[f"{kind.__name__}Operator"] = schema
    device = DeviceSpec.model_json_schema(ref_template=REF)
    schemas |= device.pop("$defs", {})  # components are on one level
    schemas["DeviceSpecification"] = device
    _name_bounds(schemas)
    return schemas


def _name_bounds(schema: Any) -> None:
    """Rename bounds: pydantic writes those after a validator under names that JSON Schema ignores."""
    if isinstance(schema, list):
        for part in schema:
            _name_bounds(part)
    elif isinstance(schema, dict):
        for name, keyword in _BOUNDS.get(str(schema.get("type")), ()):
            if name in schema:
                schema[keyword] = schema.pop(name)
        for part in schema.values():
            _name_bounds(part)


def strict_program() -> dict[str, Any]:
    """Schema of a program in a strict request."""
    names = [f"{kind.__name__}Operator" for kind in SPEC_TYPES] + ["TvmJsonProgram", "TvmScriptProgram", "HashProgram"]
    text = TypeAdapter(TextProgram).json_schema()
    return {"oneOf": [{"$ref": REF.format(model=name)} for name in names] + [text]}


def strict_device(name_schema: dict[str, Any]) -> dict[str, Any]:
    """Schema of a device in a strict request: a name, or a whole specification."""
    return {"anyOf": [name_schema, {"$ref": REF.format(model="DeviceSpecification")}]}
