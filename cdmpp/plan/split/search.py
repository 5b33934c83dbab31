"""Splits of layers into stages with their costs, and the search for the best by dynamic programming.

There are two goals. ``slowest`` minimises the longest stage, which limits the rate of a long run of
micro-batches; dynamic programming finds the optimum (as in PipeDream, SOSP '19, section 3.1, without
replication). ``step`` minimises the time of a whole 1F1B step: dynamic programming finds the split with the least
lower bound, then its boundaries are moved and the splits emulated. Where there are few splits, all are emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from math import comb
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import InfeasibleError
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.memory import IGNORE_HINT
from cdmpp.predict.requests.request import Answer
from cdmpp.simulate.emulator.emulate import EmulatedStep, Emulator
from cdmpp.simulate.emulator.orders import ScheduleName
from cdmpp.simulate.emulator.stages import Floats, Stage, grid, on_grid


@dataclass(frozen=True)
class Layer:
    """One layer, which is not cut."""

    # Seconds of one micro-batch on each kind of device.
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_bytes: float = 0.0  # for one micro-batch, between its forward and its backward pass
    weight_bytes: float = 0.0  # weights, gradients and optimizer states
    transfer_s: float = 0.0  # seconds to send the output to another rank, and again for its gradient
    name: str = ""
    boundary_bytes: float = 0.0  # input of the layer for one micro-batch


@dataclass(frozen=True)
class Rank:
    """A device of the pipeline."""

    kind: int = 0  # index into the costs of a layer
    memory_bytes: float = float("inf")


class LayerTable:
    """Sums over runs of layers.

    ``forward_s`` and ``backward_s``, (kinds, n + 1), are sums over the first layers, rounded to a common grid so that
    their differences are exact. With ``recompute`` a stage keeps only its input of a waiting micro-batch; the time of
    recomputing is part of the layers' ``backward_s``.
    """

    def __init__(self, layers: Sequence[Layer], micro_batches: int, *, recompute: bool = False) -> None:
        self.layers, self.micro_batches = list(layers), micro_batches
        kinds = len(layers[0].forward_s)
        costs = np.array([[layer.forward_s, layer.backward_s] for layer in layers]).transpose(1, 2, 0)
        transfer = np.array([layer.transfer_s for layer in layers])
        horizon_s = micro_batches * float(costs.sum() + 2 * transfer.sum())
        costs = on_grid(costs, grid(horizon_s))
        self.transfer_s: Floats = on_grid(transfer, grid(horizon_s))
        sums = np.zeros((2, kinds, len(layers) + 1))
        sums[:, :, 1:] = np.cumsum(costs, axis=2)
        self.forward_s: Floats
        self.backward_s: Floats
        self.forward_s, self.backward_s = sums
        self._weights = np.concatenate(([0.0], np.cumsum([layer.weight_bytes for layer in layers])))
        self._held = np.concatenate(([0.0], np.cumsum([layer.activation_bytes for layer in layers])))
        self.recompute = recompute
        self._input = np.array([*(layer.boundary_bytes if recompute else 0.0 for layer in layers), 0.0])

    def __len__(self) -> int:
        return len(self.layers)

    def time_s(self, kind: int, first: int, last: int) -> float:
        """Forward and backward pass of layers ``first`` to ``last - 1``."""
        both = self.forward_s[kind] + self.backward_s[kind]
        return float(both[last] - both[first])

    def ends(self, most_s: float = np.inf) -> NDArray[np.int64]:
        """Ends of the runs of layers that begin at each layer, shape (n + 1, width); n + 1 behind the last layer.

        ``most_s``: runs that take longer on every kind may be left out.
        """
        both, layers = self.forward_s + self.backward_s, len(self)
        last = [np.searchsorted(row, row * (1 + 1e-12) + most_s, side="right") - 1 for row in both]
        width = layers if most_s == np.inf else max(1, int((np.max(last, axis=0) - np.arange(layers + 1)).max()))
        ends: NDArray[np.int64] = np.arange(layers + 1)[:, None] + np.arange(1, width + 1)
        return np.minimum(ends, layers + 1)

    def times_s(self, kind: int, ends: NDArray[np.int64]) -> Floats:
        """:meth:`time_s` of all runs; infinite behind the last layer."""
        both = np.append(self.forward_s[kind] + self.backward_s[kind], np.inf)
        return np.asarray(both[ends] - both[:-1, None])

    def bytes_held(self, ahead: int, first: int, last: int) -> float:
        """Memory of a rank with these layers and the activations of ``ahead`` micro-batches."""
        held = self._weights[last] - self._weights[first] + self._whole(ahead) * (self._held[last] - self._held[first])
        return float(held + (ahead - 1) * self._input[first])

    def all_bytes_held(self, ahead: int, ends: NDArray[np.int64]) -> Floats:
        """:meth:`bytes_held` of all runs; infinite behind the last layer."""
        both = np.append(self._weights + self._whole(ahead) * self._held, np.inf)
        return np.asarray(both[ends] - both[:-1, None] + (ahead - 1) * self._input[:, None])

    def _whole(self, ahead: int) -> int:
        """Micro-batches that hold all their activations: where they are recomputed, the one that is."""
        return 1 if self.recompute else ahead

    def ahead(self, rank: int, ranks: int) -> int:
        """Most micro-batches whose activations a rank holds at a time under 1F1B."""
        return min(ranks - rank, self.micro_batches)


@dataclass(frozen=True)
class Split:
    """Layers on ranks."""

    table: LayerTable
    ranks: tuple[Rank, ...]  # in the order of the pipeline
    order: tuple[int, ...]  # index of each of them in the given ranks
    begin: tuple[int, ...]  # stage s holds layers ``begin[s]`` to ``begin[s + 1] - 1``

    @property
    def stage_s(self) -> list[float]:
        """Forward and backward pass of one micro-batch in each stage."""
        return [self.table.time_s(rank.kind, a, b) for rank, a, b in self.runs()]

    @property
    def slowest_s(self) -> float:
        """The longest stage, or transfer between stages."""
        cuts = [float(self.table.transfer_s[b - 1]) for b in self.begin[1:-1]]
        return max(self.stage_s + cuts)

    @property
    def bytes_held(self) -> list[float]:
        """Peak memory of each rank under 1F1B."""
        count = len(self.ranks)
        return [self.table.bytes_held(self.table.ahead(s, count), a, b) for s, (_, a, b) in enumerate(self.runs())]

    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return all(b <= rank.memory_bytes for b, rank in zip(self.bytes_held, self.ranks, strict=True))

    def step(self, emulator: Emulator, schedule: ScheduleName = "1f1b") -> EmulatedStep:
        """A step under a schedule."""
        forward, backward = stage_costs(self)
        stages = [Stage(forward[s], backward[s]) for s in range(len(self.ranks))]
        cuts = [float(self.table.transfer_s[b - 1]) for b in self.begin[1:-1]]
        return emulator.simulate(stages, self.table.micro_batches, schedule, transfer_s=cuts)

    def runs(self) -> Iterator[tuple[Rank, int, int]]:
        """Rank, first layer, and the layer after the last one, of each stage."""
        return zip(self.ranks, self.begin, self.begin[1:], strict=False)


def stage_costs(split: Split) -> tuple[dict[int, float], dict[int, float]]:
    """Costs of the stages for other schedule simulators.

    Returns ``fwd_costs, bwd_costs``: stage index to seconds of one micro-batch; the stages are numbered as in
    ``torch.distributed.pipelining``. Backward costs include weight gradients.
    """
    table = split.table
    forward, backward = (
        {s: float(sums[rank.kind, b] - sums[rank.kind, a]) for s, (rank, a, b) in enumerate(split.runs())}
        for sums in (table.forward_s, table.backward_s)
    )
    return forward, backward


def step_bound_s(split: Split) -> float:
    """Lower bound of all schedules of a split with whole backward passes.

    As :func:`cdmpp.simulate.emulator.emulate.lower_bound`: each rank waits for its first micro-batch, runs all its
    passes and waits until the gradients have reached stage 0; and one micro-batch passes all stages twice.
    """
    before = bound_s = 0.0
    for s, time_s in enumerate(split.stage_s):
        bound_s = max(bound_s, before + split.table.micro_batches * time_s)
        before += time_s
        if s + 2 < len(split.begin):
            before += 2 * float(split.table.transfer_s[split.begin[s + 1] - 1])
    return max(bound_s, before)


def equal_count(table: LayerTable, ranks: Sequence[Rank]) -> Split:
    """Baseline: equal numbers of layers on all ranks."""
    begin = [round(len(table) * s / len(ranks)) for s in range(len(ranks) + 1)]
    return Split(table, tuple(ranks), tuple(range(len(ranks))), tuple(begin))


def greedy(table: LayerTable, ranks: Sequence[Rank]) -> Split:
    """Baseline: each rank in turn takes layers up to its share of the remaining time."""
    begin = [0]
    for s, rank in enumerate(ranks[:-1]):
        share_s = table.time_s(rank.kind, begin[-1], len(table)) / (len(ranks) - s)
        last = begin[-1] + 1
        max_end = len(table) - (len(ranks) - s - 1)
        # The layer that crosses the share is taken if that leaves a smaller difference.
        while last < max_end and (
            abs(table.time_s(rank.kind, begin[-1], last + 1) - share_s)
            <= abs(table.time_s(rank.kind, begin[-1], last) - share_s)
        ):
            last += 1
        begin.append(last)
    return Split(table, tuple(ranks), tuple(range(len(ranks))), (*begin, len(table)))


Join = Callable[[Floats, Floats, Floats, int], Floats]
Goal = Literal["slowest", "step"]
#: Most splits that are all simulated, for the goal "step".
FEW = 2000


@dataclass(frozen=True)
class SplitResult:
    """The best split of a search."""

    split: Split
    # The objective, and its lower bound over all contiguous splits; for the goal "step" also over all orders of whole
    # passes, not only 1F1B.
    value_s: float
    bound_s: float
    steps: int = 0  # number of simulated splits
    complete: bool = False  # no contiguous split has a smaller objective


def split(
    table: LayerTable,
    ranks: Sequence[Rank],
    goal: Goal = "slowest",
    *,
    any_order: bool = False,
    control: SearchControl | None = None,
    max_steps: int | None = None,
    emulator: Emulator | None = None,
    describe: Callable[[SplitResult], Answer] | None = None,
) -> SplitResult:
    """Find the best contiguous split; each rank gets at least one layer.

    ``any_order``: whether the order of the ranks may change. ``max_steps``: most splits to simulate for the goal
    "step"; the first four are always simulated. ``describe``: makes the plan so far, for progress reports.
    Raises InfeasibleError: no split fits into the memory; the message has the memory that one needs.
    """
    control, emulator = control or SearchControl(), emulator or Emulator()
    try:
        seeds = [s for s in (equal_count(table, ranks), greedy(table, ranks)) if s.fits()]
        most_s = min((seed.slowest_s for seed in seeds), default=np.inf)
        slowest = best_split(table, ranks, any_order, longest, control=control, most_s=most_s)
        if slowest is None:
            raise _infeasible(table, ranks, any_order)
        if goal == "slowest":
            return SplitResult(slowest, slowest.slowest_s, slowest.slowest_s, complete=True)
        most_s = min((step_bound_s(seed) for seed in [*seeds, slowest]), default=np.inf) / table.micro_batches
        least = best_split(table, ranks, any_order, bound, control=control, most_s=most_s)
        assert least is not None  # the same splits fit
    except UnfinishedError:
        return _simple(table, ranks, goal, emulator)
    bound_s = step_bound_s(least)
    # All of these, whatever the budget: the result is not worse than the baselines.
    seeds = [least, slowest, *seeds]
    values_s = [seed.step(emulator).makespan_s for seed in seeds]
    best_s, steps = min(values_s), len(seeds)
    best = seeds[values_s.index(best_s)]
    orders = arrangements(ranks) if any_order else [tuple(range(len(ranks)))]
    exhaustive = len(orders) * comb(len(table) - 1, len(ranks) - 1) <= FEW
    candidates = every(table, ranks, orders) if exhaustive else moved(best)
    all_simulated = False
    while best_s > bound_s and not control.expired and (max_steps is None or steps < max_steps):
        candidate = next(candidates, None)
        if candidate is None:
            all_simulated = exhaustive
            break
        if not candidate.fits():
            continue
        steps += 1
        value_s = candidate.step(emulator).makespan_s
        if value_s < best_s:
            best, best_s = candidate, value_s
            candidates = candidates if exhaustive else moved(best)
        so_far = SplitResult(best, best_s, bound_s, steps)
        control.report(best=best_s, bound=bound_s, answer=partial(describe, so_far) if describe else None)
    return SplitResult(best, best_s, bound_s, steps, complete=all_simulated or best_s <= bound_s)


def _simple(table: LayerTable, ranks: Sequence[Rank], goal: Goal, emulator: Emulator) -> SplitResult:
    """The better baseline, where the budget ended before the best split was known.

    Raises InfeasibleError: no baseline fits into the memory.
    """
    seeds = [split for split in (equal_count(table, ranks), greedy(table, ranks)) if split.fits()]
    if not seeds:
        raise InfeasibleError.at(
            "budget_s", "the budget ended before a split was found that fits into the memory", hint="allow more time"
        )
    values_s = [split.slowest_s if goal == "slowest" else split.step(emulator).makespan_s for split in seeds]
    best_s = min(values_s)
    kinds = {rank.kind for rank in ranks}
    fastest_s = sum(min(table.time_s(kind, i, i + 1) for kind in kinds) for i in range(len(table)))
    bound_s = fastest_s / len(ranks) * (1 if goal == "slowest" else table.micro_batches)
    return SplitResult(seeds[values_s.index(best_s)], best_s, min(bound_s, best_s), len(seeds))


def arrangements(ranks: Sequence[Rank]) -> list[tuple[int, ...]]:
    """The orders of the ranks that differ by more than a swap of equal ones; at most ``FEW`` and one more."""
    orders: list[tuple[int, ...]] = []

    def extend(order: tuple[int, ...]) -> None:
        if len(orders) > FEW:
            return
        if len(order) == len(ranks):
            orders.append(order)
        tried = set()
        for r, rank in enumerate(ranks):
            if r not in order and rank not in tried:
                tried.add(rank)
                extend((*order, r))

    extend(())
    return orders


def every(table: LayerTable, ranks: Sequence[Rank], orders: Sequence[tuple[int, ...]]) -> Iterator[Split]:
    """All contiguous splits for some orders of the ranks, including those that do not fit."""
    for order in orders:
        used = tuple(ranks[r] for r in order)
        for cuts in combinations(range(1, len(table)), len(ranks) - 1):
            yield Split(table, used, order, (0, *cuts, len(table)))


def moved(base: Split) -> Iterator[Split]:
    """Splits in which one or two boundaries are moved by one layer."""
    single = [(at, by) for at in range(1, len(base.begin) - 1) for by in (-1, 1)]
    moves: list[tuple[tuple[int, int], ...]] = [(move,) for move in single]
    moves += [(a, b) for a, b in combinations(single, 2) if a[0] != b[0]]
    for move in moves:
        begin = list(base.begin)
        for at, by in move:
            begin[at] += by
        if all(a < b for a, b in pairwise(begin)):
            yield Split(base.table, base.ranks, base.order, tuple(begin))


def _infeasible(table: LayerTable, ranks: Sequence[Rank], any_order: bool) -> InfeasibleError:
    """The error where no split fits, with the factor by which the memory would have to grow."""
    count = len(ranks)

    def weigh(rank: Rank, position: int) -> Floats:
        held = table.all_bytes_held(table.ahead(position, count), table.ends())
        # Stages that are none stay infinite, also on a rank without a limit.
        return np.divide(held, rank.memory_bytes, out=held.copy(), where=np.isfinite(held))

    least = best_split(table, ranks, any_order, larger, weigh)
    assert least is not None
    over = [
        (s, needed, rank.memory_bytes)
        for s, (needed, rank) in enumerate(zip(least.bytes_held, least.ranks, strict=True))
        if needed > rank.memory_bytes
    ]
    s, needed, limit = max(over, key=lambda stage: stage[1] / stage[2])
    return InfeasibleError.at(
        f"ranks.{least.order[s]}.memory_bytes",
        f"no split fits: the closest one needs {needed:.12g} bytes there, {needed / limit:.4g} times {limit:.12g}",
        hint=f"with {needed / limit:.6g} times the memory on every rank a split fits; or use more ranks; "
        + IGNORE_HINT,
    )


class UnfinishedError(Exception):
    """The budget ended before the best split was known."""


def longest(time_s: Floats, transfer_s: Floats, rest_s: Floats, micro_batches: int) -> Floats:
    """The longest of a stage, the transfer after it and the following stages."""
    return np.maximum(time_s, np.maximum(transfer_s, rest_s))


def bound(time_s: Floats, transfer_s: Floats, rest_s: Floats, micro_batches: int) -> Floats:
    """Lower bound of a step from a stage on: all its passes, or one pass and then the following stages."""
    return np.maximum(micro_batches * time_s, time_s + 2 * transfer_s + rest_s)


def states(ranks: Sequence[Rank], any_order: bool) -> tuple[list[Rank], list[tuple[int, ...]]]:
    """States of the dynamic programming: kinds of ranks, and how many of each are left, fewest first.

    In a given order every rank is a separate kind, and the last ones are left.
    """
    if not any_order:
        return list(ranks), [
            tuple(int(r >= len(ranks) - left) for r in range(len(ranks))) for left in range(len(ranks) + 1)
        ]
    kinds = sorted(set(ranks), key=lambda rank: (rank.kind, rank.memory_bytes))
    counts = [sum(rank == kind for rank in ranks) for kind in kinds]
    grid_of = np.stack(np.meshgrid(*[np.arange(n + 1) for n in counts], indexing="ij"), axis=-1)
    all_of = [tuple(int(n) for n in row) for row in grid_of.reshape(-1, len(kinds))]
    return kinds, sorted(all_of, key=sum)


def best_split(
    table: LayerTable,
    ranks: Sequence[Rank],
    any_order: bool,
    join: Join,
    weigh: Callable[[Rank, int], Floats] | None = None,
    control: SearchControl | None = None,
    most_s: float = np.inf,
) -> Split | None:
    """The split with the least value, from the last stage to the first; None where none fits.

    ``weigh`` replaces the time of every run of layers on a rank by another figure. ``most_s``: the longest stage of
    the split is not longer.

    Raises UnfinishedError: ``control`` has expired.
    """
    kinds, left = states(ranks, any_order)
    count, layers = len(ranks), len(table)
    # best[state][i]: least value of layers i and later on the ranks of the state.
    best: dict[tuple[int, ...], Floats] = {left[0]: np.full(layers + 1, np.inf)}
    best[left[0]][layers] = 0.0
    choice: dict[tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    transfer_s = np.concatenate(([0.0], table.transfer_s, [0.0]))
    transfer_s[layers] = 0.0
    ends = table.ends(most_s * (1 + 1e-9))
    after_s = transfer_s[ends]
    runs = {kind: table.times_s(kind, ends) for kind in dict.fromkeys(rank.kind for rank in kinds)}
    has_limit = any(np.isfinite(rank.memory_bytes) for rank in kinds)
    for state in left[1:]:
        if control is not None and control.expired:
            raise UnfinishedError
        position = count - sum(state)
        # In a given order, the next rank is the first of those that are left.
        nexts = [k for k, n in enumerate(state) if n] if any_order else [position]
        value = np.full(layers + 1, np.inf)
        which, until = np.zeros(layers + 1, np.int64), np.zeros(layers + 1, np.int64)
        for k in nexts:
            rest_s = best[tuple(n - (other == k) for other, n in enumerate(state))]
            if weigh is None:
                time_s = runs[kinds[k].kind]
                if has_limit:
                    held = table.all_bytes_held(table.ahead(position, count), ends)
                    time_s = np.where(held <= kinds[k].memory_bytes, time_s, np.inf)
            else:
                time_s = weigh(kinds[k], position)
            joined = join(time_s, after_s, np.append(rest_s, np.inf)[ends], table.micro_batches)
            at = joined.argmin(axis=1)
            least = joined[np.arange(layers + 1), at]
            better = least < value
            value[better], until[better], which[better] = least[better], ends[np.arange(layers + 1), at][better], k
        best[state], choice[state] = value, (which, until)
    if not np.isfinite(best[left[-1]][0]):
        return None
    state, begin, used = left[-1], [0], []
    while begin[-1] < layers:
        k, until_layer = (int(part[begin[-1]]) for part in choice[state])
        state = tuple(n - (other == k) for other, n in enumerate(state))
        used.append(kinds[k])
        begin.append(until_layer)
    return Split(table, tuple(used), _order(ranks, used, any_order), tuple(begin))


def _order(ranks: Sequence[Rank], used: Sequence[Rank], any_order: bool) -> tuple[int, ...]:
    """Index in the request of each rank in use."""
    if not any_order:
        return tuple(range(len(ranks)))
    free: dict[Rank, list[int]] = {}
    for r, rank in enumerate(ranks):
        free.setdefault(rank, []).append(r)
    return tuple(free[rank].pop(0) for rank in used)


def larger(share: Floats, transfer_s: Floats, rest: Floats, micro_batches: int) -> Floats:
    """The larger of the figures of a stage and of the following ones."""
    return np.maximum(share, rest)
