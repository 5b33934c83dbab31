"""Stand-ins and unreleased devices are never in the domain, and the answer says why."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cdmpp.devices import DeviceSpec, lookup
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.domain.score import THRESHOLDS, label, limited_step
from cdmpp.model.inference.pipeline import find_trained, known_devices, same_device
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.predictor import LatencyPredictor

PROGRAMS = [
    "softmax:rows=4096,cols=1024",
    "linear:m=512,n=1024,k=1024",
    "conv2d:n=8,c_in=64,h=56,w=56,c_out=64,kh=3,kw=3,pad_h=1,pad_w=1",
]
REASONS = {"stand-in": "stands in for a board", "unreleased": "the device is unreleased"}


def trained_on(artifact: Artifact, status: str) -> Artifact:
    """The model as if its T4 had this status when it was trained."""
    specs = artifact.manifest["device_specs"]
    manifest = {**artifact.manifest, "device_specs": {**specs, "t4": {**specs["t4"], "status": status}}}
    return replace(artifact, manifest=manifest)


def answers(predictor: LatencyPredictor, device: DeviceSpec | str) -> Sequence[Prediction]:
    return predictor.predict(PROGRAMS, device, protocol="eager", framework="pytorch")


@pytest.mark.parametrize("status", ["stand-in", "unreleased"])
def test_trained_device_with_a_status_is_near_with_the_reason(predictor: LatencyPredictor, status: str) -> None:
    before = answers(predictor, "t4")
    assert any(p.domain == "in" for p in before)
    other = LatencyPredictor(trained_on(predictor.artifact, status))
    after = answers(other, lookup("t4").model_copy(update={"status": status}))
    for one, two in zip(before, after, strict=True):
        assert two.domain == ("near" if one.domain == "in" else one.domain)
        assert REASONS[status] in (two.domain_reason or "")
        assert two.latency_s == one.latency_s
        assert two.lower_s is not None and one.lower_s is not None
        assert two.lower_s <= one.lower_s * (1 + 1e-9)  # the interval is that of "near"


def test_stand_ins_of_the_table_are_not_in_the_domain(predictor: LatencyPredictor) -> None:
    for name in ("gfx942-tensile", "gfx900-vega10", "gfx1030-navi21"):
        for prediction in answers(predictor, name):
            assert prediction.domain in ("near", "out")
            assert REASONS["stand-in"] in (prediction.domain_reason or "")


def test_device_without_a_status_has_no_such_reason(predictor: LatencyPredictor) -> None:
    for prediction in answers(predictor, "mi300x"):
        assert "the device" not in (prediction.domain_reason or "")


def test_limited_scores_are_above_the_first_threshold() -> None:
    distance, step = np.array([0.0, 0.3, 0.9, 5.0]), np.array([0.0, 1.5, 0.05, 0.0])
    limited = distance + limited_step(distance, step, np.ones(4, dtype=bool))
    assert [label(score) for score in limited] == ["near", "near", "near", "out"]
    assert limited[0] > THRESHOLDS[0]
    np.testing.assert_array_equal(limited_step(distance, step, np.zeros(4, dtype=bool)), step)


def test_trained_device_is_found_by_its_figures_and_of_twins_by_its_name() -> None:
    a100, a800, h100, h800 = (lookup(n) for n in ("a100-sxm4-80gb", "a800-sxm4-80gb", "h100-sxm", "h800"))
    known = known_devices([(1, a100), (2, a800), (3, h100)])
    assert find_trained(known, a800) == (2, a800)
    assert find_trained(known, a100) == (1, a100)
    assert find_trained(known, a100.model_copy(update={"name": "mine"})) == (1, a100)
    assert find_trained(known, h800) == (0, h800)  # other fp64 units
    faster = a100.model_copy(update={"l2_bandwidth_bytes_per_s": 9e12})
    assert find_trained(known, faster) == (0, faster)
    assert same_device(a100, a800)
    assert not same_device(h100, h800)


def test_specification_of_an_earlier_version_finds_its_trained_device() -> None:
    """Models and files written before the later figures existed do not state them."""
    h100 = lookup("h100-sxm")
    earlier = h100.model_copy(
        update={"l2_bandwidth_bytes_per_s": None, "peak_flops_fp64": None, "link": None, "sustained_clock_hz": None}
    )
    assert find_trained(known_devices([(1, earlier)]), h100) == (1, earlier)
    assert find_trained(known_devices([(1, h100)]), earlier) == (1, h100)
