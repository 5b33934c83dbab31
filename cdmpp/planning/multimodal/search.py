"""Tree search over the order of segments (PipeWeaver's MCTS), one tree for each variant and dispatch rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cdmpp.compose.budget import SearchControl
from cdmpp.planning.multimodal.dispatch import ALTERNATE, BACKWARD_FIRST, FORWARD_ORDER, LONGEST_TAIL, LONGEST_WAIT
from cdmpp.planning.multimodal.schedule import RULES, STRICT_RULES, Rule, Schedule, dispatched, sequence_of, start_keys
from cdmpp.planning.multimodal.tasks import Tasks

#: Weight of what is little known against what is known to be good.
EXPLORE = 0.15
#: Rollouts follow the best order of the same tree with such a share of its segments moved by so many places,
#: or are by share of the step, each class behind by a random lag of up to so much.
SHAKES, MOVED = (1.0, 4.0, 16.0), (0.0, 0.03, 0.2, 1.0)
RANDOM_SHARE, LAGS = 0.3, (0.05, 0.2, 0.6)
#: Turns in a tree at a time, and results after which the scale of the scores is set.
TURNS, MAX_FOR_SCALE = 16, 5000
#: Variants, and rules in a variant, share the orders that are tried by rank, the second getting so much of
#: what the first gets: upper confidence bounds stayed with the first variant that was good.
SHARE = 0.6
#: Rules that every variant is tried with before the trees are compared.
FIRST_RULES = frozenset(
    {
        Rule(LONGEST_WAIT, ALTERNATE),
        Rule(FORWARD_ORDER, BACKWARD_FIRST),
        Rule(LONGEST_TAIL, ALTERNATE),
        Rule(LONGEST_WAIT, BACKWARD_FIRST, True),
    }
)
#: How close a makespan is to a bound that it meets: sums of the same seconds in another order.
ROUNDING = 1e-12


@dataclass
class Counter:
    """Schedules that were made, and those that were found again."""

    hits: int = 0
    misses: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.hits + self.misses


class _Node:
    """A beginning of an order: which classes its first places hold."""

    __slots__ = ("best", "children", "done", "left", "total", "visits")

    def __init__(self, allowed: list[int]) -> None:
        self.visits, self.total, self.best = 0, 0.0, 0.0
        self.children: dict[int, _Node] = {}
        self.left = allowed  # classes that may come next and were not tried
        self.done = False  # every order that begins so was tried


class _Tree:
    """Orders of one variant's segments under one rule; ``memo`` is shared by the rules of a variant."""

    def __init__(self, tasks: Tasks, rule: Rule, memo: dict[tuple[Rule, bytes], float], keys: list[np.ndarray]) -> None:
        self.tasks, self.rule, self.memo = tasks, rule, memo
        self.natural, self.keys = keys[0], keys  # keys: orders to try before others
        self.promised_s = math.inf
        self.root = _Node(self.allowed([]))
        self.visits = 1
        self.best_s = float("inf")
        self.best_key = np.zeros(tasks.segments)

    def allowed(self, begun: Sequence[int]) -> list[int]:
        """Classes that may come after ``begun``."""
        tasks = self.tasks
        gone = [0] * len(tasks.classes)
        for c in begun:
            gone[c] += 1
        out = []
        for c in range(len(gone)):
            segment = int(tasks.first_segment[c]) + gone[c]
            if segment < tasks.first_segment[c + 1] and all(
                gone[tasks.need_class[i]] >= tasks.need_count[i]
                for i in range(int(tasks.need_ptr[segment]), int(tasks.need_ptr[segment + 1]))
            ):
                out.append(c)
        return out


_A = TypeVar("_A", "_Variant", "_Tree")


@dataclass
class Found:
    """What a search found.

    Attributes
    ----------
    best : Schedule
    complete : bool
        Every order of every variant under every rule was tried, or cannot be shorter.
    steps : int
        Orders that were tried, repeated ones included.
    """

    best: Schedule
    complete: bool
    steps: int


def search(
    variants: Sequence[Tasks],
    best: Schedule,
    watch: SearchControl,
    rng: np.random.Generator,
    *,
    until_s: float = math.inf,
    max_steps: int | None = None,
    counter: Counter | None = None,
    report: Callable[[Schedule], None] | None = None,
) -> Found:
    """Look for an order of segments whose list schedule is shorter than ``best``.

    Parameters
    ----------
    variants : sequence of Tasks
        The same step under other placements, sub-micro-batch sizes or memory knobs.
    best : Schedule
        What is known already.
    until_s : float
        Ends once ``watch`` has spent so much.
    max_steps : int, optional
        Orders to try; without it, until the time is over or nothing is left.
    report : callable, optional
        Told the best so far in every turn.

    Notes
    -----
    Each variant has a tree for each dispatch rule. The choices in a tree are the classes of the order's
    places, from the first, made by upper confidence bounds (UCT) on the mean of the average and the best
    result below them. What is tried wholly is left alone, so small trees end. Variants whose bound the best
    schedule meets are left out.
    """
    run = _Runs(best, counter if counter is not None else Counter())

    def over() -> bool:
        return watch.expired or watch.spent_s >= until_s or (max_steps is not None and run.steps >= max_steps)

    # Variants in the order of what they promise: where time is short, the last ones are not looked at.
    begun: list[_Variant] = []
    for tasks in sorted(variants, key=lambda each: each.bound_s):
        if over():
            break
        begun.append(_Variant(tasks, run, over))
    run.scale([tasks.bound_s for tasks in variants])
    while not over():
        left = [variant for variant in begun if not variant.done(run.best.makespan_s)]
        if not left:
            return Found(run.best, len(begun) == len(variants), run.steps)
        variant = _next(left)
        variant.turns(run, rng, over)
        if report is not None:
            report(run.best)
    return Found(run.best, False, run.steps)


def _next(arms: Sequence[_A]) -> _A:
    """Which arm to go on with: the n-th best so far gets :data:`SHARE` to the n of the orders."""
    ranked = sorted(arms, key=lambda arm: arm.promised_s)
    return min(enumerate(ranked), key=lambda each: each[1].visits / SHARE ** each[0])[1]


class _Variant:
    """A variant with a tree for each rule."""

    def __init__(self, tasks: Tasks, run: _Runs, over: Callable[[], bool]) -> None:
        self.tasks, self.visits = tasks, 1
        keys = start_keys(tasks)
        memo: dict[tuple[Rule, bytes], float] = {}
        rules = (*STRICT_RULES, *RULES) if np.isfinite(tasks.room).any() else RULES
        self.trees = [_Tree(tasks, rule, memo, keys) for rule in rules]
        for tree in self.trees:
            if tree.rule in FIRST_RULES and not over():
                for key in keys:
                    run.of(tree, sequence_of(tasks, key))
                tree.keys = []
                tree.promised_s = tree.best_s
        # Rules that were not tried are taken to be as good as the best of those that were.
        self.promised_s = min(tree.promised_s for tree in self.trees)
        for tree in self.trees:
            if tree.keys:
                tree.promised_s = self.promised_s
        self.trees.sort(key=lambda tree: tree.promised_s)

    def done(self, best_s: float) -> bool:
        """Whether every order was tried, or none can be shorter than that."""
        return self.tasks.bound_s >= best_s * (1 - ROUNDING) or all(tree.root.done for tree in self.trees)

    def turns(self, run: _Runs, rng: np.random.Generator, over: Callable[[], bool]) -> None:
        """Some orders in the most promising of its trees."""
        left = [tree for tree in self.trees if not tree.root.done]
        tree = _next(left)
        for _ in range(TURNS):
            if over() or tree.root.done:
                return
            found_s = _start(tree, run) if tree.keys else _turn(tree, rng, run)
            for arm in (self, tree):
                arm.visits += 1
                arm.promised_s = min(arm.promised_s, found_s)


class _Runs:
    """Makes schedules, each once, and keeps the best."""

    def __init__(self, best: Schedule, counter: Counter) -> None:
        self.best, self.counter, self.steps = best, counter, 0
        self._worst_s, self._span_s = best.makespan_s, 1.0

    def of(self, tree: _Tree, sequence: np.ndarray) -> float:
        """Makespan of an order in a tree."""
        self.steps += 1
        at = (tree.rule, sequence.tobytes())
        found_s = tree.memo.get(at)
        if found_s is not None:
            self.counter.hits += 1
            return found_s
        self.counter.misses += 1
        schedule = dispatched(tree.tasks, sequence, tree.rule)
        tree.memo[at] = schedule.makespan_s
        if math.isfinite(schedule.makespan_s) and self.steps < MAX_FOR_SCALE:
            self._worst_s = max(self._worst_s, schedule.makespan_s)
        # Of equals the newest: other orders are near to it.
        if schedule.makespan_s <= tree.best_s:
            tree.best_s = schedule.makespan_s
            tree.best_key[sequence] = np.arange(len(sequence))
        if schedule.makespan_s < self.best.makespan_s:
            self.best = schedule
        return schedule.makespan_s

    def scale(self, bounds_s: Sequence[float]) -> None:
        """Score makespans between the bound and the worst so far from now on."""
        self._span_s = max(self._worst_s - min(bounds_s, default=0.0), 1e-300)

    def score(self, found_s: float) -> float:
        """1 at the bound, 0 at the worst of the starts."""
        return min(max((self._worst_s - found_s) / self._span_s, 0.0), 1.0)


def _start(tree: _Tree, run: _Runs) -> float:
    """Try one of the orders to begin with."""
    key, *tree.keys = tree.keys
    return run.of(tree, sequence_of(tree.tasks, key))


def _lagged(tree: _Tree, rng: np.random.Generator) -> np.ndarray:
    """Segments by their share of the step, with a lag and a pace of its own for each class."""
    classes, sizes = len(tree.tasks.classes), np.diff(tree.tasks.first_segment)
    lag = LAGS[int(rng.integers(len(LAGS)))] * rng.random(classes)
    if rng.random() < 0.5:  # along the way of the data
        lag = np.cumsum(lag)
    pace = 1 + 0.3 * rng.standard_normal(classes) * (rng.random() < 0.3)
    key: np.ndarray = np.repeat(pace, sizes) * tree.natural + np.repeat(lag, sizes)
    return key


def _turn(tree: _Tree, rng: np.random.Generator, run: _Runs) -> float:
    """Select, expand, roll out, and tell the nodes on the way."""
    node, path, begun = tree.root, [tree.root], list[int]()
    while not node.left:
        whole = math.log(1 + node.visits)
        chosen, most = -1, -math.inf
        for c, child in node.children.items():
            if child.done:
                continue
            value = 0.5 * (child.total / child.visits + child.best)
            value += EXPLORE * math.sqrt(whole / child.visits)
            if value > most:
                chosen, most = c, value
        begun.append(chosen)
        node = node.children[chosen]
        path.append(node)
    begun.append(node.left.pop(int(rng.integers(len(node.left)))))
    node.children[begun[-1]] = _Node(tree.allowed(begun))
    path.append(node.children[begun[-1]])
    segments = tree.tasks.segments
    if rng.random() < RANDOM_SHARE:
        key = _lagged(tree, rng)
    else:
        shake = SHAKES[int(rng.integers(len(SHAKES)))] * rng.standard_normal(segments)
        moved = rng.random(segments) < max(MOVED[int(rng.integers(len(MOVED)))], 2 / segments)
        key = tree.best_key + np.where(moved, shake, 0.0)
    found_s = run.of(tree, sequence_of(tree.tasks, key, np.array(begun, np.int64)))
    value = run.score(found_s)
    path[-1].done = len(begun) == segments
    for node in reversed(path):
        node.visits += 1
        node.total += value
        node.best = max(node.best, value)
        if not node.left and node.children and all(child.done for child in node.children.values()):
            node.done = True
    return found_s
