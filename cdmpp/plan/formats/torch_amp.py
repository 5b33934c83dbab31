"""Types of the modules of a torch model, from a precision plan; ``torch_amp_apply`` beside it applies them."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.formats.registry import Exported, Imported, PlanExporter, RequestImporter
from cdmpp.plan.formats.text import read_json
from cdmpp.plan.precision.schema import PrecisionPlan
from cdmpp.predict.requests.request import Answer, Name, Request

#: Types that a torch module computes in, forward and backward.
TYPES = ("float16", "bfloat16", "float32")


class TorchAmpExporter(PlanExporter):
    """Writes a JSON object: module name to type, for one device of the plan."""

    kinds = ("precision",)

    device: Name | None = Field(None, description="Device of the plan, by name; default: the only one.")

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """The types of one device; operators are the modules of the same name."""
        assert isinstance(plan, PrecisionPlan)
        by_name = {device.name: device.dtypes for device in plan.devices}
        if self.device is None and len(by_name) > 1:
            raise FieldError.at(
                "device",
                "the plan has several devices, and a map is for one",
                hint="give the option device: one of " + ", ".join(by_name),
            )
        name = self.device if self.device is not None else next(iter(by_name))
        if name not in by_name:
            raise FieldError.at("device", f"{name!r} is not in the plan", hint="one of " + ", ".join(by_name))
        types = by_name[name]
        integer = [operator for operator, dtype in types.items() if dtype not in TYPES]
        if integer:
            raise FieldError.at(
                "operators",
                f"{', '.join(integer[:5])} compute in {types[integer[0]]}, for which torch has no training",
                hint=f"leave {', '.join(TYPES)} in the dtypes of the device {name!r}",
            )
        notes = ["operators are modules of the same name; apply_types names those that the module does not have"]
        return Exported(json.dumps(types, indent=1) + "\n", tuple(notes))


class TorchAmpImporter(RequestImporter):
    """Reads the map: each operator has one type."""

    kinds = ("precision",)

    def read(self, text: str, kind: str) -> Imported:
        """Operators with their only type; devices, sizes and costs are missing."""
        types = read_types(text)
        operators = [{"id": name, "dtypes": [dtype]} for name, dtype in types.items()]
        return Imported({"operators": operators}, missing=("devices", "operators.0.output_elements"))


def read_types(text: str) -> dict[str, str]:
    """The map of a file. Raises FieldError: the text is not a JSON object of types."""
    types = read_json(text, "give a file of the format torch-amp")
    if not isinstance(types, dict) or not types:
        raise FieldError("the file is not a JSON object", hint='module names to types: {"layers.0": "float16"}')
    for name, dtype in types.items():
        if not isinstance(dtype, str) or dtype not in TYPES:
            raise FieldError.at(name, f"{dtype!r} is no type", hint="one of " + ", ".join(TYPES))
    return types
