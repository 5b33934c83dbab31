"""Which borrowed servers to give back: the set that ends the least work (Aryl, server reclaiming)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Reclaimed:
    """Servers to give back.

    Attributes
    ----------
    servers : tuple of str
    preempted : tuple of str
        Jobs that are left with fewer workers than they need, and start again from their checkpoint.
    shrunk : tuple of str
        Jobs that go on with fewer workers.
    cost_s : float
        Sum of the preempted jobs' costs.
    """

    servers: tuple[str, ...]
    preempted: tuple[str, ...]
    shrunk: tuple[str, ...]
    cost_s: float


def reclaim(
    servers: Mapping[str, Mapping[str, int]],
    wanted: int,
    workers: Mapping[str, int],
    needed: Mapping[str, int],
    cost_s: Mapping[str, float],
) -> Reclaimed:
    """The ``wanted`` servers whose return costs least; equal costs: fewer jobs shrunk, then by name.

    Parameters
    ----------
    servers : mapping of server to (mapping of job to its workers there)
    wanted : int
        At most the number of servers.
    workers, needed : mapping of job to int
        What a job has in all, and what it cannot do without.
    cost_s : mapping of job to float
        Seconds lost when it is preempted (its work since the last checkpoint, and its start).

    Notes
    -----
    All sets are tried: with 16 servers 12,870 at most.
    """
    names = sorted(servers)
    return min(
        (_of(chosen, servers, workers, needed, cost_s) for chosen in combinations(names, wanted)),
        key=lambda each: (each.cost_s, len(each.preempted), len(each.shrunk), each.servers),
    )


def _of(
    chosen: Sequence[str],
    servers: Mapping[str, Mapping[str, int]],
    workers: Mapping[str, int],
    needed: Mapping[str, int],
    cost_s: Mapping[str, float],
) -> Reclaimed:
    lost: dict[str, int] = {}
    for server in chosen:
        for job, count in servers[server].items():
            lost[job] = lost.get(job, 0) + count
    preempted = tuple(sorted(job for job, count in lost.items() if workers[job] - count < needed[job]))
    shrunk = tuple(sorted(job for job in lost if job not in preempted))
    return Reclaimed(tuple(chosen), preempted, shrunk, float(sum(cost_s[job] for job in preempted)))
