"""Search over variants of a step and dispatch rules, with one tree of segment orders for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cdmpp.plan.multimodal.branch_and_bound import ROUNDING
from cdmpp.plan.multimodal.dispatch import (
    ALTERNATE,
    BACKWARD_FIRST,
    FORWARD_ORDER,
    LONGEST_TAIL,
    LONGEST_WAIT,
    DispatchRule,
)
from cdmpp.plan.multimodal.schedule import RULES, STRICT_RULES, Schedule
from cdmpp.plan.multimodal.sequence import initial_keys
from cdmpp.plan.multimodal.tasks import Tasks
from cdmpp.plan.multimodal.tree import CacheCounts, Evaluator, Tree
from cdmpp.predict.requests.budget import SearchControl

#: Steps in a tree at a time.
STEPS_IN_TREE = 16
#: Variants, and rules of a variant, share the steps by rank: the second gets this share of what the first gets.
#: Upper confidence bounds stayed with the first variant that was good.
RANK_SHARE = 0.6
#: Rules that every variant is tried with before the trees are compared.
FIRST_RULES = frozenset(
    {
        DispatchRule(LONGEST_WAIT, ALTERNATE),
        DispatchRule(FORWARD_ORDER, BACKWARD_FIRST),
        DispatchRule(LONGEST_TAIL, ALTERNATE),
        DispatchRule(LONGEST_WAIT, BACKWARD_FIRST, True),
    }
)
_Arm = TypeVar("_Arm", "_Variant", Tree)


@dataclass
class MultimodalSearchResult:
    """Result of a search.

    Attributes
    ----------
    best : Schedule
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
    control : SearchControl
    rng : numpy.random.Generator
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
