"""Messages about a broken schema point at the value's own fields."""

from typing import Any

import pytest
from pydantic import ValidationError

from cdmpp import FieldError, make_plan
from cdmpp.plan.base.solve import places
from cdmpp.simulate.emulator.schema import SimulateRequest

STAGE = {"forward_s": 1, "backward_s": 2}
PASS = {"stage": 0, "pass": "F", "micro_batch": 0}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"micro_batches": 0}, "micro_batches"),
        ({"micro_batches": [0, -1]}, "micro_batches.1"),
        ({"micro_batches": "four"}, "micro_batches"),
        ({"schedule": "none"}, "schedule"),
        ({"schedule": {}}, "schedule.order"),
        ({"schedule": {"order": [[{**PASS, "stage": -1}]]}}, "schedule.order.0.0.stage"),
        ({"schedule": {"order": [[{"stage": 0, "pass": "F"}]]}}, "schedule.order.0.0.micro_batch"),
        ({"transfer_s": -1.0}, "transfer_s"),
        ({"stages": [{**STAGE, "colour": 1}]}, "stages.0.colour"),
        ({"stages": [{**STAGE, "forward_s": float("nan")}]}, "stages.0.forward_s"),
    ],
)
def test_the_path_is_one_of_the_value(change: dict[str, Any], path: str) -> None:
    value = {"stages": [STAGE], "micro_batches": 2, **change}
    with pytest.raises(ValidationError) as error:
        SimulateRequest.model_validate(value)
    assert {where for where, _ in places(error.value, value)} == {path}
    with pytest.raises(FieldError) as refused:
        make_plan("simulate", value)
    assert refused.value.path == path


def test_only_what_was_meant_is_said() -> None:
    value = {"stages": [STAGE], "micro_batches": 0}
    with pytest.raises(ValidationError) as error:
        SimulateRequest.model_validate(value)
    assert places(error.value, value) == [("micro_batches", "Input should be greater than or equal to 1")]
