"""Random precision problems of the tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from cdmpp.plan.precision.pricing import DeviceCosts, Edge, KeptTensor, Pricing, lowest

BYTES = {"int8": 1.0, "float16": 2.0, "float32": 4.0}


def make_costs(
    count: int, seed: int, dtypes: tuple[str, ...] = ("int8", "float16", "float32"), buckets: int = 3
) -> DeviceCosts:
    """A network in which every third operator has a skip connection, with random costs; without limits."""
    random = np.random.default_rng(seed)
    levels = len(dtypes)
    elements = random.integers(100_000, 5_000_000, count)
    weights = random.integers(0, 4_000_000, count)
    edges: list[Edge] = []
    readers: list[list[int]] = [[] for _ in range(count)]
    for i in range(1, count):
        deps = {i - 1}
        if i > 2 and random.random() < 0.3:
            deps.add(int(random.integers(max(0, i - 5), i - 1)))
        for p in sorted(deps):
            apart = 1.0 - np.eye(levels)
            slope = random.uniform(0.5, 2.0, (2, levels, levels)) * 1e-11 * elements[p]
            edges.append(Edge(p, i, (5e-6 + slope[0]) * apart, (5e-6 + slope[1]) * apart))
            readers[p].append(i)
    speed = np.array([BYTES[name] / 4 for name in dtypes])
    forward = [
        np.sort(random.uniform(1e-4, 1e-3) * (0.2 + 0.8 * speed) * random.uniform(0.8, 1.3, levels))
        for _ in range(count)
    ]
    errors = [
        np.append(np.sort(random.lognormal(0, 1.5, levels - 1) * np.array([1.0, 0.1])[: levels - 1])[::-1], 0)
        for _ in range(count)
    ]
    sizes = [np.array([BYTES[name] for name in dtypes]) for _ in range(count)]
    own = [np.where(size < 4, size, 0.0) * n for size, n in zip(sizes, weights, strict=True)]
    slots = [2 * count - 1 - round(k) for k in np.linspace(count - 1, 0, buckets + 1)[1:]]
    durations = random.uniform(1e-4, 6e-4, buckets)
    return DeviceCosts(
        name="device",
        workers=1,
        dtypes=[dtypes] * count,
        element_bytes=sizes,
        forward_s=forward,
        backward_s=[2 * row for row in forward],
        sensitivity=errors,
        own_bytes=own,
        edges=tuple(edges),
        kept=tuple(KeptTensor(tuple(who), int(elements[p])) for p, who in enumerate(readers) if who),
        fixed_bytes=float(16 * weights.sum()),
        memory_bytes=float("inf"),
        after=np.array([*slots, 2 * count - 1]),
        tail_s=np.append(np.cumsum(durations[::-1])[::-1], 1e-4),
    )


def limited(costs: DeviceCosts, time: float, memory: float) -> tuple[DeviceCosts, float]:
    """Limits at shares, 0 to 1, of the way from the lowest to the highest precision."""
    low = Pricing(costs, [0] * costs.size)
    high = Pricing(costs, [len(names) - 1 for names in costs.dtypes])
    limit_s = low.iteration_s + time * (high.iteration_s - low.iteration_s)
    bytes_ = low.memory_bytes + memory * (high.memory_bytes - low.memory_bytes)
    return replace(costs, memory_bytes=bytes_), limit_s


def problems(count: int, seeds: Iterable[int]) -> Iterator[tuple[DeviceCosts, float]]:
    """Networks of ``count`` operators with random limits of memory and time that the lowest precision meets."""
    for seed in seeds:
        share = np.random.default_rng([count, seed]).uniform(0.15, 0.7, 2)
        costs, limit_s = limited(make_costs(count, seed), float(share[0]), float(share[1]))
        if Pricing(costs, lowest(costs)).within(limit_s):
            yield costs, limit_s
