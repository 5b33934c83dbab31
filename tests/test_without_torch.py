"""Predictions need neither torch nor TVM; each check runs in a fresh process that cannot import them."""

from pathlib import Path

import pytest

from tests.waiting import ROOT, run_python

pytestmark = pytest.mark.slow

#: Packages of other extras: an import of one fails as if it were not installed.
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.split(".")[0])

sys.meta_path.insert(0, Blocked())
"""
HEAVY = ("torch", "tvm", "tvm_ffi", "xgboost", "onnxscript")

RECORDS = """
from cdmpp.predict.predictor import LatencyPredictor
base = LatencyPredictor.load()
texts = [f"linear:m={64 * i},n=1024,k={512 + 64 * (i % 7)},dtype=float16" for i in range(1, 21)]
records = [(t, 1.5 * p.latency_s) for t, p in zip(texts, base.predict(texts, "rtx-4090"))]
adapted = base.adapt(records, "rtx-4090")
"""
PREDICT = """
from cdmpp.predict.predictor import LatencyPredictor
[answer] = LatencyPredictor.load({folder!r}).predict(["linear:m=512,n=4096,k=1024,dtype=float16"], "rtx-4090")
assert answer.latency_s > 0, answer
print(answer.latency_s)
"""


def run(code: str, *blocked: str) -> str:
    done = run_python("-c", BLOCK.format(blocked=blocked) + code)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_prediction_without_torch() -> None:
    run(PREDICT.format(folder=None) + "assert 'torch' not in sys.modules", *HEAVY)


def test_torch_is_not_imported_where_it_is_there() -> None:
    run(PREDICT.format(folder=None) + "assert not {'torch', 'tvm'} & set(sys.modules)")


def test_a_model_file_at_the_command_line_without_torch() -> None:
    model = ROOT / "examples" / "small_resnet.onnx"
    code = f"""
sys.argv = ["cdmpp", "predict", {str(model)!r}, "--device", "t4"]
from cdmpp.cli.main import main
main()
"""
    assert "total on t4" in run(code, *HEAVY, "sklearn", "scipy", "pyarrow")


def test_who_asks_for_the_network_hears_what_is_missing() -> None:
    code = """
from cdmpp.errors import MissingDependencyError
from cdmpp.model.artifact.folder import default_model
from cdmpp.model.artifact.load import load_artifact
try:
    load_artifact(default_model()).network
except MissingDependencyError as error:
    print(error.hint)
"""
    assert "'.[train]'" in run(code, "torch")


@pytest.mark.parametrize("package", ["onnxruntime", "onnx"])
def test_without_the_runtime_the_extra_is_named(package: str) -> None:
    code = """
from cdmpp.errors import MissingDependencyError
from cdmpp.predict.predictor import LatencyPredictor
try:
    LatencyPredictor.load()
except MissingDependencyError as error:
    print(error.message, error.hint)
"""
    printed = run(code, package)
    assert package in printed and "'.[predict]'" in printed


def test_adapting_without_torch(tmp_path: Path) -> None:
    folder = tmp_path / "adapted"
    run(RECORDS + f"adapted.save({str(folder)!r})", *HEAVY)
    alone = run(PREDICT.format(folder=str(folder)), *HEAVY)
    assert float(alone) > 0 and run(PREDICT.format(folder=str(folder))) == alone


def test_the_service_without_torch() -> None:
    code = """
from fastapi import FastAPI
from cdmpp_server.app import create_app
from cdmpp_server.settings import Settings
assert isinstance(create_app(Settings()), FastAPI)
"""
    run(code + PREDICT.format(folder=None), *HEAVY, "sklearn", "scipy")


def test_torch_modules_name_the_extra_without_torch() -> None:
    code = """
from cdmpp.errors import MissingDependencyError
from cdmpp.predict.predictor import LatencyPredictor
try:
    LatencyPredictor.load().predict_module(object(), (), "t4")
except MissingDependencyError as error:
    print(error.message, error.hint)
"""
    assert "'.[torch]'" in run(code, *HEAVY)
