"""Plans searched from many seeds at the same time; the best of them is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdmpp.errors import CdmppError, FieldError
from cdmpp.plan.base.solve import solve_priced
from cdmpp.plan.distributed.cluster import cores
from cdmpp.plan.registry import PLANNERS
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.budget import Progress, SearchControl
from cdmpp.predict.requests.request import Plan

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
        As :func:`cdmpp.plan.distributed.cluster.ray_cluster` yields it.
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
    found = [(plan.objective_value, seed) for seed, plan in plans.items() if isinstance(plan, Plan)]
    if not found:
        raise next(plans[seed] for seed in sorted(plans))  # type: ignore[misc]
    _, seed = min(found)
    best = plans[seed]
    assert isinstance(best, Plan)
    return best.model_copy(update={"seed": seed})


def _seeded() -> list[str]:
    return [name for name, spec in PLANNERS.items() if any("seed" in model.model_fields for model in spec.models())]
