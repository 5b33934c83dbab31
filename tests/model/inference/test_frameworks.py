"""Queries without a framework: their interval covers the frameworks that were measured."""

from dataclasses import replace
from math import log

import pytest

from cdmpp.predict.prediction import Prediction
from cdmpp.predict.predictor import LatencyPredictor

#: vllm, sglang and trtllm were measured on an H100; on a T4 one library.
SEVERAL = "linear:m=512,n=4096,k=4096,dtype=fp8,scaling=block128"
ONE = "linear:m=512,n=4096,k=1024,dtype=float16"


def with_open(predictor: LatencyPredictor, factor: float) -> LatencyPredictor:
    artifact = predictor.artifact
    return LatencyPredictor(replace(artifact, calibration={**artifact.calibration, "open": factor}))


def width(prediction: Prediction) -> float:
    return log(prediction.quantiles["0.9"] / prediction.quantiles["0.1"])


def test_interval_is_wider_only_where_several_frameworks_were_measured(predictor: LatencyPredictor) -> None:
    narrow, wide = with_open(predictor, 1.0), with_open(predictor, 2.0)
    for program, device, protocol, framework, ratio in (
        (SEVERAL, "h100-sxm", "graph", None, 2.0),
        (SEVERAL, "h100-sxm", "graph", "vllm", 1.0),
        (ONE, "t4", "kernel", None, 1.0),
    ):
        before, after = (
            p.predict([program], device, protocol=protocol, framework=framework)[0] for p in (narrow, wide)
        )
        assert after.latency_s == before.latency_s
        assert width(after) / width(before) == pytest.approx(ratio, rel=1e-6), (program, framework)


def test_a_model_without_the_factor_predicts_as_before(predictor: LatencyPredictor) -> None:
    artifact = predictor.artifact
    calibration = {name: artifact.calibration[name] for name in ("in", "near", "out")}
    without = LatencyPredictor(replace(artifact, calibration=calibration))
    assert without.predict([SEVERAL], "h100-sxm", protocol="graph") == with_open(predictor, 1.0).predict(
        [SEVERAL], "h100-sxm", protocol="graph"
    )


def test_shipped_interval_covers_most_frameworks(predictor: LatencyPredictor) -> None:
    inside = []
    for n in (1024, 4096, 8192):
        for m in (16, 256, 4096):
            program = f"linear:m={m},n={n},k=4096,dtype=fp8,scaling=block128"
            unstated = predictor.predict([program], "h100-sxm", protocol="graph")[0]
            for framework in ("vllm", "sglang", "trtllm"):
                stated = predictor.predict([program], "h100-sxm", protocol="graph", framework=framework)[0]
                assert stated.latency_s and unstated.lower_s and unstated.upper_s
                inside.append(unstated.lower_s <= stated.latency_s <= unstated.upper_s)
    assert sum(inside) > 0.7 * len(inside)
