"""What ``import cdmpp`` may load: close to nothing.

Checked by module names rather than by a clock: a busy machine makes a timed test fail for nothing.
"""

import json

import pytest

import cdmpp
from tests.waiting import run_python

HEAVY = {
    *("fastapi", "httpx2", "hypothesis", "matplotlib", "numpy", "onnx", "pandas", "pyarrow", "pydantic", "rich"),
    *("scipy", "cdmpp_server", "sklearn", "torch", "tvm", "typer", "uvicorn", "xgboost"),
}


def modules_after(statement: str) -> set[str]:
    done = run_python("-c", f"{statement}; import json, sys; print(json.dumps(sorted(sys.modules)))")
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert modules_after("import cdmpp") & HEAVY == set()


def test_devices_need_numpy_and_pydantic_only() -> None:
    assert modules_after("import cdmpp; cdmpp.DeviceSpec") & HEAVY == {"numpy", "pydantic"}


def test_operators_need_neither_torch_nor_tvm() -> None:
    assert modules_after("import cdmpp; cdmpp.OperatorSpec") & {"torch", "tvm", "onnx", "pyarrow"} == set()


@pytest.mark.parametrize("name", cdmpp.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(cdmpp, name) is not None
    assert name in dir(cdmpp)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = cdmpp.nonsense
