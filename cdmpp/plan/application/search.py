"""Search for the policy with the least mean latency: Teola's, common ones, and random orders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cdmpp.plan.application.simulate import Application, Policy, Run, simulate, without_idle_time
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.request import Answer
from cdmpp.simulate.replay import Graph, Node

#: Most primitives for which all orders are tried.
EXHAUSTIVE_PRIMITIVES = 5
#: Most primitives of all requests together for which all choices of the engines are tried, and the number of best
#: policies that the search keeps.
EXHAUSTIVE_TASKS, PROMISING = 10, 4
#: Choices that are tried for each of these orders, and steps without improvement that end the search for choices.
MOST_CHOICES, PATIENCE_STEPS = 20_000, 2000


@dataclass(frozen=True)
class BestRun:
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
    describe: Callable[[BestRun], Answer] | None = None,
) -> BestRun:
    """The policy with the least mean latency.

    Parameters
    ----------
    whole : Application
        Primitives that are not split.
    split : Application
        Primitives divided into parts that can start earlier; may be ``whole`` itself.
    seed : int
        Seed of the random orders.
    max_steps : int, optional
        Largest number of orders to try.
    describe : callable, optional
        Makes the plan so far, for progress reports.
    """
    return _Search(whole, split, arrivals_s, control, seed, max_steps, describe).run()


@dataclass(frozen=True)
class _Tried:
    """A simulated policy."""

    run: Run
    app: Application
    policy: Policy
    name: str


class _Search:
    def __init__(
        self,
        whole: Application,
        split: Application,
        arrivals_s: Sequence[float],
        control: SearchControl,
        seed: int,
        max_steps: int | None,
        describe: Callable[[BestRun], Answer] | None,
    ) -> None:
        self.apps = {"": whole} if split is whole else {"": whole, ", split": split}
        self.arrivals_s, self.control, self.max_steps, self.describe = arrivals_s, control, max_steps, describe
        self.random = np.random.default_rng(seed)
        self.bound_s = least_bound_s(self.apps.values(), arrivals_s)
        self.steps = self.improved_at = 0
        #: The best policies so far, best first.
        self.promising: list[_Tried] = []
        chained, alone = whole.chained(), Policy(batching=False)
        # A baseline may be the best one: a chain delays primitives, so that batches can be fuller.
        self.baselines = {
            "modules_in_turn": self._simulate(chained, Policy(), "modules in turn"),
            "no_batching": self._simulate(whole, alone, "no batching"),
            "first_come": self._simulate(whole, Policy(), "first come"),
        }

    def run(self) -> BestRun:
        for suffix, app in self.apps.items():
            if suffix:
                self._simulate(app, Policy(), "first come" + suffix)
            depths = tuple(app.depths())
            for by_request, name in ((True, "topology-aware"), (False, "deepest first")):
                self._simulate(app, Policy(priority=depths, by_request=by_request), name + suffix)
        endless = any(len(app.primitives) > EXHAUSTIVE_PRIMITIVES for app in self.apps.values())
        for app, policy in _orders(list(self.apps.values()), self.random):
            if self._over():
                break
            self._step(app, policy)
            if endless and not self._over():
                self._step_with_other_choices()
        tasks = len(self.arrivals_s) * max(len(app.primitives) for app in self.apps.values())
        if tasks <= EXHAUSTIVE_TASKS and all([self._every_choice(tried) for tried in list(self.promising)]):
            return self._incumbent()
        while not self._over() and self.steps - self.improved_at < PATIENCE_STEPS:
            self._step_with_other_choices()
        return self._incumbent()

    def _incumbent(self) -> BestRun:
        best = self.promising[0]
        return BestRun(best.run, best.app, best.name, self.baselines, self.steps)

    def _over(self) -> bool:
        spent = self.max_steps is not None and self.steps >= self.max_steps
        return spent or self.control.expired or self.promising[0].run.mean_s <= self.bound_s * (1 + 1e-12)

    def _simulate(self, app: Application, policy: Policy, name: str) -> Run:
        run = simulate(app, self.arrivals_s, policy)
        if any(policy.choices):
            run = without_idle_time(app, run, self.arrivals_s)
        if not self.promising or run.mean_s < self.promising[0].run.mean_s:
            self.improved_at = self.steps
        self.promising.append(_Tried(run, app, policy, name))
        self.promising.sort(key=lambda tried: tried.run.mean_s)  # stable: of equal ones the first
        del self.promising[PROMISING:]
        return run

    def _step(self, app: Application, policy: Policy) -> Run:
        self.steps += 1
        name = "searched order, engines wait for company" if any(policy.choices) else "searched order"
        run = self._simulate(app, policy, name)
        incumbent = self._incumbent()
        answer = self.describe and partial(self.describe, incumbent)
        self.control.report(best=incumbent.run.mean_s, bound=self.bound_s, answer=answer)
        return run

    def _every_choice(self, tried: _Tried) -> bool:
        """All choices of the engines under one order, up to :data:`MOST_CHOICES`; return whether that was all."""
        choices: tuple[int, ...] = ()
        for _ in range(MOST_CHOICES):
            if self._over():
                return False
            run = self._step(tried.app, replace(tried.policy, choices=choices))
            taken = (*choices, *(0 for _ in run.decisions[len(choices) :]))
            last = next((i for i in reversed(range(len(taken))) if taken[i] + 1 < run.decisions[i]), None)
            if last is None:
                return True
            choices = (*taken[:last], taken[last] + 1)
        return False

    def _step_with_other_choices(self) -> None:
        """A good policy with some choices of the engines changed."""
        tried = self.promising[int(self.random.integers(len(self.promising)))]
        decisions = tried.run.decisions
        choices = [*tried.policy.choices, *(0 for _ in decisions[len(tried.policy.choices) :])]
        for at in self.random.integers(len(decisions), size=int(self.random.integers(1, 4))):
            choices[at] = int(self.random.integers(decisions[at]))
        self._step(tried.app, replace(tried.policy, choices=tuple(choices)))


def least_bound_s(apps: Iterable[Application], arrivals_s: Sequence[float]) -> float:
    """The least bound of several applications that the search chooses from."""
    return min(app.bound_s(arrivals_s) for app in apps)


def _orders(apps: Sequence[Application], random: np.random.Generator) -> Iterator[tuple[Application, Policy]]:
    """Priorities of the primitives: all orders of few primitives, otherwise random ones without end."""
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
