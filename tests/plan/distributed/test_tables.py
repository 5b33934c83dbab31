"""Tables predicted by two Ray workers: the local answers in the local order, also when a worker is killed."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.errors import UnknownDeviceError
from cdmpp.plan.distributed import load_predictor, predict_slices_on_ray
from cdmpp.predict.interface import Predictor
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.tables.predict import SlicePredictor, TableTask, predict_slices, write_answers
from cdmpp.predict.tables.rows import TableOptions

#: Ray's own code calls what it deprecates.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::ray.*")]
ROWS = 20


@pytest.fixture(scope="module")
def task(predictor: LatencyPredictor, tmp_path_factory: pytest.TempPathFactory) -> TableTask:
    """Operators and rows with errors, in several slices of ROWS."""
    path = tmp_path_factory.mktemp("tables") / "ops.csv"
    texts = [f"linear:m={m},n=512,k=256,dtype=float16" if m % 9 else f"softmax:rows={m}" for m in range(1, 120)]
    path.write_text("program\n" + "\n".join(texts))
    return TableTask(path, TableOptions((predictor.artifact.device("t4"),)))


@pytest.fixture(scope="module")
def local(task: TableTask, predictor: LatencyPredictor) -> str:
    """Answers of one process."""
    return "".join(part.body for part in predict_slices(SlicePredictor(task, predictor)))


class KilledOnce:
    """A predictor whose process is killed at the second slice that it predicts, once."""

    def __init__(self, mark: Path) -> None:
        self._mark, self._calls, self._predictor = mark, 0, load_predictor(None)
        self.model_id = self._predictor.model_id

    def predict_queries(self, *arguments: Any) -> Any:
        self._calls += 1
        if self._calls == 2 and not self._mark.exists():
            self._mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return self._predictor.predict_queries(*arguments)


def _killed_once(mark: Path) -> Predictor:
    return KilledOnce(mark)  # type: ignore[return-value]


@pytest.mark.nightly
def test_killed_worker_loses_nothing(ray: Any, task: TableTask, local: str, tmp_path: Path) -> None:
    mark = tmp_path / "killed"
    parts = list(predict_slices_on_ray(ray, task, partial(_killed_once, mark), rows=ROWS))
    assert mark.exists()
    assert "".join(part.body for part in parts) == local
    assert (len(parts), sum(part.rows for part in parts), sum(part.failed for part in parts)) == (6, 119, 13)


@pytest.mark.nightly
def test_command_writes_the_local_answers(
    ray: Any, task: TableTask, predictor: LatencyPredictor, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("ray.parquet", "local.parquet")]
    arguments = ["predict", str(task.path), "-d", "t4", "--out"]
    result = CliRunner().invoke(app, [*arguments, str(files[0]), "--ray"])
    assert result.exit_code == 0 and "13 of 119 answers have an error; row 9:" in result.stderr, result.output
    assert CliRunner().invoke(app, [*arguments, str(files[1])]).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.nightly
def test_error_of_a_worker_is_raised(ray: Any, task: TableTask, tmp_path: Path) -> None:
    unknown = TableTask(task.path, TableOptions(("t4x",)))
    out = tmp_path / "out.csv"
    with pytest.raises(UnknownDeviceError, match="t4x"):
        write_answers(unknown, predict_slices_on_ray(ray, unknown, partial(load_predictor, None), rows=ROWS), out)
    assert list(tmp_path.iterdir()) == []
