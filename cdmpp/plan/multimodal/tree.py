"""Search tree over orders of segments (Monte Carlo tree search, PipeWeaver)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cdmpp.plan.multimodal.dispatch import DispatchRule
from cdmpp.plan.multimodal.schedule import Schedule, list_schedule
from cdmpp.plan.multimodal.sequence import allowed_classes, sequence_by
from cdmpp.plan.multimodal.tasks import Tasks

#: Exploration weight of the upper confidence bounds.
EXPLORATION = 0.15
#: Rollouts perturb the tree's best order: a share of the segments moves by a normal number of places of this scale.
MOVE_SCALES, MOVED_SHARES = (1.0, 4.0, 16.0), (0.0, 0.03, 0.2, 1.0)
#: Share of rollouts that order segments by share of the step instead, with a random lag of each class up to these.
LAGGED_SHARE, LAGS = 0.3, (0.05, 0.2, 0.6)
#: Steps after which the scale of the scores is constant.
MAX_SCALE_STEPS = 5000


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
    best : Schedule
    counts : CacheCounts
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
    tasks : Tasks
    rule : DispatchRule
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
        key: np.ndarray = self.best_key + np.where(moved, shift, 0.0)
        return key

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
