"""Tables predicted by Ray Data."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cdmpp.distributed.cluster import cores
from cdmpp.errors import CdmppError
from cdmpp.prediction import Predictor
from cdmpp.tables.predict import AnsweredSlice, SlicePredictor, TableTask
from cdmpp.tables.sources import SLICE_ROWS, TableSlice, open_table


def load_predictor(model: Path | None) -> Predictor:
    """The local model, with one thread: a worker has one core."""
    from cdmpp.artifact.folder import default_model
    from cdmpp.artifact.load import load_artifact
    from cdmpp.predictor import LatencyPredictor

    return LatencyPredictor(load_artifact(model or default_model()), threads=1)


class _Worker:
    """Ray Data creates one per actor; it loads the model and predicts slices.

    Errors of this package are results: Ray would log them with the code that raised them.
    """

    def __init__(self, task: TableTask, load: Callable[[], Predictor]) -> None:
        self._predict: SlicePredictor | CdmppError
        try:
            self._predict = SlicePredictor(task, load())
        except CdmppError as error:
            self._predict = error

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        return {"answer": [pickle.dumps(self._answer(pickle.loads(part))) for part in batch["slice"]]}

    def _answer(self, part: TableSlice) -> AnsweredSlice | CdmppError:
        if isinstance(self._predict, CdmppError):
            return self._predict
        try:
            return self._predict(part)
        except CdmppError as error:
            return error


def predict_slices_on_ray(
    ray: Any, task: TableTask, load: Callable[[], Predictor], rows: int = SLICE_ROWS
) -> Iterator[AnsweredSlice]:
    """Answers of all slices of a table, in order, by actors on all cores of a cluster.

    Each actor takes one core, loads the model once and reads its slices from the file, which every machine must see
    under the same path. Ray restarts an actor whose process ends and repeats its slices.

    Parameters
    ----------
    ray : module
        As :func:`cdmpp.distributed.cluster.ray_cluster` yields it.
    task : TableTask
    load : callable
        Loads the predictor in a worker.
    rows : int
        Rows of a slice.

    Raises
    ------
    CdmppError
        Of a worker.
    """
    from ray.data import ActorPoolStrategy, DataContext, ExecutionOptions, from_items

    slices = [{"slice": pickle.dumps(part)} for part in open_table(task.path).slices(rows)]
    if not slices:
        return
    context = DataContext.get_current()
    context.execution_options = ExecutionOptions(preserve_order=True)
    context.enable_progress_bars = False
    answers = from_items(slices, override_num_blocks=len(slices)).map_batches(
        _Worker,
        fn_constructor_args=(task, load),
        batch_size=1,
        num_cpus=1,
        compute=ActorPoolStrategy(size=min(cores(ray), len(slices))),
    )
    for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        for text in batch["answer"].to_pylist():
            answer = pickle.loads(text)
            if isinstance(answer, CdmppError):
                raise answer
            yield answer
