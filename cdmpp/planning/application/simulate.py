"""Requests through an application's engines, event by event, under a batching policy."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from cdmpp.planning.application.graph import Application


@dataclass(frozen=True)
class Policy:
    """What an engine runs next when it is free. It never waits for further primitives.

    Attributes
    ----------
    batching : bool
        Fill the batch; otherwise run one primitive at a time.
    priority : tuple of float, optional
        One for each primitive, largest first. Topology-aware batching (Teola) uses the seconds to the end of
        the request. None: primitives run in the order in which they became ready.
    by_request : bool
        Earlier requests first, then ``priority``; otherwise ``priority`` alone.
    """

    batching: bool = True
    priority: tuple[float, ...] | None = None
    by_request: bool = True


@dataclass(frozen=True)
class Batch:
    """Primitives that an engine ran together, as (request, primitive) pairs."""

    engine: int
    start_s: float
    end_s: float
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Run:
    """Result of a simulation: batches in the order of their starts, and the latency of each request."""

    batches: list[Batch]
    latency_s: list[float]

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
            members: list[tuple[int, int]] = []
            while ready[e]:
                size = primitives[ready[e][0][2]].items
                if members and (not policy.batching or items + size > engines[e].max_items):
                    break
                _, request, primitive = heapq.heappop(ready[e])
                members.append((request, primitive))
                items += size
            end = now + engines[e].batch_s(items)
            free.remove(engines[e].device)
            heapq.heappush(events, (end, 1, len(batches)))
            batches.append(Batch(e, now, end, tuple(members)))
    return Run(batches, latency)
