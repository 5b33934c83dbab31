"""The baseline 1F1B under a memory limit against all cuts of small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cdmpp.errors import InfeasibleError
from cdmpp.plan.multimodal.designs import StepDesigns, StepSettings
from cdmpp.plan.multimodal.modules import EFFICIENCY, Memory, Module, link_items
from cdmpp.plan.multimodal.placement import contiguous_at
from cdmpp.plan.multimodal.planner import plan_step
from cdmpp.predict.requests.budget import SearchControl

pytestmark = pytest.mark.slow

#: Share by which the baseline may exceed the best cut: layers are moved one at a time.
WEAK = 0.01


def case(seed: int) -> tuple[Module, int, int, Memory]:
    """A module of unlike layers, the items of a step, ranks, and a limit that some cuts keep only by recomputing."""
    random = np.random.default_rng(seed)
    layers = tuple(random.uniform(0.5, 2.0, int(random.integers(3, 9))).round(2).tolist())
    sizes, forward_s, backward_s = np.array([1.0, 2.0]), np.array([1.0, 1.6]), np.array([2.0, 3.2])
    module = Module(
        "m", layers, sizes, forward_s, backward_s, activation_bytes=10.0, boundary_bytes=1.0, weight_bytes=5.0
    )
    memory = Memory(float(random.uniform(30, 150)), ("keep", "recompute"))
    return module, int(random.integers(2, 6)), int(random.integers(2, 4)), memory


def best_of_all_cuts(module: Module, items: int, ranks: int, memory: Memory) -> float:
    links = link_items([module], [items], None)
    designs = StepDesigns(StepSettings([module], [items], ranks, memory, links, EFFICIENCY), SearchControl())
    layers = len(module.layers)
    cuts = (np.array([0, *inner, layers]) for inner in itertools.combinations(range(1, layers), ranks - 1))
    found = [designs.one_f_one_b(contiguous_at([module], cut)) for cut in cuts]
    return min((schedule.makespan_s for schedule, _ in filter(None, found)), default=float("inf"))


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_1f1b_within_a_memory_limit_has_a_cut_for_the_limit(first: int) -> None:
    for seed in range(first, first + 10):
        module, items, ranks, memory = case(seed)
        try:
            solution = plan_step([module], [items], ranks, memory=memory, control=SearchControl(), max_steps=5)
        except InfeasibleError:
            continue
        if "1f1b" in solution.baselines_s:
            best_s = best_of_all_cuts(module, items, ranks, memory)
            assert solution.baselines_s["1f1b"] <= best_s * (1 + WEAK), seed
