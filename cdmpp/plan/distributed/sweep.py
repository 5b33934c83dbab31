"""Points of a sweep evaluated by Ray workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from cdmpp.plan.distributed.ordered_map import map_on_ray
from cdmpp.plan.sweep import Sweep, SweepPoint, SweepResult, evaluate_point
from cdmpp.predict.interface import Predictor
from cdmpp.predict.llm import LLMConfig

#: Points of a message: they share a device and predicted programs.
_GROUP = 8


def evaluate_on_ray(
    ray: Any, sweep: Sweep, config: LLMConfig, load: Callable[[], Predictor], points: Sequence[SweepPoint]
) -> Iterator[SweepResult]:
    """Results of :func:`cdmpp.plan.sweep.evaluate_point`, in order
    (:func:`~cdmpp.plan.distributed.ordered_map.map_on_ray`).

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
