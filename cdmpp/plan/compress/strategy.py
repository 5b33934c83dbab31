"""Compression of each gradient in the timeline of a backward pass (ByteComp, arXiv 2205.14465).

A backward pass computes its gradients one after the other. Each is exchanged over the network and may be
compressed before: on the GPU, which delays the backward passes that follow, or on the CPU of the host. Replay
gives the time of a strategy. ByteComp leaves out tensors whose exchange is hidden anyway, compresses the most
exposed ones first, and moves compression to the CPU until that becomes the bottleneck. A local search, and branch and
bound with a lower bound, improve its strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from cdmpp.simulate.replay import Graph, Node, Timeline, replay
from cdmpp.simulate.replay.engine import walk
from cdmpp.simulate.replay.graph import Floats
from cdmpp.utils.jit import jit

#: Smaller relative changes of an iteration are ignored.
CLOSE = 1e-9
#: Processor that compresses and decompresses.
Place = Literal["none", "gpu", "cpu"]


@dataclass(frozen=True)
class Option:
    """One way to exchange a tensor: seconds on the GPU, on the CPU and on the network."""

    compressor: str | None
    place: Place
    network_s: float
    compress_s: float = 0.0
    decompress_s: float = 0.0

    @property
    def spent_s(self) -> tuple[float, float, float]:
        """Seconds of the GPU, the CPU and the network."""
        work = self.compress_s + self.decompress_s
        return (work if self.place == "gpu" else 0.0, work if self.place == "cpu" else 0.0, self.network_s)


@dataclass(frozen=True)
class GradientTensor:
    """A gradient; ``options[0]`` does not compress it. Tensors are in the order of the backward pass."""

    name: str
    backward_s: float
    options: tuple[Option, ...]


Choice = tuple[int, ...]


def graph(tensors: Sequence[GradientTensor], choice: Choice) -> Graph:
    """The backward pass with a chosen option for each tensor; ids sort by tensor, then by stage."""
    nodes: list[Node] = []
    before: tuple[str, ...] = ()
    for i, (tensor, k) in enumerate(zip(tensors, choice, strict=True)):
        option = tensor.options[k]
        name = f"{i:04d}"
        nodes.append(Node(f"{name}.0", "worker", tensor.backward_s, before, "gpu"))
        before = ready = (f"{name}.0",)
        if option.compressor is not None:
            nodes.append(Node(f"{name}.1", "worker", option.compress_s, ready, option.place))
            ready = (f"{name}.1",)
            if option.place == "gpu":
                # It runs in the queue of the GPU, after the backward pass of this tensor.
                before = ready
        nodes.append(Node(f"{name}.2", "worker", option.network_s, ready, "network", "comm"))
        if option.compressor is not None:
            nodes.append(Node(f"{name}.3", "worker", option.decompress_s, (f"{name}.2",), option.place))
    return Graph(nodes)


def timeline(tensors: Sequence[GradientTensor], choice: Choice) -> Timeline:
    """Replay the backward pass with a choice of options."""
    return replay(graph(tensors, choice))


def iteration_s(tensors: Sequence[GradientTensor], choice: Choice) -> float:
    """Makespan of :func:`timeline`, without its nodes."""
    return float(_iteration(_rows(tensors, choice)))


def _rows(tensors: Sequence[GradientTensor], choice: Choice) -> Floats:
    """Backward pass, place (0 none, 1 GPU, 2 CPU), exchange, compression and decompression; shape (tensors, 5)."""
    options = [tensor.options[k] for tensor, k in zip(tensors, choice, strict=True)]
    places = {"none": 0.0, "gpu": 1.0, "cpu": 2.0}
    return np.array(
        [
            (tensor.backward_s, places[o.place], o.network_s, o.compress_s, o.decompress_s)
            for tensor, o in zip(tensors, options, strict=True)
        ]
    )


@jit
def _iteration(rows: Floats) -> float:
    """Replay of :func:`graph` from its figures: nodes in the same order, on streams 0 (GPU), 1 (network), 2 (CPU)."""
    nodes = 0
    for i in range(len(rows)):
        nodes += 2 if rows[i, 1] == 0.0 else 4
    duration, gap = np.zeros(nodes), np.zeros(nodes)
    waits, stream = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    start, following = np.zeros(nodes + 1, np.int64), np.zeros(2 * nodes, np.int64)
    at = edges = 0
    for i in range(len(rows)):
        compressed, later = rows[i, 1] > 0.0, i + 1 < len(rows)
        size = 4 if compressed else 2
        place = 0 if rows[i, 1] == 1.0 else 2
        for k in range(size):
            kind = k if compressed else 2 * k
            duration[at + k] = rows[i, 0 if kind == 0 else (3 if kind == 1 else (2 if kind == 2 else 4))]
            stream[at + k] = 0 if kind == 0 else (1 if kind == 2 else place)
            if k + 1 < size:
                following[edges] = at + k + 1
                waits[at + k + 1] += 1
                edges += 1
            # The next backward pass follows in the queue of the GPU.
            if later and k == (1 if compressed and place == 0 else 0):
                following[edges] = at + size
                waits[at + size] += 1
                edges += 1
            start[at + k + 1] = edges
        at += size
    begin, end, cause = np.zeros(nodes), np.full(nodes, -1.0), np.full(nodes, -1, np.int64)
    return walk(duration, gap, waits, start, following, np.arange(nodes + 1), stream, 3, begin, end, cause)


def hidden(tensors: Sequence[GradientTensor], choice: Choice) -> list[int]:
    """Tensors whose exchange is hidden: if it took no time, the iteration would be as long."""
    rows = _rows(tensors, choice)
    whole = _iteration(rows)
    out: list[int] = []
    for i in range(len(rows)):
        free = rows.copy()
        free[i, 1:] = 0.0
        if _iteration(free) >= whole * (1 - CLOSE):
            out.append(i)
    return out


def bytecomp(tensors: Sequence[GradientTensor], may_continue: Callable[[], bool]) -> Choice:
    """ByteComp: compress exposed tensors on the GPU, largest exchange first; then on the CPU instead."""
    choice: Choice = (0,) * len(tensors)
    best_s = iteration_s(tensors, choice)

    def take(i: int, place: str) -> bool:
        """Give a tensor its best option at a place, if the iteration becomes shorter."""
        nonlocal choice, best_s
        best = best_s * (1 - CLOSE), choice
        for k, option in enumerate(tensors[i].options):
            if option.place == place:
                other = (*choice[:i], k, *choice[i + 1 :])
                best = min(best, (iteration_s(tensors, other), other))
        if best[1] == choice:
            return False
        best_s, choice = best
        return True

    for place in ("gpu", "cpu"):
        again = True
        while again and may_continue():
            again = False
            covered = set(hidden(tensors, choice))
            # The CPU takes over tensors that are compressed already; the GPU takes others.
            wanted = [i for i in range(len(tensors)) if i not in covered or (place == "cpu" and choice[i])]
            for i in sorted(wanted, key=lambda i: (-tensors[i].options[0].network_s, i)):
                at = tensors[i].options[choice[i]].place
                if at != place and may_continue():
                    again = take(i, place) or again
    return choice


_MIXES = 12
_SHAKEN = (2, 6)


class Bound:
    """Lower bound of the iteration.

    GPU, CPU and network each need the time of their work. CPU and network cannot start with the tensors from k
    on before the backward passes up to k are done. Any weighted mean of the three times is a bound, and in a mean
    each tensor can take its best option independently. The bound is the largest over k and over a grid of weights.
    """

    def __init__(self, tensors: Sequence[GradientTensor]) -> None:
        backward = np.cumsum([tensor.backward_s for tensor in tensors])
        max_options = max(len(tensor.options) for tensor in tensors)
        spent = np.array([[t.options[min(k, len(t.options) - 1)].spent_s for k in range(max_options)] for t in tensors])
        mixes = [(a, b, _MIXES - a - b) for a in range(_MIXES + 1) for b in range(_MIXES + 1 - a)]
        weights = np.array(mixes).T / _MIXES
        #: (tensors, options, mixes), and the least of it over the options.
        self._mixed = spent @ weights
        self._least = self._mixed.min(axis=1)
        self._before = weights[0] * backward[-1] + (1 - weights[0]) * backward[:, None]

    def value(self, fixed: Choice = ()) -> float:
        """The bound with fixed options of the first tensors."""
        least = self._least
        if fixed:
            least = least.copy()
            least[: len(fixed)] = self._mixed[np.arange(len(fixed)), list(fixed)]
        later = np.cumsum(least[::-1], axis=0)[::-1]
        return float((self._before + later).max())


@dataclass
class Incumbent:
    """The best strategy so far, the strategy of ByteComp, the bound, and whether the best one is optimal."""

    choice: Choice
    iteration_s: float
    heuristic: Choice
    bound_s: float
    proven: bool = False


def search(
    tensors: Sequence[GradientTensor],
    may_continue: Callable[[], bool],
    seed: int = 0,
    report: Callable[[Incumbent], None] = lambda incumbent: None,
) -> Incumbent:
    """The shortest iteration.

    Improves the strategies of ByteComp and of :func:`everywhere`, then proves the best one by branch and bound
    where there are few tensors, then improves random changes of it until the search has to stop.
    """
    bound = Bound(tensors)
    first = bytecomp(tensors, may_continue)
    starts = list(dict.fromkeys([first, *everywhere(tensors).values()]))
    best = min(starts, key=lambda choice: iteration_s(tensors, choice))
    incumbent = Incumbent(best, iteration_s(tensors, best), first, bound.value())

    def offer(choice: Choice) -> None:
        seconds = iteration_s(tensors, choice)
        if seconds < incumbent.iteration_s * (1 - CLOSE):
            incumbent.choice, incumbent.iteration_s = choice, seconds
            report(incumbent)

    def close() -> bool:
        return incumbent.iteration_s <= incumbent.bound_s * (1 + CLOSE)

    report(incumbent)
    for start in starts:
        if not close() and may_continue():
            offer(improve(tensors, start, may_continue))
    if not close() and _branch_and_bound(tensors, bound, incumbent, offer, may_continue):
        incumbent.bound_s = incumbent.iteration_s
    chance = np.random.default_rng(seed)
    while not close() and may_continue():
        offer(improve(tensors, _shaken(tensors, incumbent.choice, chance), may_continue))
    incumbent.proven = close()
    return incumbent


def improve(tensors: Sequence[GradientTensor], start: Choice, may_continue: Callable[[], bool]) -> Choice:
    """Change single tensors, then two at once, while the iteration becomes shorter."""
    choice, best_s = start, iteration_s(tensors, start)

    def others() -> Iterator[tuple[tuple[int, int], ...]]:
        single = [(i, k) for i, t in enumerate(tensors) for k in range(len(t.options)) if k != choice[i]]
        yield from ((change,) for change in single)
        yield from ((a, b) for a, b in combinations(single, 2) if a[0] != b[0])

    moved = True
    while moved:
        moved = False
        for changes in others():
            if not may_continue():
                return choice
            other = list(choice)
            for i, k in changes:
                other[i] = k
            seconds = iteration_s(tensors, tuple(other))
            if seconds < best_s * (1 - CLOSE):
                choice, best_s, moved = tuple(other), seconds, True
                break
    return choice


def everywhere(tensors: Sequence[GradientTensor]) -> dict[str, Choice]:
    """The strategies with one option for all tensors, by name: "none", "top1% on gpu", ..."""
    out: dict[str, Choice] = {}
    for k, option in enumerate(tensors[0].options):
        name = "none" if option.compressor is None else f"{option.compressor} on {option.place}"
        out[name] = (k,) * len(tensors)
    return out


#: Most tensors for which a proof is tried.
_PROVE = 16


def _branch_and_bound(
    tensors: Sequence[GradientTensor],
    bound: Bound,
    incumbent: Incumbent,
    offer: Callable[[Choice], None],
    may_continue: Callable[[], bool],
) -> bool:
    """Try every strategy that may be shorter; return whether that was finished."""
    if len(tensors) > _PROVE:
        return False
    stack: list[Choice] = [()]
    while stack:
        if not may_continue():
            return False
        fixed = stack.pop()
        if bound.value(fixed) >= incumbent.iteration_s * (1 - CLOSE):
            continue
        if len(fixed) == len(tensors):
            offer(fixed)
            continue
        stack += [(*fixed, k) for k in reversed(range(len(tensors[len(fixed)].options)))]
    return True


def _shaken(tensors: Sequence[GradientTensor], choice: Choice, chance: np.random.Generator) -> Choice:
    """The strategy with random options for a few tensors."""
    other = list(choice)
    size = min(len(tensors), int(chance.integers(*_SHAKEN)))
    for i in chance.choice(len(tensors), size=size, replace=False):
        other[i] = int(chance.integers(0, len(tensors[i].options)))
    return tuple(other)
