"""Tree search over the order of segments (PipeWeaver's MCTS), one tree for each variant and dispatch rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.compose.watch import Watch
from cdmpp.planning.multimodal.dispatch import (
    ALTERNATE,
    BACKWARD_FIRST,
    FORWARD_ORDER,
    LONGEST_TAIL,
    LONGEST_WAIT,
)
from cdmpp.planning.multimodal.schedule import (
    RULES,
    STRICT_RULES,
    Rule,
    Schedule,
    dispatched,
    sequence_of,
    start_keys,
)
from cdmpp.planning.multimodal.tasks import Tasks

#: Weight of what is little known against what is known to be good.
EXPLORE = 0.15
#: Rollouts follow the best order of the same tree, shaken by so many places, or a random one.
SHAKES = (0.3, 1.0, 2.0, 4.0, 8.0)
RANDOM_SHARE = 0.15
#: Turns in a tree at a time, and results after which the scale of the scores is set.
TURNS, MAX_FOR_SCALE = 16, 5000
#: Trees that are looked at first, and steps after which it is one more.
WIDTH, STEPS_A_TREE = 10, 250
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

    def __init__(
        self, tasks: Tasks, rule: Rule, memo: dict[tuple[Rule, bytes], float], keys: list[np.ndarray]
    ) -> None:
        self.tasks, self.rule, self.memo = tasks, rule, memo
        self.keys = keys if rule not in FIRST_RULES else []  # orders to try before others
        self.promised_s = math.inf
        self.root = _Node(self.allowed([]))
        self.visits, self.total = 1, 0.0
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
    watch: Watch,
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
    The first choice of the tree is the variant with its rule, the next ones are the classes of the order's
    places, from the first; choices are made by upper confidence bounds (UCT) on the mean of the average and
    the best result below them. What is tried wholly is left alone, so small trees end. Variants whose bound
    the best schedule meets are left out.
    """
    run = _Runs(best, counter if counter is not None else Counter())

    def over() -> bool:
        return watch.expired or watch.spent_s >= until_s or (max_steps is not None and run.steps >= max_steps)

    # Variants in the order of what they promise: where time is short, the last ones are not looked at.
    trees: list[_Tree] = []
    for tasks in sorted(variants, key=lambda each: each.bound_s):
        keys = start_keys(tasks)
        memo: dict[tuple[Rule, bytes], float] = {}
        for rule in (*STRICT_RULES, *RULES) if np.isfinite(tasks.room).any() else RULES:
            if over():
                break
            trees.append(_Tree(tasks, rule, memo, keys))
            if rule in FIRST_RULES:
                for key in keys:
                    run.of(trees[-1], sequence_of(tasks, key))
        # Rules that were not tried are taken to be as good as the best of those that were.
        mine = [tree for tree in trees if tree.tasks is tasks]
        least_s = min((tree.best_s for tree in mine), default=math.inf)
        for tree in mine:
            tree.promised_s = min(tree.best_s, least_s) if tree.rule not in FIRST_RULES else tree.best_s
    run.scale([tasks.bound_s for tasks in variants])
    for tree in trees:
        tree.total = run.score(tree.promised_s)
    trees.sort(key=lambda each: each.promised_s)
    while not over():
        left = [
            tree
            for tree in trees
            if not tree.root.done and tree.tasks.bound_s < run.best.makespan_s * (1 - ROUNDING)
        ]
        if not left:
            return Found(run.best, len(trees) > 0 or not variants, run.steps)
        # The better trees first, and more of them the longer it takes.
        left = left[: WIDTH + run.steps // STEPS_A_TREE]
        whole = math.log(1 + sum(tree.visits for tree in left))

        def promise(tree: _Tree, whole: float = whole) -> float:
            best_s = min(tree.best_s, tree.promised_s)
            known = 0.5 * (tree.total / tree.visits + run.score(best_s))
            return known + EXPLORE * math.sqrt(whole / tree.visits)

        tree = max(left, key=promise)
        # One choice of a tree is worth some turns in it.
        for _ in range(TURNS):
            if over() or tree.root.done:
                break
            tree.visits += 1
            found_s = _start(tree, run) if tree.keys else _turn(tree, rng, run)
            tree.total += run.score(found_s)
        if report is not None:
            report(run.best)
    return Found(run.best, False, run.steps)


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
        if schedule.makespan_s < tree.best_s:
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
        key = rng.random(segments)
    else:
        shake = SHAKES[int(rng.integers(len(SHAKES)))]
        key = tree.best_key + shake * rng.standard_normal(segments)
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
