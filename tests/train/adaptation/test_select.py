"""Choosing what to measure: within the device's means, and with an honest estimate of the time."""

from collections import Counter

import numpy as np
import pytest

from cdmpp.data.measure.call_problems import call_problem
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.data.physics import needed_bytes, work
from cdmpp.data.pool import model_pool
from cdmpp.devices import lookup
from cdmpp.errors import DataError
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.model import Artifact
from cdmpp.predict.predictor import LatencyPredictor, default_model
from cdmpp.programs.operators import parse_operator
from cdmpp.train.adaptation.select import measuring_s, select

POOL = [
    *(parse_operator(f"linear:m={m},n={n},k=1024") for m in (1, 16, 256, 4096) for n in (512, 4096)),
    *(parse_operator(f"softmax:rows={rows},cols=512") for rows in (64, 1024, 16384)),
    parse_operator("conv2d:n=8,c_in=64,h=28,w=28,c_out=64,kh=3,kw=3"),
]


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return load_artifact(default_model())


@pytest.mark.parametrize("sampler", ["kmeans", "random", "variance"])
def test_distinct_programs_with_what_the_model_expects(artifact: Artifact, sampler: str) -> None:
    selection = select(artifact, lookup("t4"), POOL, 5, sampler=sampler, protocol="eager", framework="pytorch")
    assert len({spec.hash() for spec in selection.programs}) == 5 and selection.pool == len(POOL)
    expected = LatencyPredictor(artifact).predict(selection.programs, "t4", protocol="eager", framework="pytorch")
    assert selection.expected_s == pytest.approx([p.latency_s for p in expected], rel=1e-4)
    assert selection.estimate_s == pytest.approx(measuring_s(selection.expected_s).sum())
    again = select(artifact, lookup("t4"), POOL, 5, sampler=sampler, protocol="eager", framework="pytorch")
    assert again.programs == selection.programs


@pytest.mark.slow
def test_shipped_pool_is_selected_from(artifact: Artifact) -> None:
    pool = model_pool(default_model())
    for spec in pool:
        flags, sizes = spec.model_dump(), {name: np.array([size]) for name, size in spec.sizes().items()}
        _, moved = work(spec.operator, spec.dtype, flags, sizes)
        assert needed_bytes(spec) >= 0.999 * moved[0], spec.text()
    selection = select(artifact, lookup("l4"), pool, 40, framework="pytorch")
    assert len(selection.programs) == 40 and not any(call_problem(spec.canonical()) for spec in selection.programs)
    assert selection.left_out["no PyTorch call"] == sum(bool(call_problem(spec.canonical())) for spec in pool) > 528


def test_kmeans_takes_every_family(artifact: Artifact) -> None:
    selection = select(artifact, lookup("t4"), POOL, 4)
    assert {spec.operator for spec in selection.programs} == {"linear", "softmax", "conv2d"}


def test_programs_beyond_the_device_are_left_out(artifact: Artifact) -> None:
    large = parse_operator("copy:rows=1000000,cols=4096")
    slow = parse_operator("linear:m=65536,n=8192,k=65536")
    device = lookup("raspberry-pi-3")
    selection = select(artifact, device, [large, slow, *POOL], 3)
    assert large not in selection.programs and slow not in selection.programs
    assert selection.left_out["memory"] >= 2 and max(selection.expected_s) <= 2.0
    with pytest.raises(DataError, match="none of the 1 programs"):
        select(artifact, device, [large], 1)


def test_k_beyond_the_pool(artifact: Artifact) -> None:
    with pytest.raises(DataError, match=f"k = 99 programs: the pool has {len(POOL)}"):
        select(artifact, lookup("t4"), POOL, 99)


def test_the_estimate_follows_how_programs_are_timed() -> None:
    plan = TimingSettings()
    short, middle, long = measuring_s(np.array([1e-6, 0.1, 1.0]))
    assert plan.total_s < short < 0.5
    assert plan.min_repeats * 0.1 < middle < 1
    assert 2 <= long < 2.5  # once to warm up, once timed


def test_families_are_counted_by_what_is_chosen(artifact: Artifact) -> None:
    counts = Counter(spec.operator for spec in select(artifact, lookup("t4"), POOL, len(POOL)).programs)
    assert counts == {"linear": 8, "softmax": 3, "conv2d": 1}


def test_a_large_pool_is_sampled(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdmpp.train.adaptation.select.MAX_POOL", 6)
    selection = select(artifact, lookup("t4"), POOL, 3)
    assert (selection.pool, selection.left_out) == (6, {"not sampled": len(POOL) - 6})
    assert selection.programs == select(artifact, lookup("t4"), POOL, 3).programs
