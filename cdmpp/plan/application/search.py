"""An application as primitives on engines that batch (Teola), its simulation, and the search for the best policy.

Requests are simulated event by event. The search tries Teola's policy, common ones, and random orders.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cdmpp.plan.base.batch_curve import interpolate
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.request import Answer
from cdmpp.simulate.replay import Graph, Node


@dataclass(frozen=True)
class BatchingEngine:
    """Runs primitives in batches."""

    name: str
    device: str  # engines on one device take turns
    # (points,): seconds of a batch by its number of items.
    sizes: np.ndarray
    seconds: np.ndarray
    max_items: int  # largest batch; a primitive with more items runs alone

    def batch_s(self, items: float) -> float:
        """Seconds of a batch by its number of items."""
        return float(interpolate(self.sizes, self.seconds, items))

    def item_s(self) -> float:
        """Least seconds per item, at the most efficient batch size."""
        sizes = np.arange(1, self.max_items + 1)
        return float((interpolate(self.sizes, self.seconds, sizes) / sizes).min())


@dataclass(frozen=True)
class Primitive:
    """One step of a request: ``items`` for its engine, which starts after all of ``after``."""

    id: str
    engine: int
    items: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class Application:
    """Engines, and primitives in topological order that refer to them by index."""

    engines: tuple[BatchingEngine, ...]
    primitives: tuple[Primitive, ...]

    def depths(self) -> list[float]:
        """Seconds from the start of each primitive to the end of the request on idle engines."""
        out = [0.0] * len(self.primitives)
        for i in reversed(range(len(self.primitives))):
            primitive = self.primitives[i]
            out[i] += self.engines[primitive.engine].batch_s(primitive.items)
            for before in primitive.after:
                out[before] = max(out[before], out[i])
        return out

    def chained(self) -> Application:
        """A copy in which the primitives of a request run one after the other, as modules called in turn."""
        chain = tuple(replace(primitive, after=(i - 1,) if i else ()) for i, primitive in enumerate(self.primitives))
        return replace(self, primitives=chain)

    def bound_s(self, arrivals_s: Sequence[float]) -> float:
        """Lower bound of the mean latency: the longest path, or the busiest engine at its best batch size.

        The k-th request cannot end before k times the work of an engine on one request.
        """
        longest = max(self.depths(), default=0.0)
        n, first, mean = len(arrivals_s), min(arrivals_s), sum(arrivals_s) / len(arrivals_s)
        work: dict[str, float] = {}
        for primitive in self.primitives:
            engine = self.engines[primitive.engine]
            least_s = min(engine.item_s() * primitive.items, engine.batch_s(primitive.items))
            work[engine.device] = work.get(engine.device, 0.0) + least_s
        return max(longest, *(first + busy_s * (n + 1) / 2 - mean for busy_s in work.values()))


@dataclass(frozen=True)
class Policy:
    """What an engine runs next when it is free."""

    batching: bool = True  # fill the batch; otherwise run one primitive at a time
    # One for each primitive, largest first. Topology-aware batching (Teola) uses the seconds to the end of the request.
    # None: primitives run in the order in which they became ready.
    priority: tuple[float, ...] | None = None
    by_request: bool = True  # earlier requests first, then ``priority``; otherwise ``priority`` alone
    # For each decision of the run in turn, which of its :func:`options` is taken; 0 for further decisions.
    choices: tuple[int, ...] = ()


def options(most: int, may_wait: bool) -> list[int]:
    """How many of ``most`` ready primitives an engine may take: all, none (it waits for a larger batch), or fewer."""
    return [most, *([0] if may_wait else []), *range(most - 1, 0, -1)]


@dataclass(frozen=True)
class PrimitiveBatch:
    """Primitives that an engine ran together, as (request, primitive) pairs."""

    engine: int
    start_s: float
    end_s: float
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Run:
    """Result of a simulation."""

    batches: list[PrimitiveBatch]  # in the order of their starts
    latency_s: list[float]  # of each request
    decisions: tuple[int, ...] = ()  # number of options of each decision

    @property
    def mean_s(self) -> float:
        """Mean latency of the requests."""
        return sum(self.latency_s) / len(self.latency_s)

    @property
    def makespan_s(self) -> float:
        """End of the last batch."""
        return max(batch.end_s for batch in self.batches)


def simulate(
    app: Application, arrivals_s: Sequence[float], policy: Policy, changes: Sequence[tuple[float, Policy]] = ()
) -> Run:
    """Simulate requests. ``changes``: policies that replace the one before at these seconds, growing."""
    primitives, engines = app.primitives, app.engines
    after: list[list[int]] = [[] for _ in primitives]
    for i, successor in enumerate(primitives):
        for before in successor.after:
            after[before].append(i)
    missing = [[len(primitive.after) for primitive in primitives] for _ in arrivals_s]
    left = [len(primitives)] * len(arrivals_s)
    latency = [0.0] * len(arrivals_s)
    ready: list[list[tuple[tuple[float, ...], int, int, float]]] = [[] for _ in engines]
    free = {engine.device for engine in engines}
    # (time, kind, index): arrivals before ends at the same moment, so that they can share a batch.
    events: list[tuple[float, int, int]] = [(at, 0, r) for r, at in enumerate(arrivals_s)]
    heapq.heapify(events)
    batches: list[PrimitiveBatch] = []
    decisions: list[int] = []

    def key(now: float, request: int, primitive: int) -> tuple[float, ...]:
        if policy.priority is None:
            return (now, request, primitive)
        rank = -policy.priority[primitive]
        return (request, rank) if policy.by_request else (rank, request)

    def make_ready(now: float, request: int, primitive: int) -> None:
        entry = (key(now, request, primitive), request, primitive, now)
        heapq.heappush(ready[primitives[primitive].engine], entry)

    later = list(reversed(changes))
    while events:
        now = events[0][0]
        while later and later[-1][0] <= now:
            policy = later.pop()[1]
            ready = [[(key(since, r, p), r, p, since) for _, r, p, since in queue] for queue in ready]
            for queue in ready:
                heapq.heapify(queue)
        while events and events[0][0] == now:
            _, kind, index = heapq.heappop(events)
            if kind == 0:
                for i, first in enumerate(primitives):
                    if not first.after:
                        make_ready(now, index, i)
                continue
            done = batches[index]
            free.add(engines[done.engine].device)
            for request, primitive in done.members:
                left[request] -= 1
                if not left[request]:
                    latency[request] = now - arrivals_s[request]
                for i in after[primitive]:
                    missing[request][i] -= 1
                    if not missing[request][i]:
                        make_ready(now, request, i)
        # Among the engines of a free device, the one whose first primitive has the highest priority runs.
        for e in sorted((e for e in range(len(engines)) if ready[e]), key=lambda e: (ready[e][0][0], e)):
            if engines[e].device not in free:
                continue
            items = 0
            taken: list[tuple[tuple[float, ...], int, int, float]] = []
            while ready[e]:
                size = primitives[ready[e][0][2]].items
                if taken and (not policy.batching or items + size > engines[e].max_items):
                    break
                taken.append(heapq.heappop(ready[e]))
                items += size
            possible = options(len(taken), bool(events))
            choice = policy.choices[len(decisions)] if len(decisions) < len(policy.choices) else 0
            decisions.append(len(possible))
            count = possible[min(choice, len(possible) - 1)]  # an earlier choice may have left fewer
            for entry in taken[count:]:
                heapq.heappush(ready[e], entry)
                items -= primitives[entry[2]].items
            if not count:
                continue
            end = now + engines[e].batch_s(items)
            free.remove(engines[e].device)
            heapq.heappush(events, (end, 1, len(batches)))
            batches.append(PrimitiveBatch(e, now, end, tuple((r, p) for _, r, p, _ in taken[:count])))
    return Run(batches, latency, tuple(decisions))


def without_idle_time(app: Application, run: Run, arrivals_s: Sequence[float]) -> Run:
    """The same batches in the same order on every device, each as early as possible.

    An engine may have waited for primitives that did not arrive.
    """
    primitives, engines = app.primitives, app.engines
    free_s: dict[str, float] = {}
    ended_s: dict[tuple[int, int], float] = {}
    batches: list[PrimitiveBatch] = []
    for batch in run.batches:
        device = engines[batch.engine].device
        ready_s = max(
            max((ended_s[request, i] for i in primitives[p].after), default=arrivals_s[request])
            for request, p in batch.members
        )
        start_s = max(free_s.get(device, 0.0), ready_s)
        end_s = start_s + engines[batch.engine].batch_s(sum(primitives[p].items for _, p in batch.members))
        free_s[device] = end_s
        ended_s.update(dict.fromkeys(batch.members, end_s))
        batches.append(PrimitiveBatch(batch.engine, start_s, end_s, batch.members))
    latency_s = [
        max(ended_s[request, p] for p in range(len(primitives))) - arrival_s
        for request, arrival_s in enumerate(arrivals_s)
    ]
    return Run(sorted(batches, key=lambda batch: batch.start_s), latency_s, run.decisions)


#: Most primitives for which all orders are tried.
EXHAUSTIVE_PRIMITIVES = 5
#: Most primitives of all requests together for which all choices of the engines are tried, and the number of best
#: policies that the search keeps.
EXHAUSTIVE_TASKS, PROMISING = 10, 4
#: Choices that are tried for each of these orders, and steps without improvement that end the search for choices.
MOST_CHOICES, PATIENCE_STEPS = 20_000, 2000
#: Share of the budget in which the rule is chosen anew at arrivals; then it stays.
ONLINE_SHARE = 0.3


@dataclass(frozen=True)
class Tried:
    """A simulated policy."""

    run: Run
    app: Application
    policy: Policy
    name: str


@dataclass(frozen=True)
class BestRuns:
    """The best runs so far with all arrivals known and of policies that learn them as they come; the baselines."""

    known: Tried
    online: Tried
    baselines: dict[str, Run]
    steps: int


class PolicySearch:
    """Search for the policy with the least mean latency.

    ``whole``, ``split``: primitives as they are, and divided into parts that can start earlier; may be the same.
    ``max_steps``: largest number of orders to try. ``describe``: makes the plan so far, for progress reports.
    ``learns``: the plan is that of the policy that learns arrivals as they come: its figure is reported.
    """

    def __init__(
        self,
        whole: Application,
        split: Application,
        arrivals_s: Sequence[float],
        control: SearchControl,
        seed: int = 0,
        max_steps: int | None = None,
        describe: Callable[[BestRuns], Answer] | None = None,
        learns: bool = False,
    ) -> None:
        self.apps = {"": whole} if split is whole else {"": whole, ", split": split}
        self.arrivals_s, self.control, self.max_steps = arrivals_s, control, max_steps
        self.describe, self.learns = describe, learns
        self.random = np.random.default_rng(seed)
        self.bound_s = least_bound_s(self.apps.values(), arrivals_s)
        self.steps = self.improved_at = 0
        #: The best policies so far, best first.
        self.promising: list[Tried] = []
        self.online: Tried | None = None
        chained, alone = whole.chained(), Policy(batching=False)
        # A baseline may be the best one: a chain delays primitives, so that batches can be fuller.
        self.baselines = {
            "modules_in_turn": self._simulate(chained, Policy(), "modules in turn"),
            "no_batching": self._simulate(whole, alone, "no batching"),
            "first_come": self._simulate(whole, Policy(), "first come"),
        }

    def run(self) -> BestRuns:
        """The best runs within the budget."""
        for suffix, app in self.apps.items():
            depths = tuple(app.depths())
            rules = {
                "first come": Policy(),
                "topology-aware": Policy(priority=depths),
                "deepest first": Policy(priority=depths, by_request=False),
                "topology-aware, no batching": Policy(batching=False, priority=depths),
            }
            for name, rule in rules.items():
                self._simulate(app, rule, name + suffix)
            changes = self.changes_at_arrivals(app, list(rules.values()))
            self._simulate(app, Policy(), "rule chosen anew at each arrival" + suffix, changes)
        endless = any(len(app.primitives) > EXHAUSTIVE_PRIMITIVES for app in self.apps.values())
        for app, policy in _orders(list(self.apps.values()), self.random):
            if self._over():
                break
            self._step(app, policy)
            if endless and not self._over():
                self._step_with_other_choices()
        tasks = len(self.arrivals_s) * max(len(app.primitives) for app in self.apps.values())
        if tasks <= EXHAUSTIVE_TASKS and all([self._every_choice(tried) for tried in list(self.promising)]):
            return self._best()
        while not self._over() and self.steps - self.improved_at < PATIENCE_STEPS:
            self._step_with_other_choices()
        return self._best()

    def _best(self) -> BestRuns:
        assert self.online is not None
        known = min(self.promising[0], self.online, key=lambda tried: tried.run.mean_s)
        return BestRuns(known, self.online, self.baselines, self.steps)

    def changes_at_arrivals(self, app: Application, rules: Sequence[Policy]) -> list[tuple[float, Policy]]:
        """At each arrival the rule with which the requests that have come by then would end soonest."""
        changes: list[tuple[float, Policy]] = []
        for at in sorted({*self.arrivals_s})[: self.max_steps]:
            spent_s, budget_s = self.control.spent_s, self.control.budget_s
            if self.control.expired or (budget_s is not None and spent_s > ONLINE_SHARE * budget_s / len(self.apps)):
                break
            come = [arrival for arrival in self.arrivals_s if arrival <= at]
            present = changes[-1][1] if changes else rules[0]
            means = {rule: simulate(app, come, rules[0], [*changes, (at, rule)]).mean_s for rule in rules}
            best = min(rules, key=lambda rule: (means[rule], rule is not present))
            if best is not present:
                changes.append((at, best))
        return changes

    def _over(self) -> bool:
        spent = self.max_steps is not None and self.steps >= self.max_steps
        return spent or self.control.expired or self.promising[0].run.mean_s <= self.bound_s * (1 + 1e-12)

    def _simulate(
        self,
        app: Application,
        policy: Policy,
        name: str,
        changes: Sequence[tuple[float, Policy]] = (),
        online: bool = True,
    ) -> Run:
        run = simulate(app, self.arrivals_s, policy, changes)
        if any(policy.choices):
            run = without_idle_time(app, run, self.arrivals_s)
        if online and (self.online is None or run.mean_s < self.online.run.mean_s):
            self.online = Tried(run, app, policy, name)
        if changes:
            return run  # the search varies single policies
        if not self.promising or run.mean_s < self.promising[0].run.mean_s:
            self.improved_at = self.steps
        self.promising.append(Tried(run, app, policy, name))
        self.promising.sort(key=lambda tried: tried.run.mean_s)  # stable: of equal ones the first
        del self.promising[PROMISING:]
        return run

    def _step(self, app: Application, policy: Policy) -> Run:
        self.steps += 1
        name = "searched order, engines wait for company" if any(policy.choices) else "searched order"
        run = self._simulate(app, policy, name, online=False)
        best = self._best()
        self.control.report(
            best=(best.online if self.learns else best.known).run.mean_s,
            bound=self.bound_s,
            answer=self.describe and partial(self.describe, best),
        )
        return run

    def _every_choice(self, tried: Tried) -> bool:
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
            before = [f"batch {batch_of[request, p]}" for p in app.primitives[primitive].after]
            deps |= dict.fromkeys(before or [f"arrival {request}"])
        engine, items = app.engines[batch.engine], sum(app.primitives[p].items for _, p in batch.members)
        nodes.append(Node(f"batch {b}", engine.device, engine.batch_s(items), tuple(deps)))
    return Graph(nodes, order="listed")
