"""Search for the policy with the least mean latency: Teola's, common ones, and random orders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.request import Answer
from cdmpp.planning.application.graph import Application
from cdmpp.planning.application.simulate import Policy, Run, simulate
from cdmpp.replay import Graph, Node

#: Most primitives for which all orders are tried.
EXHAUSTIVE_PRIMITIVES = 5


@dataclass(frozen=True)
class Incumbent:
    """The best run so far, its application and policy, and the runs of the baselines by name."""

    run: Run
    app: Application
    policy: str
    baselines: dict[str, Run]
    steps: int


def search(
    whole: Application,
    split: Application,
    arrivals_s: Sequence[float],
    control: SearchControl,
    seed: int = 0,
    max_steps: int | None = None,
    describe: Callable[[Incumbent], Answer] | None = None,
) -> Incumbent:
    """The policy with the least mean latency.

    Parameters
    ----------
    whole : Application
        Primitives that are not split.
    split : Application
        Primitives divided into parts that can start earlier; may be ``whole`` itself.
    arrivals_s : sequence of float
    control : SearchControl
    seed : int
        Seed of the random orders.
    max_steps : int, optional
        Largest number of orders to try.
    describe : callable, optional
        Makes the plan so far, for progress reports.
    """
    baselines = {
        "modules_in_turn": simulate(whole.chained(), arrivals_s, Policy()),
        "no_batching": simulate(whole, arrivals_s, Policy(batching=False)),
        "first_come": simulate(whole, arrivals_s, Policy()),
    }
    apps = {"": whole} if split is whole else {"": whole, ", split": split}
    best: tuple[float, Run, Application, str] | None = None

    def consider(run: Run, app: Application, name: str) -> None:
        nonlocal best
        if best is None or run.mean_s < best[0]:
            best = (run.mean_s, run, app, name)

    # A baseline may be the best one: a chain delays primitives, so that batches can be fuller.
    consider(baselines["modules_in_turn"], whole.chained(), "modules in turn")
    consider(baselines["no_batching"], whole, "no batching")
    for suffix, app in apps.items():
        consider(simulate(app, arrivals_s, Policy()), app, "first come" + suffix)
        depths = tuple(app.depths())
        for by_request, name in ((True, "topology-aware"), (False, "deepest first")):
            run = simulate(app, arrivals_s, Policy(priority=depths, by_request=by_request))
            consider(run, app, name + suffix)
    assert best is not None
    bound, steps = least_bound_s(apps.values(), arrivals_s), 0
    for app, policy in _orders(list(apps.values()), seed):
        if control.expired or (max_steps is not None and steps >= max_steps) or best[0] <= bound * (1 + 1e-12):
            break
        consider(simulate(app, arrivals_s, policy), app, "searched order")
        steps += 1
        incumbent = Incumbent(best[1], best[2], best[3], baselines, steps)
        control.report(best=best[0], bound=bound, answer=describe and partial(describe, incumbent))
    return Incumbent(best[1], best[2], best[3], baselines, steps)


def least_bound_s(apps: Iterable[Application], arrivals_s: Sequence[float]) -> float:
    """The least bound of several applications that the search chooses from."""
    return min(app.bound_s(arrivals_s) for app in apps)


def _orders(apps: Sequence[Application], seed: int) -> Iterator[tuple[Application, Policy]]:
    """Priorities of the primitives: all orders of few primitives, otherwise random ones without end."""
    random = np.random.default_rng(seed)
    small = [app for app in apps if len(app.primitives) <= EXHAUSTIVE_PRIMITIVES]
    for app in small:
        for order in itertools.permutations(range(len(app.primitives))):
            for by_request, batching in itertools.product((True, False), (True, False)):
                yield app, Policy(batching, tuple(map(float, order)), by_request)
    large = [app for app in apps if len(app.primitives) > EXHAUSTIVE_PRIMITIVES]
    while large:
        for app in large:
            depths = np.array(app.depths())
            # Random distances from the topology-aware order.
            noise = random.normal(size=len(depths)) * random.exponential() * depths.max()
            yield app, Policy(True, tuple((depths + noise).tolist()), bool(random.integers(2)))


def replay_graph(app: Application, run: Run, arrivals_s: Sequence[float]) -> Graph:
    """A run as a graph for replay: batches in their order on their devices, arrivals as gaps before them.

    In the replay, batches start and end as in the simulation.
    """
    batch_of = {member: b for b, batch in enumerate(run.batches) for member in batch.members}
    nodes = [Node(f"arrival {r}", f"arrival {r}", at, kind="gap") for r, at in enumerate(arrivals_s)]
    for b, batch in enumerate(run.batches):
        deps: dict[str, None] = {}
        for request, primitive in batch.members:
            predecessors = app.primitives[primitive].after
            for predecessor in predecessors:
                deps[f"batch {batch_of[request, predecessor]}"] = None
            if not predecessors:
                deps[f"arrival {request}"] = None
        nodes.append(
            Node(
                f"batch {b}",
                app.engines[batch.engine].device,
                app.engines[batch.engine].batch_s(sum(app.primitives[p].items for _, p in batch.members)),
                tuple(deps),
            )
        )
    return Graph(nodes, order="listed")
