"""ByteComp against hand-computed and exhaustive results, the lower bound, and refused requests."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp import FieldError, LatencyPredictor, make_plan
from cdmpp.plan.compress.schema import CompressPlan, CompressRequest
from cdmpp.plan.compress.solver import (
    Bound,
    GradientTensor,
    bytecomp,
    draw,
    hidden,
    improve,
    iteration_s,
    search,
    tensors_of,
    timeline,
)
from cdmpp.predict.rendering import render
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.simulate.replay.data_parallel import Option

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "compress.json"


def exhaustive(tensors: Sequence[GradientTensor]) -> tuple[tuple[int, ...], float]:
    """The best strategy of all; the first of equal ones."""
    every = product(*(range(len(tensor.options)) for tensor in tensors))
    return min(((choice, timeline(tensors, choice).makespan_s) for choice in every), key=lambda pair: pair[1])


def make(count: int, seed: int, options: int = 3) -> list[GradientTensor]:
    chance = np.random.default_rng(seed)
    out = []
    for i in range(count):
        network_s, backward_s = chance.uniform(0.5e-3, 8e-3), chance.uniform(0.5e-3, 4e-3)
        small = 0.1 * network_s + 1e-4
        out.append(
            GradientTensor(
                f"t{i}",
                backward_s,
                (
                    Option(None, "none", network_s),
                    Option("c", "gpu", small, 0.15 * network_s + 1e-4, 0.12 * network_s + 1e-4),
                    Option("c", "cpu", small, (1 + seed % 3) * 0.6 * network_s, 0.3 * network_s),
                )[:options],
            )
        )
    return out


def unlimited() -> bool:
    return True


def limited(steps: int) -> Any:
    remaining = iter(range(steps))
    return lambda: next(remaining, None) is not None


#: Two tensors: 1 s of backward pass each, exchanges of 4 s and 2 s; compressed a quarter of it.
TWO = [
    GradientTensor(
        name,
        1.0,
        (
            Option(None, "none", network_s),
            Option("c", "gpu", network_s / 4, 0.5, 0.25),
            Option("c", "cpu", network_s / 4, 1.5, 0.75),
        ),
    )
    for name, network_s in (("a", 4.0), ("b", 2.0))
]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        # Backward to 2; the exchanges from 1 to 5 and to 7.
        ((0, 0), 7.0),
        # a: compressed to 1.5, holds b's backward up to 2.5, exchanged to 2.5, decompressed from 2.5 to 2.75.
        # b: from 2.5 to 4.5.
        ((1, 0), 4.5),
        # a on the CPU to 2.5, exchanged to 3.5 after b's, which takes the network at 2 for 2 s: to 4, then a
        # to 5, decompressed to 5.75.
        ((2, 0), 5.75),
        # Both on the GPU: a to 1.5, exchanged to 2.5; b's backward to 2.5. There a is decompressed first, to
        # 2.75 (ready at the same time, and earlier in the order), b compressed to 3.25, exchanged to 3.75.
        ((1, 1), 4.0),
    ],
)
def test_timeline_equals_hand_computed_makespan(choice: tuple[int, ...], expected: float) -> None:
    assert timeline(TWO, choice).makespan_s == pytest.approx(expected)


def test_an_exchange_behind_the_backward_pass_is_hidden() -> None:
    plain = (Option(None, "none", 0.5),)
    tensors = [GradientTensor("a", 1.0, plain), GradientTensor("b", 1.0, plain)]
    assert hidden(tensors, (0, 0)) == [0]


def test_hidden_tensors_stay_uncompressed() -> None:
    free = Option("c", "gpu", 0.1, 0.001, 0.001)
    tensors = [GradientTensor("a", 1.0, (Option(None, "none", 0.5), free)), GradientTensor("b", 5.0, TWO[1].options)]
    assert bytecomp(tensors, unlimited) == (0, 1)


@pytest.mark.parametrize(("count", "options", "seed"), [(8, 2, 0), (5, 3, 1), (5, 3, 2)])
def test_search_equals_exhaustive_search(count: int, options: int, seed: int) -> None:
    tensors = make(count, seed, options)
    best, seconds = exhaustive(tensors)
    result = search(tensors, unlimited)
    assert result.proven
    assert result.iteration_s == pytest.approx(seconds, rel=1e-9)
    assert timeline(tensors, result.choice).makespan_s == result.iteration_s
    assert timeline(tensors, best).makespan_s == seconds
    by_heuristic = timeline(tensors, result.heuristic).makespan_s
    assert seconds <= by_heuristic <= timeline(tensors, (0,) * count).makespan_s


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.integers(0, 10_000))
def test_bound_is_below_every_strategy(count: int, seed: int) -> None:
    tensors = make(count, seed)
    bound = Bound(tensors)
    for choice in product(range(3), repeat=count):
        seconds = timeline(tensors, choice).makespan_s * (1 + 1e-9)
        assert all(bound.value(choice[:k]) <= seconds for k in range(count + 1))


def test_interrupted_search_is_deterministic_and_not_proven() -> None:
    tensors = make(20, 4)
    result = search(tensors, limited(300))
    again = search(tensors, limited(300))
    assert result == again
    assert result.bound_s < result.iteration_s
    assert not result.proven
    better = improve(tensors, result.choice, limited(1000))
    assert timeline(tensors, better).makespan_s <= result.iteration_s


def test_without_steps_the_best_uniform_strategy_is_returned() -> None:
    tensors = make(6, 1)
    result = search(tensors, limited(0))
    every = [timeline(tensors, (k,) * 6).makespan_s for k in range(3)]
    assert result.heuristic == (0,) * 6
    assert result.iteration_s == min(every) < every[0]


def given_costs() -> dict[str, Any]:
    work = {"compress_s_per_byte": 1e-9, "decompress_s_per_byte": 1e-10, "overhead_s": 1e-4}
    return {
        "tensors": [{"name": f"t{i}", "bytes": 4e6, "backward": 0.002} for i in range(4)],
        "compressors": [{"name": "c", "ratio": 0.01, "gpu": work, "cpu": work}],
        "workers": 4,
        "link": {"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e9},
        "budget_s": 600,
        "max_steps": 2000,
    }


def test_options_have_exchange_and_compression_times() -> None:
    tensors = tensors_of(CompressRequest.model_validate(given_costs()))
    plain, gpu, cpu = tensors[0].options
    assert plain.network_s == pytest.approx(6 * (1e-5 + 1e6 / 1e9))
    # A gather of four times a hundredth: three messages of 40 kB; each worker decompresses four.
    assert gpu.network_s == cpu.network_s == pytest.approx(3 * (1e-5 + 4e4 / 1e9))
    assert (gpu.compress_s, gpu.decompress_s) == pytest.approx((1e-4 + 4e-3, 1e-4 + 4 * 4e-4))
    request = given_costs()
    request["compressors"][0].update(collective="all_reduce", gpu=None)
    [_, summed] = tensors_of(CompressRequest.model_validate(request))[0].options
    assert summed.network_s == pytest.approx(6 * (1e-5 + 1e4 / 1e9))
    assert summed.decompress_s == pytest.approx(1e-4 + 4e-4)


def test_plan_has_timeline_baselines_and_bound() -> None:
    answer = make_plan("compress", given_costs())
    plan = CompressPlan.model_validate(answer)
    assert answer["iteration_s"] == max(span["end_s"] for span in answer["timeline"])
    assert set(answer["baselines"]) == {"none", "c on gpu", "c on cpu", "bytecomp"}
    assert answer["lower_bound_s"] <= answer["iteration_s"] <= min(answer["baselines"].values())
    request = CompressRequest.model_validate(given_costs())
    assert "bytecomp" in render(plan.report())
    assert "(ms)" in draw(request, plan).axes[0].get_xlabel()


def test_example_is_planned_with_predictions(predictor: LatencyPredictor) -> None:
    answer = make_plan("compress", {**json.loads(EXAMPLE.read_text()), "budget_s": 60}, predictor)
    assert answer["proven"]
    assert answer["iteration_s"] < answer["baselines"]["none"]
    assert any("linear" in line for line in answer["explanation"])


def test_progress_keeps_its_plan() -> None:
    reports: list[Any] = []
    CompressRequest.model_validate(given_costs()).solve(SearchControl(30.0, reports.append, every_s=0.0))
    assert reports
    for progress in reports:
        assert progress.answer().iteration_s == progress.best


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("tensors.1.name", lambda r: r["tensors"][1].update(name="t0")),
        ("compressors.1.name", lambda r: r["compressors"].append(r["compressors"][0])),
        ("compressors.0", lambda r: r["compressors"][0].update(gpu=None, cpu=None)),
        ("link", lambda r: r.update(link={})),
        (
            "link.table",
            lambda r: r.update(link={"table": [[1.0, 1.0], [1.5, 1e8]]}) or r["tensors"][0].update(bytes=1e12),
        ),
        ("workers", lambda r: r.update(workers=1)),
    ],
)
def test_error_names_the_field(path: str, change: Any) -> None:
    request = copy.deepcopy(given_costs())
    change(request)
    with pytest.raises(FieldError) as caught:
        make_plan("compress", request)
    assert caught.value.path == path


def test_iteration_equals_the_replayed_timeline() -> None:
    chance = np.random.default_rng(4)
    for count in (1, 2, 7, 30):
        tensors = [
            GradientTensor(
                str(i),
                float(chance.choice([0.0, 1.0, chance.random()])),
                (
                    Option(None, "none", float(chance.random())),
                    Option("c", "gpu", *chance.random(3).tolist()),
                    Option("c", "cpu", *chance.random(3).tolist()),
                ),
            )
            for i in range(count)
        ]
        for _ in range(20):
            choice = tuple(chance.integers(0, 3, count).tolist())
            assert iteration_s(tensors, choice) == timeline(tensors, choice).makespan_s
