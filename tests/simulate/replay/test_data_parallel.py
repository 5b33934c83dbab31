"""Data-parallel training: buckets, the graph, contention, the request."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp import make_plan
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.data_parallel.schema import DataParallelPlan, DataParallelRequest
from cdmpp.plan.data_parallel.solver import Costs, draw
from cdmpp.plan.registry import PLANNERS
from cdmpp.predict.rendering import render
from cdmpp.simulate.replay import Link
from cdmpp.simulate.replay.data_parallel import GradientLayer, Setup, cut_buckets, fill_buckets, gradients, simulate

LINK = Link(beta_s_per_byte=0.5)
#: Forward 1 s and backward 2 s each, 4 bytes of gradients each.
TWO = [GradientLayer("a", 1.0, 2.0, (4.0,)), GradientLayer("b", 1.0, 2.0, (4.0,))]
MEASURED = Setup(2, LINK, "measured")


def test_a_bucket_for_each_layer_hides_all_but_the_last() -> None:
    # Forward until 2, b's gradients at 4, sent until 6; a's at 6, sent until 8; update until 8.5.
    iteration = simulate(TWO, MEASURED, 1.0, update_s=0.5)
    assert iteration.iteration_s == 8.5
    assert (iteration.comm_s, iteration.exposed_comm_s) == (4.0, 2.0)
    sent = [node for node in iteration.timeline.graph.nodes if node.kind == "comm"]
    assert [node.id for node in sent] == ["00002.2", "00003.2"]


def test_ring_of_several_ranks() -> None:
    # 2 (p - 1) messages of n / p bytes: 6 messages of 1 byte at 0.5 s for each of the two buckets.
    assert simulate(TWO, Setup(4, LINK), 1.0).iteration_s == pytest.approx(4 + 3 + 3)
    assert simulate(TWO, Setup(1, LINK), 1.0).iteration_s == 6.0


def test_contention_by_hand() -> None:
    # b's transfer (2 s) starts at 4 beside a's backward (2 s): computation takes 1.5 times as long,
    # transfers twice. a's backward ends at 4 + 3 = 7, by when 3 / 4 of the transfer are done; the rest runs
    # alone until 7.5.
    setup = Setup(2, LINK, "measured", compute_slowdown=1.5, comm_slowdown=2.0)
    iteration = simulate(TWO, setup, 1.0)
    ends = dict(zip((n.id for n in iteration.timeline.graph.nodes), iteration.timeline.end_s.tolist(), strict=True))
    assert ends["00003.0"] == pytest.approx(7.0)
    assert ends["00002.2"] == pytest.approx(7.5)
    assert iteration.iteration_s == pytest.approx(9.5)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=8),
    st.integers(1, 100),
    st.none() | st.integers(1, 100),
)
def test_buckets_are_those_of_pytorch(sizes: list[list[int]], cap: int, first: int | None) -> None:
    layers = [GradientLayer(str(i), 1.0, 1.0, tuple(4.0 * n for n in own)) for i, own in enumerate(sizes)]
    ours = [bucket.bytes for bucket in fill_buckets(layers, cap, first)]
    # Gradients arrive from the last parameter to the first.
    arrived = [torch.empty(n) for own in reversed(sizes) for n in reversed(own)]
    if not arrived:
        assert ours == []
        return
    limits = [cap] if first is None else [first, cap]
    theirs, _ = dist._compute_bucket_assignment_by_size(arrived, limits)
    assert ours == [sum(4.0 * arrived[i].numel() for i in bucket) for bucket in theirs]


costs = st.floats(0.0, 4.0).map(lambda x: round(x, 2))
layers = st.lists(
    st.builds(GradientLayer, st.just("x"), costs, costs, st.lists(costs.map(lambda x: x + 1), max_size=2).map(tuple)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=30, deadline=None)
@given(layers, st.floats(0, 10), st.floats(1, 2), st.floats(1, 2))
def test_between_the_bound_and_no_overlap(own: list[GradientLayer], cap: float, compute: float, comm: float) -> None:
    iteration = simulate(own, MEASURED, cap)
    alone = sum(layer.forward_s + layer.backward_s for layer in own)
    assert max(alone, iteration.comm_s) - 1e-9 <= iteration.iteration_s <= alone + iteration.comm_s + 1e-9
    shared = simulate(own, Setup(2, LINK, "measured", compute, comm), cap)
    assert iteration.iteration_s - 1e-9 <= shared.iteration_s <= compute * comm * iteration.iteration_s + 1e-9


def _layer(name: str) -> dict[str, Any]:
    return {"name": name, "forward": 1.0, "backward": 2.0, "gradient_bytes": [4.0]}


def request(**changes: Any) -> dict[str, Any]:
    return {
        "layers": [_layer("a"), _layer("b")],
        "ranks": 2,
        "algorithm": "measured",
        "link": {"beta_s_per_byte": 0.5},
        "bucket_bytes": [8, 1],
        **changes,
    }


def test_the_request_chooses_a_bucket_size() -> None:
    answer = make_plan("data-parallel", request())
    assert (answer["iteration_s"], answer["bucket_bytes"], answer["exposed_comm_s"]) == (8.0, 1.0, 2.0)
    assert [(choice["bucket_bytes"], choice["buckets"], choice["iteration_s"]) for choice in answer["choices"]] == [
        (8.0, 1, 10.0),
        (1.0, 2, 8.0),
        (0.0, 2, 8.0),
        (25 * 2**20, 1, 10.0),
    ]
    assert answer["baselines"] == {
        "no_overlap": 10.0,
        "one_bucket": 10.0,
        "bucket_per_gradient": 8.0,
        "pytorch_default": 10.0,
    }
    # Forward 2 and backward 4, then a's gradients alone, 2; b's at 4 and both, 4, are as long.
    assert (answer["lower_bound_s"], answer["gap"]) == (8.0, 0.0)
    assert [(choice["ready_s"], choice["start_s"], choice["end_s"]) for choice in answer["transfers"]] == [
        (4.0, 4.0, 6.0),
        (6.0, 6.0, 8.0),
    ]
    assert "gradients of a" in answer["explanation"][1]


@settings(max_examples=25, deadline=None)
@given(layers, st.lists(st.floats(0, 12), min_size=1, max_size=4), st.floats(0, 1))
def test_no_choice_is_below_the_bound(own: list[GradientLayer], sizes: list[float], alpha: float) -> None:
    forms = [
        {
            "name": str(i),
            "forward": one.forward_s,
            "backward": one.backward_s,
            "gradient_bytes": list(one.gradient_bytes),
        }
        for i, one in enumerate(own)
    ]
    links = [{"alpha_s": alpha, "beta_s_per_byte": 0.5}, {"table": [[2, 1.0], [4, 1.1], [8, 4.0]]}]
    for link, algorithm in ((links[0], "ring"), (links[1], "measured"), (links[1], "ring")):
        changes = {"layers": forms, "bucket_bytes": sizes, "link": link, "algorithm": algorithm, "ranks": 3}
        _check_bound(make_plan("data-parallel", request(**changes)))


def _check_bound(answer: dict[str, Any]) -> None:
    least = min(choice["iteration_s"] for choice in answer["choices"])
    assert answer["iteration_s"] == least
    assert all(seconds >= answer["lower_bound_s"] - 1e-9 for seconds in (least, *answer["baselines"].values()))


def test_default_bucket_sizes_reach_all_gradients() -> None:
    """A message costs so much that one bucket of 1.6 GB is best."""
    layer = {"name": "layer", "forward": 0.1, "backward": 0.1, "gradient_bytes": [2e8] * 8}
    link = {"alpha_s": 1.0, "bandwidth_bytes_per_s": 1e12}
    answer = make_plan("data-parallel", {"layers": [layer], "ranks": 8, "link": link})
    assert answer["bucket_bytes"] == 1600 * 2.0**20
    assert answer["iteration_s"] == pytest.approx(answer["baselines"]["one_bucket"])


def random_request(seed: int, count: int) -> dict[str, Any]:
    """Layers with one or two gradients, or none, on a link where neither one bucket nor one for each is best."""
    chance = np.random.default_rng(seed)
    layers = [
        {
            "name": f"l{i}",
            "forward": chance.uniform(0.1, 1.0),
            "backward": chance.uniform(0.1, 3.0),
            "gradient_bytes": chance.uniform(1, 9, chance.choice([0, 1, 1, 2])).tolist(),
        }
        for i in range(count - 1)
    ]
    layers.append({"name": "last", "forward": 0.5, "backward": 1.0, "gradient_bytes": [chance.uniform(1, 9)]})
    link = {"alpha_s": chance.uniform(0.05, 0.8), "beta_s_per_byte": chance.uniform(0.05, 0.6)}
    return {"layers": layers, "ranks": 2, "link": link, "update": 0.25}


def exhaustive(request: dict[str, Any]) -> float:
    """The shortest iteration over all partitions and, for each bucket, all options."""
    costs = Costs.of(DataParallelRequest.model_validate(request), "latency_s")
    count, shortest = len(gradients(costs.layers)), math.inf
    for cuts in (c for n in range(count) for c in combinations(range(1, count), n)):
        buckets = cut_buckets(costs.layers, [*cuts, count])
        options = range(len(costs.exchanges.options(1.0)))
        for chosen in product(options, repeat=len(buckets)):
            shortest = min(shortest, costs.iteration(buckets, chosen).iteration_s)
    return shortest


@pytest.mark.parametrize("seed", range(20))
def test_free_partition_equals_an_exhaustive_search(seed: int) -> None:
    request = random_request(seed, 6)
    answer = make_plan("data-parallel", request)
    assert answer["iteration_s"] == pytest.approx(exhaustive(request), rel=1e-9)
    assert answer["iteration_s"] <= min(answer["baselines"].values())
    assert any("no partition of the gradients" in line for line in answer["explanation"])
    assert sum(sent["gradients"] for sent in answer["transfers"]) == sum(
        len(layer["gradient_bytes"]) for layer in request["layers"]
    )


WORK = {"compress_s_per_byte": 0.02, "decompress_s_per_byte": 0.01, "overhead_s": 0.05}
COMPRESSORS = [{"name": "c", "ratio": 0.1, "gpu": WORK, "cpu": {**WORK, "compress_s_per_byte": 0.1}}]


@pytest.mark.parametrize("seed", range(8))
def test_partition_and_compression_equal_an_exhaustive_search(seed: int) -> None:
    request = {**random_request(seed, 4), "compressors": COMPRESSORS}
    answer = make_plan("data-parallel", request)
    assert answer["iteration_s"] == pytest.approx(exhaustive(request), rel=1e-9)
    assert answer["lower_bound_s"] <= answer["iteration_s"] <= min(answer["baselines"].values())
    alone = make_plan("data-parallel", random_request(seed, 4))
    assert answer["iteration_s"] <= alone["iteration_s"]


def test_compressed_bucket_needs_memory_for_its_buffer() -> None:
    link = {"alpha_s": 0.1, "beta_s_per_byte": 1.0}
    request = {**random_request(1, 4), "compressors": COMPRESSORS, "link": link}
    held = 4 * sum(sum(layer["gradient_bytes"]) for layer in request["layers"])

    def longest_buffer(answer: dict[str, Any]) -> float:
        """The buffer has a tenth of the gradients of both ranks."""
        return max((sent["bytes"] * 0.1 * 2 for sent in answer["transfers"] if sent["compressor"]), default=0.0)

    free = make_plan("data-parallel", request)
    limit = longest_buffer(free) - 1e-3
    assert limit > 0
    answer = make_plan("data-parallel", {**request, "memory_bytes": held + limit})
    assert longest_buffer(answer) <= limit
    assert answer["iteration_s"] > free["iteration_s"]
    with pytest.raises(FieldError, match="slowdowns"):
        make_plan("data-parallel", {**request, "compute_slowdown": 1.5})


def test_plan_is_printed_and_drawn() -> None:
    plan = DataParallelPlan.model_validate(make_plan("data-parallel", request()))
    assert "8.00 s per iteration" in render(plan.report())
    left, right = draw(DataParallelRequest.model_validate(request()), plan).axes
    assert (left.get_ylabel(), right.get_xlabel()) == ("iteration (s)", "time since the start (s)")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"ranks": 0}, "ranks"),
        ({"bucket_bytes": []}, "bucket_bytes"),
        ({"link": {}}, "link"),
        ({"link": {"table": [[2, 1], [1, 2]]}}, "link.table"),
        ({"link": {"table": [[1, 1e-9], [2, 1e9]]}}, "link"),
        ({"compute_slowdown": 0.5}, "compute_slowdown"),
        ({"layers": []}, "layers"),
    ],
)
def test_error_names_the_field(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as caught:
        make_plan("data-parallel", request(**changes))
    assert caught.value.path == path


def test_a_program_needs_a_predictor_and_is_named_in_the_explanation() -> None:
    linear = {"operator": "linear", "m": 64, "n": 64, "k": 64}
    cost = {"programs": [{"program": linear, "count": 2}], "device": "t4"}
    price_requests = PLANNERS["data-parallel"].read(request(update=cost)).price_requests()
    assert [(priced.path, priced.device) for priced in price_requests] == [("update.programs.0", "t4")]


def test_a_rank_holds_weights_gradients_and_optimizer_states() -> None:
    layer = {"name": "a", "forward": 1.0, "backward": 2.0, "gradient_bytes": [10e9]}
    request = {"layers": [layer], "ranks": 2, "link": {"bandwidth_bytes_per_s": 1e9}}
    assert any("memory was not checked: no cost names a device" in line for line in _plan(request))
    with pytest.raises(InfeasibleError, match=r"needs 40\.0 GB .* of the 39\.0 GB") as error:
        _plan({**request, "memory_bytes": 39e9})
    assert error.value.path == "layers" and "state_bytes" in error.value.hint
    program = {"program": {"operator": "relu", "rows": 8, "cols": 8}}
    predicted = {**layer, "forward": {"programs": [program], "device": "l4"}}
    with pytest.raises(InfeasibleError, match=r"needs 40\.0 GB .* of the 23\.7 GB"):
        DataParallelRequest.model_validate({**request, "layers": [predicted]}).price_requests()
    assert any("activations, whose" in line for line in _plan({**request, "memory_bytes": 39e9, "state_bytes": 30e9}))
    ignored = _plan({**request, "memory_bytes": 39e9, "ignore_memory": True})
    assert ignored[-1] == "memory was not checked: ignore_memory is true"


def _plan(request: dict[str, Any]) -> list[str]:
    explanation: list[str] = make_plan("data-parallel", request)["explanation"]
    return explanation
