"""Which policy serves an application best: Teola's, the usual ones, and orders tried at random."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.planning.application.graph import Application
from cdmpp.planning.application.simulate import Policy, Run, simulate
from cdmpp.replay import Graph, Node

#: Up to so many primitives all their orders are tried.
EXHAUSTIVE_PRIMITIVES = 5


@dataclass(frozen=True)
class Found:
    """The best run, what it ran, and the runs of the simpler ways by name."""

    run: Run
    app: Application
    policy: str
    baselines: dict[str, Run]
    steps: int


def search(
    whole: Application,
    split: Application,
    arrivals_s: Sequence[float],
    watch: SearchControl,
    seed: int = 0,
    max_steps: int | None = None,
    answer: Callable[[Found], dict[str, Any]] | None = None,
) -> Found:
    """The policy of the least mean latency.

    Parameters
    ----------
    whole : Application
        Primitives as modules have them.
    split : Application
        The same with primitives divided into parts that can begin earlier; may be ``whole`` itself.
    arrivals_s : sequence of float
    watch : SearchControl
    seed : int
        Of the random orders.
    max_steps : int, optional
        Orders to try.
    answer : callable, optional
        Makes the answer so far for the watch.
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

    # A simpler way may be the best one: batches that a chain holds back can be fuller.
    consider(baselines["modules_in_turn"], whole.chained(), "modules in turn")
    consider(baselines["no_batching"], whole, "no batching")
    for suffix, app in apps.items():
        consider(simulate(app, arrivals_s, Policy()), app, "first come" + suffix)
        depths = tuple(app.depths())
        for by_request, name in ((True, "topology-aware"), (False, "deepest first")):
            run = simulate(app, arrivals_s, Policy(priority=depths, by_request=by_request))
            consider(run, app, name + suffix)
    assert best is not None
    bound, steps = whole_bound(apps.values(), arrivals_s), 0
    for app, policy in _orders(list(apps.values()), seed):
        if watch.expired or (max_steps is not None and steps >= max_steps) or best[0] <= bound * (1 + 1e-12):
            break
        consider(simulate(app, arrivals_s, policy), app, "searched order")
        steps += 1
        found = Found(best[1], best[2], best[3], baselines, steps)
        watch.report(best=best[0], bound=bound, answer=answer and partial(answer, found))
    return Found(best[1], best[2], best[3], baselines, steps)


def whole_bound(apps: Iterable[Application], arrivals_s: Sequence[float]) -> float:
    """The least of the ways' bounds: the search may choose between them."""
    return min(app.bound_s(arrivals_s) for app in apps)


def _orders(apps: Sequence[Application], seed: int) -> Iterator[tuple[Application, Policy]]:
    """Priorities of the primitives: all orders of few primitives, else random ones without end."""
    random = np.random.default_rng(seed)
    few = [app for app in apps if len(app.primitives) <= EXHAUSTIVE_PRIMITIVES]
    for app in few:
        for order in itertools.permutations(range(len(app.primitives))):
            for by_request, batching in itertools.product((True, False), (True, False)):
                yield app, Policy(batching, tuple(map(float, order)), by_request)
    many = [app for app in apps if len(app.primitives) > EXHAUSTIVE_PRIMITIVES]
    while many:
        for app in many:
            depths = np.array(app.depths())
            # Around the topology-aware order: near it at first, anywhere in the end.
            noise = random.normal(size=len(depths)) * random.exponential() * depths.max()
            yield app, Policy(True, tuple((depths + noise).tolist()), bool(random.integers(2)))


def replay_graph(app: Application, run: Run, arrivals_s: Sequence[float]) -> Graph:
    """A run as a graph to replay: batches in their order on their devices, arrivals as gaps before them.

    Replayed, its batches start and end when the simulation says.
    """
    batch_of = {member: b for b, batch in enumerate(run.batches) for member in batch.members}
    nodes = [Node(f"arrival {r}", f"arrival {r}", at, kind="gap") for r, at in enumerate(arrivals_s)]
    for b, batch in enumerate(run.batches):
        deps: dict[str, None] = {}
        for request, primitive in batch.members:
            before = app.primitives[primitive].after
            for one in before:
                deps[f"batch {batch_of[request, one]}"] = None
            if not before:
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
