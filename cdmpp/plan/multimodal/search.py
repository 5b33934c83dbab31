"""Search for the order of segments: variants of a step and dispatch rules share the steps, each has a tree.

The tree search is PipeWeaver's (Monte Carlo tree search).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cdmpp.plan.multimodal.dispatch import DispatchRule
from cdmpp.plan.multimodal.exact import ROUNDING
from cdmpp.plan.multimodal.tasks import (
    FIRST_RULES,
    RULES,
    STRICT_RULES,
    Schedule,
    Tasks,
    allowed_classes,
    initial_keys,
    list_schedule,
    sequence_by,
)
from cdmpp.predict.requests.budget import SearchControl

#: Exploration weight of the upper confidence bounds.
EXPLORATION = 0.15
#: Rollouts perturb the tree's best order: a share of the segments moves by a normal number of places of this scale.
MOVE_SCALES, MOVED_SHARES = (1.0, 4.0, 16.0), (0.0, 0.03, 0.2, 1.0)
#: Share of rollouts that order segments by share of the step instead, with a random lag of each class up to these.
LAGGED_SHARE, LAGS = 0.3, (0.05, 0.2, 0.6)
#: Steps after which the scale of the scores is constant.
MAX_SCALE_STEPS = 5000
#: Steps in a tree at a time.
STEPS_IN_TREE = 16
#: Variants, and rules of a variant, share the steps by rank: the second gets this share of what the first gets.
#: Upper confidence bounds stayed with the first variant that was good.
RANK_SHARE = 0.6


@dataclass
class MultimodalSearchResult:
    """Result of a search.

    Attributes
    ----------
    complete : bool
        Every order of every variant under every rule was evaluated, or cannot be shorter.
    steps : int
        Orders that were evaluated, repeated ones included.
    """

    best: Schedule
    complete: bool
    steps: int


def search(
    variants: Sequence[Tasks],
    best: Schedule,
    control: SearchControl,
    rng: np.random.Generator,
    *,
    until_s: float = math.inf,
    max_steps: int | None = None,
    counts: CacheCounts | None = None,
    on_progress: Callable[[Schedule], None] | None = None,
) -> MultimodalSearchResult:
    """Search for an order of segments whose list schedule is shorter than ``best``.

    Each variant has a tree for each dispatch rule. Subtrees that were searched completely are skipped, so small trees
    end. Variants whose bound equals the best makespan are skipped.

    Parameters
    ----------
    variants : sequence of Tasks
        The same step with other placements, sub-micro-batch sizes or memory knobs.
    best : Schedule
        Best schedule known before.
    until_s : float
        The search ends once ``control`` has spent so many seconds.
    max_steps : int, optional
        Orders to evaluate; without it, until the time is over or all trees are searched.
    counts : CacheCounts, optional
        Updated.
    on_progress : callable, optional
        Called with the best schedule so far, every few steps.
    """
    evaluator = Evaluator(best, counts if counts is not None else CacheCounts())

    def over() -> bool:
        spent = control.expired or control.spent_s >= until_s
        return spent or (max_steps is not None and evaluator.steps >= max_steps)

    # Most promising variants first: with little time, the last ones are not evaluated.
    begun: list[_Variant] = []
    for tasks in sorted(variants, key=lambda variant: variant.bound_s):
        if over():
            break
        begun.append(_Variant(tasks, evaluator, over))
    evaluator.set_scale(min((tasks.bound_s for tasks in variants), default=0.0))
    while not over():
        open_variants = [variant for variant in begun if not variant.done(evaluator.best.makespan_s)]
        if not open_variants:
            return MultimodalSearchResult(evaluator.best, len(begun) == len(variants), evaluator.steps)
        _next_arm(open_variants).search(evaluator, rng, over)
        if on_progress is not None:
            on_progress(evaluator.best)
    return MultimodalSearchResult(evaluator.best, False, evaluator.steps)


def _next_arm(arms: Sequence[_Arm]) -> _Arm:
    """The arm to continue with: the n-th best so far gets :data:`RANK_SHARE` to the power n of the steps."""
    ranked = sorted(arms, key=lambda arm: arm.promise_s)
    return min(enumerate(ranked), key=lambda item: item[1].visits / RANK_SHARE ** item[0])[1]


class _Variant:
    """A variant with a tree for each rule."""

    def __init__(self, tasks: Tasks, evaluator: Evaluator, over: Callable[[], bool]) -> None:
        self.tasks, self.visits = tasks, 1
        keys = initial_keys(tasks)
        cache: dict[tuple[DispatchRule, bytes], float] = {}
        rules = (*STRICT_RULES, *RULES) if tasks.limited else RULES
        self.trees = [Tree(tasks, rule, cache, keys) for rule in rules]
        for tree in self.trees:
            if tree.rule in FIRST_RULES and not over():
                tree.evaluate_all_keys(evaluator)
        # Rules that were not tried are expected to be as good as the best of the others.
        self.promise_s = min(tree.promise_s for tree in self.trees)
        for tree in self.trees:
            if tree.keys:
                tree.promise_s = self.promise_s
        self.trees.sort(key=lambda tree: tree.promise_s)

    def done(self, best_s: float) -> bool:
        """Whether every order was evaluated, or none can be shorter than ``best_s``."""
        return self.tasks.bound_s >= best_s * (1 - ROUNDING) or all(tree.done for tree in self.trees)

    def search(self, evaluator: Evaluator, rng: np.random.Generator, over: Callable[[], bool]) -> None:
        """Make some steps in the most promising tree."""
        tree = _next_arm([tree for tree in self.trees if not tree.done])
        for _ in range(STEPS_IN_TREE):
            if over() or tree.done:
                return
            makespan_s = tree.step(rng, evaluator)
            for arm in (self, tree):
                arm.visits += 1
                arm.promise_s = min(arm.promise_s, makespan_s)


@dataclass
class CacheCounts:
    """Schedules that were computed (misses), and those that were known already (hits)."""

    hits: int = 0
    misses: int = 0

    @property
    def total(self) -> int:
        """Hits and misses."""
        return self.hits + self.misses


class Evaluator:
    """Evaluates orders of segments, each once, and keeps the best schedule.

    Attributes
    ----------
    steps : int
        Orders that were evaluated, repeated ones included.
    """

    def __init__(self, best: Schedule, counts: CacheCounts) -> None:
        self.best, self.counts, self.steps = best, counts, 0
        self._worst_s, self._span_s = best.makespan_s, 1.0

    def makespan_s(self, tree: Tree, sequence: np.ndarray) -> float:
        """Makespan of an order of segments under the tree's rule, in seconds."""
        self.steps += 1
        key = (tree.rule, sequence.tobytes())
        makespan_s = tree.cache.get(key)
        if makespan_s is not None:
            self.counts.hits += 1
            return makespan_s
        self.counts.misses += 1
        schedule = list_schedule(tree.tasks, sequence, tree.rule)
        tree.cache[key] = schedule.makespan_s
        if math.isfinite(schedule.makespan_s) and self.steps < MAX_SCALE_STEPS:
            self._worst_s = max(self._worst_s, schedule.makespan_s)
        # Ties: the newest, whose neighbours are other orders.
        if schedule.makespan_s <= tree.best_s:
            tree.best_s = schedule.makespan_s
            tree.best_key[sequence] = np.arange(len(sequence))
        if schedule.makespan_s < self.best.makespan_s:
            self.best = schedule
        return schedule.makespan_s

    def set_scale(self, least_bound_s: float) -> None:
        """Score makespans between this bound and the worst so far from now on."""
        self._span_s = max(self._worst_s - least_bound_s, 1e-300)

    def score(self, makespan_s: float) -> float:
        """1 at the bound, 0 at the worst of the initial orders."""
        return min(max((self._worst_s - makespan_s) / self._span_s, 0.0), 1.0)


class _Node:
    """A beginning of an order: the classes of its first places."""

    __slots__ = ("best", "children", "done", "total", "untried", "visits")

    def __init__(self, allowed: list[int]) -> None:
        self.visits, self.total, self.best = 0, 0.0, 0.0
        self.children: dict[int, _Node] = {}
        self.untried = allowed  # classes that may come next
        self.done = False  # every order with this beginning was evaluated


class Tree:
    """Orders of one variant's segments under one dispatch rule.

    Parameters
    ----------
    cache : dict
        Makespans by rule and order; shared by the rules of a variant.
    keys : list of ndarray of float64, shape (segments,)
        Initial orders, evaluated before others.
    """

    def __init__(
        self, tasks: Tasks, rule: DispatchRule, cache: dict[tuple[DispatchRule, bytes], float], keys: list[np.ndarray]
    ) -> None:
        self.tasks, self.rule, self.cache, self.keys = tasks, rule, cache, keys
        self.share_key = keys[0]
        self.promise_s = math.inf
        self.visits = 1
        self.best_s = math.inf
        self.best_key = np.zeros(tasks.segments)
        self._root = _Node(allowed_classes(tasks, []))

    @property
    def done(self) -> bool:
        """Whether every order was evaluated."""
        return self._root.done

    def evaluate_all_keys(self, evaluator: Evaluator) -> None:
        """Evaluate the initial orders."""
        while self.keys:
            self._evaluate_key(evaluator)
        self.promise_s = self.best_s

    def step(self, rng: np.random.Generator, evaluator: Evaluator) -> float:
        """Evaluate one order: an initial one while there are any, then by tree search; its makespan in seconds."""
        return self._evaluate_key(evaluator) if self.keys else self._tree_step(rng, evaluator)

    def _evaluate_key(self, evaluator: Evaluator) -> float:
        key, *self.keys = self.keys
        return evaluator.makespan_s(self, sequence_by(self.tasks, key))

    def _tree_step(self, rng: np.random.Generator, evaluator: Evaluator) -> float:
        """Selection by upper confidence bounds, expansion, rollout, backpropagation."""
        node, path, prefix = self._root, [self._root], list[int]()
        while not node.untried:
            prefix.append(_select(node))
            node = node.children[prefix[-1]]
            path.append(node)
        prefix.append(node.untried.pop(int(rng.integers(len(node.untried)))))
        node.children[prefix[-1]] = _Node(allowed_classes(self.tasks, prefix))
        path.append(node.children[prefix[-1]])
        key = self._rollout_key(rng)
        makespan_s = evaluator.makespan_s(self, sequence_by(self.tasks, key, np.array(prefix, np.int64)))
        score = evaluator.score(makespan_s)
        path[-1].done = len(prefix) == self.tasks.segments
        for node in reversed(path):
            node.visits += 1
            node.total += score
            node.best = max(node.best, score)
            if not node.untried and node.children and all(child.done for child in node.children.values()):
                node.done = True
        return makespan_s

    def _rollout_key(self, rng: np.random.Generator) -> np.ndarray:
        """Key that completes an order: the best order perturbed, or by share of the step with lags."""
        segments = self.tasks.segments
        if rng.random() < LAGGED_SHARE:
            return self._lagged_key(rng)
        shift = MOVE_SCALES[int(rng.integers(len(MOVE_SCALES)))] * rng.standard_normal(segments)
        draws = rng.random(segments)
        moved = draws < max(MOVED_SHARES[int(rng.integers(len(MOVED_SHARES)))], 2 / segments)
        return self.best_key + np.where(moved, shift, 0.0)

    def _lagged_key(self, rng: np.random.Generator) -> np.ndarray:
        """Segments by their share of the step, with a random lag and pace of each class."""
        classes, sizes = len(self.tasks.classes), np.diff(self.tasks.first_segment)
        lag = LAGS[int(rng.integers(len(LAGS)))] * rng.random(classes)
        if rng.random() < 0.5:  # lags add up along the data path
            lag = np.cumsum(lag)
        pace = 1 + 0.3 * rng.standard_normal(classes) * (rng.random() < 0.3)
        key: np.ndarray = np.repeat(pace, sizes) * self.share_key + np.repeat(lag, sizes)
        return key


def _select(node: _Node) -> int:
    """Class of the child with the largest upper confidence bound (UCT)."""
    log_visits = math.log(1 + node.visits)
    selected, largest = -1, -math.inf
    for c, child in node.children.items():
        if child.done:
            continue
        value = 0.5 * (child.total / child.visits + child.best)
        value += EXPLORATION * math.sqrt(log_visits / child.visits)
        if value > largest:
            selected, largest = c, value
    return selected


_Arm = TypeVar("_Arm", "_Variant", Tree)
