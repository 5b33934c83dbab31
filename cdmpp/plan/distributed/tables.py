"""Tables, and points of a sweep, evaluated by Ray workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from cdmpp.llm import LLMConfig
from cdmpp.plan.distributed.cluster import map_on_ray
from cdmpp.plan.sweep import Sweep, SweepPoint, SweepResult, evaluate_point
from cdmpp.predict.interface import Predictor
from cdmpp.predict.tables.predict import AnsweredSlice, SlicePredictor, TableTask
from cdmpp.predict.tables.sources import SLICE_ROWS, open_table

#: A slice costs Ray about as much as some hundred rows (docs/benchmarks.md).
RAY_SLICE_ROWS = 2 * SLICE_ROWS


def load_predictor(model: Path | None) -> Predictor:
    """The local model, with one thread: a worker has one core."""
    from cdmpp.model.artifact.folder import default_model
    from cdmpp.model.artifact.load import load_artifact
    from cdmpp.predict.predictor import LatencyPredictor

    return LatencyPredictor(load_artifact(model or default_model()), threads=1)


def predict_slices_on_ray(
    ray: Any, task: TableTask, load: Callable[[], Predictor], rows: int = RAY_SLICE_ROWS
) -> Iterator[AnsweredSlice]:
    """Answers of all slices of a table, in order (:func:`cdmpp.plan.distributed.cluster.map_on_ray`).

    A worker loads the model once and reads its slices from the file, which every machine must see under the same path.

    Parameters
    ----------
    ray : module
        As :func:`cdmpp.plan.distributed.cluster.ray_cluster` yields it.
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
    return map_on_ray(ray, partial(_slice_predictor, task, load), list(open_table(task.path).slices(rows)))


def _slice_predictor(task: TableTask, load: Callable[[], Predictor]) -> SlicePredictor:
    return SlicePredictor(task, load())


#: Points of a message: they share a device and predicted programs.
_GROUP = 8


def evaluate_on_ray(
    ray: Any, sweep: Sweep, config: LLMConfig, load: Callable[[], Predictor], points: Sequence[SweepPoint]
) -> Iterator[SweepResult]:
    """Results of :func:`cdmpp.plan.sweep.evaluate_point`, in order
    (:func:`~cdmpp.plan.distributed.cluster.map_on_ray`).

    Parameters
    ----------
    ray : module
        As :func:`cdmpp.plan.distributed.cluster.ray_cluster` yields it.
    load : callable
        Loads the predictor in a worker.
    """
    groups = [points[start : start + _GROUP] for start in range(0, len(points), _GROUP)]
    return chain.from_iterable(map_on_ray(ray, partial(_evaluator, sweep, config, load), groups))


def _evaluator(
    sweep: Sweep, config: LLMConfig, load: Callable[[], Predictor]
) -> Callable[[Sequence[SweepPoint]], list[SweepResult]]:
    predictor = load()
    return lambda points: [evaluate_point(sweep, config, predictor, point) for point in points]
