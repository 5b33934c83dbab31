"""Schedules of Ansor, rebuilt: their launches equal those of the programs that Ansor's own TVM lowered."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tvm")

from cdmpp.data.importers import ansor_program
from cdmpp.errors import InvalidProgramError
from cdmpp.features import launch_summary

#: One row of each workload function and sketch, with what was read from its lowered program.
ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "ansor_lowered.json").read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{json.loads(row['workload'])[0]} {row['epilogue']}".strip())
def test_launches_equal_those_of_the_lowered_program(row: dict[str, Any]) -> None:
    program = ansor_program(row["workload"], row["steps"], epilogue=row["epilogue"])
    launches = launch_summary(program, points=32)
    assert [{name: launch[name] for name in row["launches"][0]} for launch in launches] == row["launches"]
    assert ansor_program(row["workload"], json.dumps(row["steps"]), epilogue=row["epilogue"]).hash == program.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": '["softmax_layer", 8, 8]'}, "unknown workload function 'softmax_layer'"),
        ({"workload": "matmul"}, "'matmul' is not a workload key"),
        ({"workload": '["matmul_layer", 8]'}, 'the arguments of ["matmul_layer", 8] are wrong'),
        ({"epilogue": "gelu"}, "unknown epilogue 'gelu'"),
        ({"steps": [["SP", 2]]}, 'the steps of ["matmul_layer", 16, 16, 16] cannot be replayed'),
        ({"steps": [["XX", 2, 0]]}, 'the steps of ["matmul_layer", 16, 16, 16] cannot be replayed: step XX'),
        ({"steps": "not JSON"}, 'the steps of ["matmul_layer", 16, 16, 16] cannot be replayed'),
    ],
)
def test_wrong_rows_are_named(change: dict[str, Any], message: str) -> None:
    row: dict[str, Any] = {"workload": '["matmul_layer", 16, 16, 16]', "steps": [], "epilogue": ""} | change
    with pytest.raises(InvalidProgramError) as caught:
        ansor_program(row["workload"], row["steps"], epilogue=row["epilogue"])
    assert caught.value.message.startswith(message) and caught.value.hint
