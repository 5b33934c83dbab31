"""Overlap of steps: staleness against an event-by-event simulation, weight transfers against chunks on their links."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp import FieldError
from cdmpp.plan.base.solve import read_request, solve_request
from cdmpp.plan.rl.schema import RlPlan, RlRequest
from cdmpp.plan.rl.training import asynchronous_step
from cdmpp.plan.rl.weights import SiteLinkForm, SitesForm, TransferForm

REQUEST: dict[str, Any] = {
    "lengths": {"samples": [200]},
    "samples_per_step": 32,
    "decode": {"a_s": 0.01, "b_s": 0.0002},
    "kv": {"max_batch": 16},
    "pools": [
        {"name": "here", "units": 4, "price_per_hour": 3, "site": "a", "stages": ["generation"]},
        {"name": "there", "units": 3, "price_per_hour": 1, "site": "b", "stages": ["training"]},
    ],
    "training": {"seconds_per_sample": 0.2},
    "draws": 2,
    "budget_s": 600,
}
TRANSFER: dict[str, Any] = {
    "bytes": 8e8,
    "ranks": 4,
    "same_site": {"bandwidth_bytes_per_s": 5e9, "latency_s": 0.01},
    "cross_site": {"bandwidth_bytes_per_s": 1e9, "latency_s": 0.1, "total_bytes_per_s": 2e9},
}


def solve(**changes: Any) -> RlPlan:
    return solve_request(read_request(RlRequest, {**REQUEST, **changes}))


def simulated_period(generation_s: float, training_s: float, weights_s: float, staleness: int) -> float:
    """Seconds from step to step, event by event; checks that no weights are older than allowed."""
    cycle = staleness + 1
    generated, trained, arrived = [0.0], [0.0], [0.0]
    for step in range(40 * cycle):
        # `arrived[i]` is the arrival of the weights after i trained steps.
        start = max(generated[-1], arrived[max(step - staleness, 0)])
        generated.append(start + generation_s)
        trained.append(max(trained[-1], generated[-1]) + training_s)
        arrived.append(max(arrived[-1], trained[-1]) + weights_s)
        version = sum(time <= start for time in arrived) - 1
        assert version >= step - staleness
    return (arrived[-1] - arrived[-1 - 20 * cycle]) / (20 * cycle)


@given(
    generation=st.integers(0, 40), training=st.integers(0, 40), weights=st.integers(0, 40), staleness=st.integers(0, 5)
)
def test_asynchronous_step_equals_the_period_of_a_simulation(
    generation: int, training: int, weights: int, staleness: int
) -> None:
    expected = simulated_period(generation, training, weights, staleness)
    computed = asynchronous_step(np.array(float(generation)), np.array(float(training)), float(weights), staleness)
    assert float(computed) == pytest.approx(expected, abs=1e-9)
    if staleness >= 2:
        unlimited = asynchronous_step(np.array(float(generation)), np.array(float(training)), float(weights), None)
        assert computed == unlimited


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("weights_s", [0.0, 1.5, 9.0])
def test_plan_has_the_period_of_a_simulation_of_its_stages(staleness: int, weights_s: float) -> None:
    plan = solve(staleness=staleness, weights={"cross_site_s": weights_s}, layout="separate")
    assert plan.mode == plan.streaming.mode == "async"
    assert plan.streaming.staleness == staleness
    expected = simulated_period(plan.generation.stage_s, plan.training.time_s, weights_s, staleness)
    assert plan.step_s == pytest.approx(expected)
    without = simulated_period(plan.generation.stage_s, plan.training.time_s, 0.0, staleness)
    assert plan.streaming.weights_exposed_s == pytest.approx(expected - without)
    assert plan.step_s >= plan.lower_bound_s * (1 - 1e-12)


def test_more_staleness_never_makes_the_step_longer() -> None:
    weights = {"cross_site_s": 2.0}
    steps = [solve(staleness=staleness, weights=weights, layout="separate").step_s for staleness in range(4)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[1] > steps[2] == steps[3]
    assert steps[0] == solve(mode="sync", weights=weights, layout="separate").step_s
    assert steps[2] == solve(mode="async", weights=weights, layout="separate").step_s


@pytest.mark.parametrize(("mode", "staleness"), [("sync", 1), ("async", 0)])
def test_mode_that_contradicts_the_staleness_is_refused(mode: str, staleness: int) -> None:
    with pytest.raises(FieldError, match=rf"staleness: {staleness} is .*mode is {mode}") as error:
        solve(mode=mode, staleness=staleness)
    assert error.value.path == "staleness"


def chain_s(link: SiteLinkForm, size_bytes: float, ranks: int, hops: int, chunks: int) -> float:
    """Arrival of the last chunk at the end of a chain, chunk by chunk."""
    assert link.bandwidth_bytes_per_s is not None
    total = link.total_bytes_per_s or float("inf")
    chunk_s = size_bytes / chunks / min(ranks * link.bandwidth_bytes_per_s, total)
    free = [0.0] * hops
    at = 0.0
    for _ in range(chunks):
        at = 0.0
        for hop in range(hops):
            start = max(at, free[hop])
            free[hop] = start + chunk_s
            at = free[hop] + link.latency_s
    return at


@settings(max_examples=50)
@given(
    hops=st.integers(1, 6),
    ranks=st.integers(1, 8),
    latency_s=st.sampled_from([0.0, 0.01, 0.5]),
    total=st.sampled_from([2e9, None]),
)
def test_link_seconds_equal_chunks_on_a_chain(hops: int, ranks: int, latency_s: float, total: float | None) -> None:
    link = SiteLinkForm(bandwidth_bytes_per_s=1e9, latency_s=latency_s, total_bytes_per_s=total)
    size_bytes, chunks = 8e9, 2000
    chunk_s = size_bytes / chunks / min(ranks * 1e9, total or float("inf"))
    expected = chain_s(link, size_bytes, ranks, hops, chunks)
    # Each hop delays by one chunk, which vanishes with small chunks.
    assert link.seconds(size_bytes, ranks, hops) == pytest.approx(expected - (hops - 1) * chunk_s, rel=1e-9)


def test_transfer_by_hand() -> None:
    near = SiteLinkForm(bandwidth_bytes_per_s=5e9, latency_s=0.01)
    far = SiteLinkForm(bandwidth_bytes_per_s=1e9, latency_s=0.1, total_bytes_per_s=2e9)
    between = SitesForm(sites=["a", "c"], bandwidth_bytes_per_s=4e9)
    transfer = TransferForm(bytes=8e9, ranks=4, same_site=near, cross_site=far, links=[between])
    assert transfer.seconds("a", "a", 1) == pytest.approx(0.01 + 8 / 20)
    assert transfer.seconds("a", "a", 3) == pytest.approx(0.03 + 8 / 20)
    assert transfer.seconds("a", "b", 1) == pytest.approx(0.1 + 8 / 2)
    assert transfer.seconds("a", "b", 3) == pytest.approx(0.1 + 8 / 2 + 0.02 + 8 / 20)
    assert transfer.seconds("a", "c", 1) == transfer.seconds("c", "a", 1) == pytest.approx(8 / 16)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_transfer_in_bytes_gives_the_plan_of_its_seconds(mode: str) -> None:
    given = {"mode": mode, "generation_units": 3, "layout": "separate"}
    plan = solve(**given, weights={"transfer": TRANSFER})
    seconds = 0.1 + 0.8 / 2 + 0.02 + 0.8 / 20
    same = solve(**given, weights={"cross_site_s": seconds})
    assert plan.streaming.weights_s == pytest.approx(seconds)
    assert plan.step_s == pytest.approx(same.step_s)
    assert plan.streaming.weights_exposed_s == pytest.approx(seconds if mode == "sync" else 0.0)
    assert plan.lower_bound_s <= plan.step_s


def test_sites_without_a_link_are_refused_by_name() -> None:
    transfer = {**TRANSFER, "cross_site": None}
    with pytest.raises(FieldError, match=r"no link from 'b' to site 'a'.*'there' to pool 'here'") as error:
        solve(weights={"transfer": transfer})
    assert error.value.path == "weights.transfer"
    link = {"sites": ["b", "a"], "bandwidth_bytes_per_s": 1e9}
    assert solve(weights={"transfer": {**transfer, "links": [link]}}).streaming is not None
    with pytest.raises(FieldError, match="no link within site 'a'"):
        solve(weights={"transfer": {**TRANSFER, "same_site": None}})
    with pytest.raises(FieldError, match="both are 'a'"):
        solve(weights={"transfer": {**TRANSFER, "links": [{**link, "sites": ["a", "a"]}]}})
    with pytest.raises(FieldError, match="either transfer"):
        solve(weights={"transfer": TRANSFER, "cross_site_s": 1.0})
