"""Requests through an application's engines, event by event, under a batching policy."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from cdmpp.plan.application.graph import Application


@dataclass(frozen=True)
class Policy:
    """What an engine runs next when it is free.

    Attributes
    ----------
    batching : bool
        Fill the batch; otherwise run one primitive at a time.
    priority : tuple of float, optional
        One for each primitive, largest first. Topology-aware batching (Teola) uses the seconds to the end of
        the request. None: primitives run in the order in which they became ready.
    by_request : bool
        Earlier requests first, then ``priority``; otherwise ``priority`` alone.
    choices : tuple of int
        For each decision of the run in turn, which of its :func:`options` is taken; 0 for further decisions.
    """

    batching: bool = True
    priority: tuple[float, ...] | None = None
    by_request: bool = True
    choices: tuple[int, ...] = ()


def options(most: int, may_wait: bool) -> list[int]:
    """How many of ``most`` ready primitives an engine may take: all, none (it waits for a larger batch), or fewer."""
    return [most, *([0] if may_wait else []), *range(most - 1, 0, -1)]


@dataclass(frozen=True)
class Batch:
    """Primitives that an engine ran together, as (request, primitive) pairs."""

    engine: int
    start_s: float
    end_s: float
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Run:
    """Result of a simulation: batches in the order of their starts, and the latency of each request.

    ``decisions`` has the number of options of each decision.
    """

    batches: list[Batch]
    latency_s: list[float]
    decisions: tuple[int, ...] = ()

    @property
    def mean_s(self) -> float:
        """Mean latency of the requests."""
        return sum(self.latency_s) / len(self.latency_s)

    @property
    def makespan_s(self) -> float:
        """End of the last batch."""
        return max(batch.end_s for batch in self.batches)


def simulate(app: Application, arrivals_s: Sequence[float], policy: Policy) -> Run:
    """Simulate requests that arrive at given times.

    Parameters
    ----------
    app : Application
    arrivals_s : sequence of float, length n
    policy : Policy

    Returns
    -------
    Run
    """
    primitives, engines = app.primitives, app.engines
    after: list[list[int]] = [[] for _ in primitives]
    for i, successor in enumerate(primitives):
        for before in successor.after:
            after[before].append(i)
    missing = [[len(primitive.after) for primitive in primitives] for _ in arrivals_s]
    left = [len(primitives)] * len(arrivals_s)
    latency = [0.0] * len(arrivals_s)
    ready: list[list[tuple[tuple[float, ...], int, int]]] = [[] for _ in engines]
    free = {engine.device for engine in engines}
    # (time, kind, index): arrivals before ends at the same moment, so that they can share a batch.
    events: list[tuple[float, int, int]] = [(at, 0, r) for r, at in enumerate(arrivals_s)]
    heapq.heapify(events)
    batches: list[Batch] = []
    decisions: list[int] = []

    def key(now: float, request: int, primitive: int) -> tuple[float, ...]:
        if policy.priority is None:
            return (now, request, primitive)
        rank = -policy.priority[primitive]
        return (request, rank) if policy.by_request else (rank, request)

    def make_ready(now: float, request: int, primitive: int) -> None:
        entry = (key(now, request, primitive), request, primitive)
        heapq.heappush(ready[primitives[primitive].engine], entry)

    while events:
        now = events[0][0]
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
            taken: list[tuple[tuple[float, ...], int, int]] = []
            while ready[e]:
                size = primitives[ready[e][0][2]].items
                if taken and (not policy.batching or items + size > engines[e].max_items):
                    break
                taken.append(heapq.heappop(ready[e]))
                items += size
            possible = options(len(taken), bool(events))
            at = len(decisions)
            decisions.append(len(possible))
            choice = policy.choices[at] if at < len(policy.choices) else 0
            count = possible[min(choice, len(possible) - 1)]  # an earlier choice may have left fewer
            for entry in taken[count:]:
                heapq.heappush(ready[e], entry)
                items -= primitives[entry[2]].items
            if not count:
                continue
            members = [(request, primitive) for _, request, primitive in taken[:count]]
            end = now + engines[e].batch_s(items)
            free.remove(engines[e].device)
            heapq.heappush(events, (end, 1, len(batches)))
            batches.append(Batch(e, now, end, tuple(members)))
    return Run(batches, latency, tuple(decisions))


def without_idle_time(app: Application, run: Run, arrivals_s: Sequence[float]) -> Run:
    """The same batches in the same order on every device, each as early as possible.

    An engine may have waited for primitives that did not arrive.
    """
    primitives, engines = app.primitives, app.engines
    free_s: dict[str, float] = {}
    ended_s: dict[tuple[int, int], float] = {}
    batches: list[Batch] = []
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
        batches.append(Batch(batch.engine, start_s, end_s, batch.members))
    latency_s = [
        max(ended_s[request, p] for p in range(len(primitives))) - arrival_s
        for request, arrival_s in enumerate(arrivals_s)
    ]
    return Run(sorted(batches, key=lambda batch: batch.start_s), latency_s, run.decisions)
