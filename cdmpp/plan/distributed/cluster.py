"""Connection to Ray, a local instance for one command or a cluster, and a function over many items in order."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from cdmpp.errors import CdmppError, MissingDependencyError, ServiceError, install_hint

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
        As :func:`cdmpp.plan.distributed.cluster.ray_cluster` yields it.
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
