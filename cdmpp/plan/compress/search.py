"""Local search and branch and bound over compression strategies, with a lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from cdmpp.plan.compress.strategy import CLOSE, Choice, Tensor, bytecomp, timeline

_MIXES = 12
_SHAKEN = (2, 6)


class Bound:
    """Lower bound of the iteration.

    GPU, CPU and network each need the time of their work. CPU and network cannot start with the tensors from k
    on before the backward passes up to k are done. Any weighted mean of the three times is a bound, and in a mean
    each tensor can take its best option independently. The bound is the largest over k and over a grid of weights.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        backward = np.cumsum([tensor.backward_s for tensor in tensors])
        most = max(len(tensor.options) for tensor in tensors)
        spent = np.array([[t.options[min(k, len(t.options) - 1)].spent_s for k in range(most)] for t in tensors])
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
    tensors: Sequence[Tensor],
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
    best = min(starts, key=lambda choice: timeline(tensors, choice).makespan_s)
    incumbent = Incumbent(best, timeline(tensors, best).makespan_s, first, bound.value())

    def offer(choice: Choice) -> None:
        seconds = timeline(tensors, choice).makespan_s
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


def improve(tensors: Sequence[Tensor], start: Choice, may_continue: Callable[[], bool]) -> Choice:
    """Change single tensors, then two at once, while the iteration becomes shorter."""
    choice, best_s = start, timeline(tensors, start).makespan_s

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
            seconds = timeline(tensors, tuple(other)).makespan_s
            if seconds < best_s * (1 - CLOSE):
                choice, best_s, moved = tuple(other), seconds, True
                break
    return choice


def everywhere(tensors: Sequence[Tensor]) -> dict[str, Choice]:
    """The strategies with one option for all tensors, by name: "none", "top1% on gpu", ..."""
    out: dict[str, Choice] = {}
    for k, option in enumerate(tensors[0].options):
        name = "none" if option.compressor is None else f"{option.compressor} on {option.place}"
        out[name] = (k,) * len(tensors)
    return out


def exhaustive(tensors: Sequence[Tensor]) -> tuple[Choice, float]:
    """The best strategy of all, by exhaustive search; the first of equal ones."""
    every = product(*(range(len(tensor.options)) for tensor in tensors))
    return min(((choice, timeline(tensors, choice).makespan_s) for choice in every), key=lambda pair: pair[1])


#: Most tensors for which a proof is tried.
_PROVE = 16


def _branch_and_bound(
    tensors: Sequence[Tensor],
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


def _shaken(tensors: Sequence[Tensor], choice: Choice, chance: np.random.Generator) -> Choice:
    """The strategy with random options for a few tensors."""
    other = list(choice)
    size = min(len(tensors), int(chance.integers(*_SHAKEN)))
    for i in chance.choice(len(tensors), size=size, replace=False):
        other[i] = int(chance.integers(0, len(tensors[i].options)))
    return tuple(other)
