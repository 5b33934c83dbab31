"""Strategies near ByteComp's and beyond, and a bound that none falls below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from cdmpp.planning.compress.strategy import CLOSE, Choice, Tensor, bytecomp, timeline

_MIXES = 12
_SHAKEN = (2, 6)


class Bound:
    """Seconds that no strategy falls below.

    GPU, CPU and network each need the time of what they do; CPU and network cannot begin with the tensors
    from k on before the backward passes up to k are done. Any weighted mean of the three is a bound, and in a
    mean each tensor can take its best option alone; the best k and the best of a grid of weights count.
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
        """The bound where the first tensors' options are given."""
        least = self._least
        if fixed:
            least = least.copy()
            least[: len(fixed)] = self._mixed[np.arange(len(fixed)), list(fixed)]
        later = np.cumsum(least[::-1], axis=0)[::-1]
        return float((self._before + later).max())


@dataclass
class Found:
    """The best strategy, ByteComp's own, the bound, and whether nothing better exists."""

    choice: Choice
    iteration_s: float
    heuristic: Choice
    bound_s: float
    proven: bool = False


def search(
    tensors: Sequence[Tensor],
    go_on: Callable[[], bool],
    seed: int = 0,
    report: Callable[[Found], None] = lambda found: None,
) -> Found:
    """The shortest iteration: ByteComp's strategy, its neighbours and those of others, branch and bound."""
    bound = Bound(tensors)
    first = bytecomp(tensors, go_on)
    starts = list(dict.fromkeys([first, *everywhere(tensors).values()]))
    best = min(starts, key=lambda choice: timeline(tensors, choice).makespan_s)
    found = Found(best, timeline(tensors, best).makespan_s, first, bound.value())

    def offer(choice: Choice) -> None:
        seconds = timeline(tensors, choice).makespan_s
        if seconds < found.iteration_s * (1 - CLOSE):
            found.choice, found.iteration_s = choice, seconds
            report(found)

    def close() -> bool:
        return found.iteration_s <= found.bound_s * (1 + CLOSE)

    report(found)
    for start in starts:
        if not close() and go_on():
            offer(improve(tensors, start, go_on))
    if not close() and _complete(tensors, bound, found, offer, go_on):
        found.bound_s = found.iteration_s
    chance = np.random.default_rng(seed)
    while not close() and go_on():
        offer(improve(tensors, _shaken(tensors, found.choice, chance), go_on))
    found.proven = close()
    return found


def improve(tensors: Sequence[Tensor], start: Choice, go_on: Callable[[], bool]) -> Choice:
    """Change single tensors, then two at once, while the iteration gets shorter."""
    choice, best_s = start, timeline(tensors, start).makespan_s

    def others() -> list[tuple[tuple[int, int], ...]]:
        single = [(i, k) for i, t in enumerate(tensors) for k in range(len(t.options)) if k != choice[i]]
        pairs = [(a, b) for n, a in enumerate(single) for b in single[n + 1 :] if a[0] != b[0]]
        return [*((one,) for one in single), *pairs]

    moved = True
    while moved:
        moved = False
        for changes in others():
            if not go_on():
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
    """The strategies that treat all tensors alike, by name: "none", "top1% on gpu", ..."""
    out: dict[str, Choice] = {}
    for k, option in enumerate(tensors[0].options):
        name = "none" if option.compressor is None else f"{option.compressor} on {option.place}"
        out[name] = (k,) * len(tensors)
    return out


def exhaustive(tensors: Sequence[Tensor]) -> tuple[Choice, float]:
    """The best of all strategies, tried one and all; of equal ones the first."""
    every = product(*(range(len(tensor.options)) for tensor in tensors))
    return min(((choice, timeline(tensors, choice).makespan_s) for choice in every), key=lambda one: one[1])


#: Tensors up to which a proof is tried.
_PROVE = 16


def _complete(
    tensors: Sequence[Tensor], bound: Bound, found: Found, offer: Callable[[Choice], None], go_on: Callable[[], bool]
) -> bool:
    """Try every strategy that may be shorter; whether that was finished."""
    if len(tensors) > _PROVE:
        return False
    stack: list[Choice] = [()]
    while stack:
        if not go_on():
            return False
        fixed = stack.pop()
        if bound.value(fixed) >= found.iteration_s * (1 - CLOSE):
            continue
        if len(fixed) == len(tensors):
            offer(fixed)
            continue
        stack += [(*fixed, k) for k in reversed(range(len(tensors[len(fixed)].options)))]
    return True


def _shaken(tensors: Sequence[Tensor], choice: Choice, chance: np.random.Generator) -> Choice:
    """The strategy with a few tensors treated by chance."""
    other = list(choice)
    size = min(len(tensors), int(chance.integers(*_SHAKEN)))
    for i in chance.choice(len(tensors), size=size, replace=False):
        other[i] = int(chance.integers(0, len(tensors[i].options)))
    return tuple(other)
