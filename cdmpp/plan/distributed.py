"""Work on several processes or machines with Ray (extra ``ray``). Results equal those of one process."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from cdmpp.errors import CdmppError, FieldError, MissingDependencyError, ServiceError, install_hint
from cdmpp.llm import LLMConfig
from cdmpp.plan.base.solve import solve_priced
from cdmpp.plan.registry import PLANNERS
from cdmpp.plan.sweep import Sweep, SweepPoint, SweepResult, evaluate_point
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.budget import Progress, SearchControl
from cdmpp.predict.requests.request import Plan
from cdmpp.predict.tables.predict import AnsweredSlice, SlicePredictor, TableTask
from cdmpp.predict.tables.sources import SLICE_ROWS, open_table

#: Address of an instance of Ray on this machine that ends with the command.
LOCAL = "local"
#: Ray reads these when it is imported or started; a value of the caller stays.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no statistics are sent
    "RAY_DATA_LOG_LEVEL": "ERROR",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coming default, without a warning
}


@contextmanager
def ray_cluster(address: str | None = None, processors: int | None = None) -> Iterator[Any]:
    """The module ``ray``, connected; in the end the connection is closed and a local instance is stopped.

    A program that has called ``ray.init`` itself keeps its own connection.

    Parameters
    ----------
    address : str, optional
        ``HOST:PORT`` or ``auto``. Default: ``RAY_ADDRESS`` where it is set, else an instance on
        this machine.
    processors : int, optional
        Processors that an instance on this machine uses; default: all.

    Raises
    ------
    MissingDependencyError
        Ray is not installed.
    ServiceError
        There is no cluster at the address.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise MissingDependencyError("--ray needs the package ray", hint=install_hint("ray")) from None
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    options: dict[str, Any] = {"include_dashboard": False, "num_cpus": processors} if address == LOCAL else {}
    try:
        with _silent_stderr():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ServiceError(
            f"no Ray cluster at {address}: {_first_line(error)}",
            hint="start one with: ray start --head; a cluster with tokens needs RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN; without an address this machine is used",
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def cores(ray: Any) -> int:
    """Processors of the cluster, at least 1."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hide the standard error of this process: Ray's C++ part reports its log level there. Errors are exceptions."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


Item = TypeVar("Item")
Result = TypeVar("Result")


class _Worker:
    """Ray Data creates one per actor; it makes the function once and applies it.

    Errors of this package are results: Ray would log them with the code that raised them.
    """

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self._function: Callable[[Any], Any] | CdmppError
        try:
            self._function = make()
        except CdmppError as error:
            self._function = error

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        return {"result": [pickle.dumps(self._apply(pickle.loads(item))) for item in batch["item"]]}

    def _apply(self, item: Any) -> Any:
        if isinstance(self._function, CdmppError):
            return self._function
        try:
            return self._function(item)
        except CdmppError as error:
            return error


def map_on_ray(ray: Any, make: Callable[[], Callable[[Item], Result]], items: Sequence[Item]) -> Iterator[Result]:
    """Results of a function for all items, in their order, by actors on all cores of a cluster.

    Each actor takes one core and makes the function once. Ray restarts an actor whose process ends and repeats its
    items.

    Parameters
    ----------
    ray : module
        As :func:`cdmpp.plan.distributed.ray_cluster` yields it.
    make : callable
        Makes the function in a worker, for example by loading a model.
    items : sequence
        Each should take much longer than a message between processes (a millisecond).

    Raises
    ------
    CdmppError
        Of a worker.
    """
    from ray.data import ActorPoolStrategy, DataContext, ExecutionOptions, from_items

    if not items:
        return
    context = DataContext.get_current()
    context.execution_options = ExecutionOptions(preserve_order=True)
    context.enable_progress_bars = False
    results = from_items([{"item": pickle.dumps(item)} for item in items], override_num_blocks=len(items)).map_batches(
        _Worker,
        fn_constructor_args=(make,),
        batch_size=1,
        num_cpus=1,
        compute=ActorPoolStrategy(size=min(cores(ray), len(items))),
    )
    for batch in results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        for text in batch["result"].to_pylist():
            result = pickle.loads(text)
            if isinstance(result, CdmppError):
                raise result
            yield result


#: A plan this close to a bound, relative to it, is optimal.
_TOLERANCE = 1e-12
#: Seconds between two looks at the shared best plan.
_POLL_S = 0.2
_SEEDS = 2**32


class BestSoFar:
    """Best objective and highest lower bound of all seeds; an actor that the searches share.

    A search ends early when another seed has a plan at the lower bound, so that no seed can have a better one.
    """

    def __init__(self) -> None:
        self.best: float | None = None
        self.bound: float | None = None
        self._stopped = False
        self._done: dict[int, float] = {}

    def report(self, seed: int, done: float, best: float | None, bound: float | None) -> bool:
        """Take the progress of a seed; returns whether this seed's search should end."""
        self._done[seed] = done
        if best is not None and (self.best is None or best < self.best):
            self.best = best
        if bound is not None and (self.bound is None or bound > self.bound):
            self.bound = bound
        if self.best is None or self.bound is None:
            return self._stopped
        optimal = self.best <= self.bound * (1 + _TOLERANCE)
        return self._stopped or (optimal and (best is None or best > self.best))

    def stop(self) -> None:
        """Ask all searches to return their best plans."""
        self._stopped = True

    def progress(self) -> tuple[float, float | None, float | None]:
        """Mean share of the work of the seeds that have begun, best and bound."""
        done = sum(self._done.values()) / len(self._done) if self._done else 0.0
        return done, self.best, self.bound


def solve_seed(
    kind: str, value: dict[str, Any], prices: Sequence[Prediction], seed: int, shared: Any = None
) -> Plan | CdmppError:
    """The plan of one seed, or the error that its search raised.

    Parameters
    ----------
    kind : str
        A name of :data:`cdmpp.plan.registry.PLANNERS`.
    value : dict
        The request as JSON values.
    prices : sequence of Prediction
        Answers to the request's :meth:`~cdmpp.predict.requests.request.Request.price_requests`.
    seed : int
        Replaces the request's own.
    shared : actor of BestSoFar, optional
        Receives progress and can end the search.
    """
    request = PLANNERS[kind].read({**value, "seed": seed})

    def share(done: float, best: float | None, bound: float | None) -> None:
        import ray

        if ray.get(shared.report.remote(seed, done, best, bound)):
            control.stop()

    def listen(progress: Progress) -> None:
        share(progress.done, progress.best, progress.bound)

    control = SearchControl(request.budget, None if shared is None else listen)
    try:
        plan: Plan = solve_priced(request, prices, control)
    except CdmppError as error:
        return error
    if shared is not None:
        share(1.0, plan.objective_value, plan.bound_value)
    return plan


def solve_on_ray(
    ray: Any,
    kind: str,
    value: dict[str, Any],
    prices: Sequence[Prediction],
    seeds: int | None = None,
    control: SearchControl | None = None,
) -> Plan:
    """Search a plan from several seeds, one core each, and return the best with its :attr:`Plan.seed`.

    Seeds count from the request's own. Of equal plans the one of the smallest seed is returned. A search whose worker
    ends is started again.

    Parameters
    ----------
    ray : module
        As :func:`cdmpp.plan.distributed.ray_cluster` yields it.
    kind, value, prices
        As in :func:`solve_seed`.
    seeds : int, optional
        Default: one per core of the cluster. More than there are cores are searched one after another.
    control : SearchControl, optional
        Receives progress and can end the search; each seed has the request's own budget.

    Raises
    ------
    FieldError, InfeasibleError
        The planner has no seed, or no seed has a plan.
    """
    request = PLANNERS[kind].read(value)
    if not hasattr(request, "seed"):
        raise FieldError(
            f"plans of {kind} do not depend on a seed",
            hint="leave --ray out; plans with a seed: " + ", ".join(_seeded()),
        )
    numbers = [(request.seed + i) % _SEEDS for i in range(seeds or cores(ray))]
    control = control or SearchControl()
    shared = ray.remote(num_cpus=0)(BestSoFar).remote()
    search = ray.remote(num_cpus=1, max_retries=-1)(solve_seed)
    prices_once = ray.put(list(prices))
    running = {search.remote(kind, value, prices_once, seed, shared): seed for seed in numbers}
    plans: dict[int, Plan | CdmppError] = {}
    try:
        while running:
            for task in ray.wait(list(running), timeout=_POLL_S)[0]:
                plans[running.pop(task)] = ray.get(task)
            done, best, bound = ray.get(shared.progress.remote())
            control.report(done=done, best=best, bound=bound)
            if control.expired:
                ray.get(shared.stop.remote())
    finally:
        for task in running:
            ray.cancel(task, force=True)
        ray.kill(shared)
    return best_plan(plans)


def best_plan(plans: dict[int, Plan | CdmppError]) -> Plan:
    """The plan with the smallest objective, of equal ones that of the smallest seed, with its seed.

    Raises
    ------
    CdmppError
        The error of the smallest seed, where no seed has a plan.
    """
    objectives = [(plan.objective_value, seed) for seed, plan in plans.items() if isinstance(plan, Plan)]
    if not objectives:
        raise next(plans[seed] for seed in sorted(plans))  # type: ignore[misc]
    _, seed = min(objectives)
    best = plans[seed]
    assert isinstance(best, Plan)
    return best.model_copy(update={"seed": seed})


def _seeded() -> list[str]:
    return [name for name, spec in PLANNERS.items() if any("seed" in model.model_fields for model in spec.models())]


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
    """Answers of all slices of a table, in order (:func:`cdmpp.plan.distributed.map_on_ray`).

    A worker loads the model once and reads its slices from the file, which every machine must see under the same path.

    Parameters
    ----------
    ray : module
        As :func:`cdmpp.plan.distributed.ray_cluster` yields it.
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
    (:func:`~cdmpp.plan.distributed.map_on_ray`).

    Parameters
    ----------
    ray : module
        As :func:`cdmpp.plan.distributed.ray_cluster` yields it.
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
