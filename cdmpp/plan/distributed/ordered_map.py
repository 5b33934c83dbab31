"""A function over many items by Ray Data, with the results in order."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from cdmpp.errors import CdmppError
from cdmpp.plan.distributed.cluster import cores

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
