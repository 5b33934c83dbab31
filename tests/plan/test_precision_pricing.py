"""Pricing of precision plans: casts on both sides, incremental updates, and the iteration of replay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.plan.precision.pricing import DeviceCosts, Pricing, uniform
from cdmpp.simulate.replay import Graph, Node, replay
from tests.plan.precision_cases import make_costs
from tests.plan.precision_exhaustive import price_all


def figures(priced: Pricing) -> tuple[float, float, float, bytes]:
    return priced.iteration_s, priced.memory_bytes, priced.sensitivity, priced.slots_s.tobytes()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(0, 2**16), st.data())
def test_incremental_pricing_equals_full_pricing(count: int, seed: int, data: st.DataObject) -> None:
    costs = make_costs(count, seed)
    priced = Pricing(costs, [0] * count)
    for _ in range(8):
        operator = data.draw(st.integers(0, count - 1))
        priced.change(operator, data.draw(st.integers(0, 2)))
        assert figures(priced) == figures(Pricing(costs, priced.levels))


def test_a_change_updates_both_neighbours() -> None:
    costs = make_costs(3, 1)
    priced = Pricing(costs, [0, 0, 0])
    before = priced.slots_s.copy()
    priced.change(1, 2)
    changed = np.flatnonzero(priced.slots_s != before).tolist()
    # Forward: the operator and its reader. Backward (from the other end): the operator and its producer.
    assert changed == [1, 2, costs.backward_slot(1), costs.backward_slot(0)]
    first, second = costs.edges
    assert priced.slots_s[1] == costs.forward_s[1][2] + first.forward_s[0, 2]
    assert priced.slots_s[2] == costs.forward_s[2][0] + second.forward_s[2, 0]
    assert priced.slots_s[costs.backward_slot(0)] == costs.backward_s[0][0] + first.backward_s[0, 2]
    assert priced.casts_s == pytest.approx(
        first.forward_s[0, 2] + first.backward_s[0, 2] + second.forward_s[2, 0] + second.backward_s[2, 0]
    )


def test_readers_of_one_type_share_one_copy() -> None:
    candidates = (make_costs(6, seed) for seed in range(50))
    costs = next(c for c in candidates if any(len(kept.consumers) > 1 for kept in c.kept))
    kept = next(kept for kept in costs.kept if len(kept.consumers) > 1)
    reader = kept.consumers[0]
    priced = Pricing(costs, [0] * 6)
    before = priced.memory_bytes
    priced.change(reader, 2)
    own = costs.own_bytes[reader]
    alone = sum(k.elements for k in costs.kept if k.consumers == (reader,))
    shared = sum(k.elements for k in costs.kept if reader in k.consumers and len(k.consumers) > 1)
    # Alone: float32 instead of int8. Shared: float32 in addition to the int8 that the others still read.
    assert priced.memory_bytes - before == pytest.approx(own[2] - own[0] + 3 * alone + 4 * shared)


def test_vectorised_pricing_equals_pricing() -> None:
    costs = make_costs(7, 3)
    block = np.random.default_rng(0).integers(0, 3, (20, 7))
    slots, memory, added = price_all(costs, block)
    for row, slot, bytes_, error in zip(block, slots, memory, added, strict=True):
        priced = Pricing(costs, row.tolist())
        np.testing.assert_allclose(slot, priced.slots_s, rtol=1e-12)
        assert (bytes_, error) == pytest.approx((priced.memory_bytes, priced.sensitivity), rel=1e-12)


def test_uniform_takes_the_next_higher_type_where_one_is_missing() -> None:
    costs = make_costs(2, 0)
    assert uniform(costs, "float16") == [1, 1]
    narrow = DeviceCosts(**{**vars(costs), "dtypes": [("int8", "float32"), ("int8",)]})
    assert uniform(narrow, "float16") == [1, 0]


@pytest.mark.parametrize("seed", range(5))
def test_iteration_equals_replay(seed: int) -> None:
    """One device: its queue, exchanges in a separate stream, then the update."""
    costs = make_costs(9, seed)
    priced = Pricing(costs, np.random.default_rng(seed).integers(0, 3, 9).tolist())
    update_s = float(costs.tail_s[-1])
    tails = costs.tail_s[:-1]
    durations = -np.diff(np.append(tails, 0.0))
    nodes = [
        Node(f"slot{k}", "gpu", float(seconds), (f"slot{k - 1}",) if k else ())
        for k, seconds in enumerate(priced.slots_s)
    ]
    last = f"slot{len(nodes) - 1}"
    for b, (after, seconds) in enumerate(zip(costs.after[:-1], durations, strict=True)):
        deps = (f"slot{after}", f"exchange{b - 1}") if b else (f"slot{after}",)
        nodes.append(Node(f"exchange{b}", "gpu", float(seconds), deps, "network", "comm"))
    nodes.append(Node("update", "gpu", update_s, (last,)))
    assert replay(Graph(nodes)).makespan_s == pytest.approx(priced.iteration_s, rel=1e-12)
