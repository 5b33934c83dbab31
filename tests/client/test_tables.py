"""Tables predicted by a service: the same answers as by a local model, with the extra ``client`` alone."""

from pathlib import Path

import pytest

from cdmpp.client import PredictorClient
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.tables.predict import SlicePredictor, TableTask, predict_slices, write_answers
from cdmpp.predict.tables.rows import TableOptions
from tests.waiting import run_python

#: Packages that the extra ``client`` does not install.
ABSENT = ("onnx", "onnxruntime", "torch", "pyarrow", "scipy", "sklearn", "matplotlib", "numba", "highspy", "ray", "tvm")
CLIENT_ONLY = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
from cdmpp.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Operators, and two rows with errors."""
    path = tmp_path_factory.mktemp("tables") / "ops.csv"
    sizes = [f"linear:m={m},n=512,k=256,dtype=float16" for m in range(1, 60)]
    path.write_text("program\n" + "\n".join([*sizes, "linear:m=0,n=1,k=1", "nothing:m=1", "relu:rows=8,cols=8"]))
    return path


@pytest.fixture(scope="module")
def local(table: Path, predictor: LatencyPredictor) -> bytes:
    """Answers of the local model as CSV."""
    task = TableTask(table, TableOptions((predictor.artifact.device("t4"),)))
    out = table.with_name("local.csv")
    write_answers(task, predict_slices(SlicePredictor(task, predictor)), out)
    return out.read_bytes()


def test_command_with_the_client_extra_alone_has_the_local_answers(url: str, table: Path, local: bytes) -> None:
    out = table.with_name("served.csv")
    done = run_python("-c", CLIENT_ONLY, "predict", table, "--device", "t4", "--url", url, "--out", out)
    assert done.returncode == 0 and "2 of 62 answers have an error" in done.stderr, done.stderr
    assert out.read_bytes() == local


def test_requests_in_progress_keep_the_order(url: str, table: Path, local: bytes) -> None:
    task = TableTask(table, TableOptions(("t4",)))
    with PredictorClient(url) as client:
        predict = SlicePredictor(task, client)
        parts = list(predict_slices(predict, at_once=4, rows=7))
    assert len(parts) == 9
    assert "".join(part.body for part in parts).encode() == local.partition(b"\n")[2]
