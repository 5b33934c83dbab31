"""Sums of predictions have the domain of most of their time, and say when something is left out."""

from __future__ import annotations

import pytest

from cdmpp.model.domain.score import Label, label_of_total
from cdmpp.predict.prediction import ErrorInfo, Prediction
from cdmpp.predict.prediction_total import PredictionTotal


def prediction(latency_s: float, domain: Label) -> Prediction:
    return Prediction(
        "p",
        "0" * 32,
        "t4",
        "library",
        "kernel",
        None,
        "m",
        latency_s,
        0.9 * latency_s,
        1.2 * latency_s,
        {},
        domain,
        1.0,
    )


FAILED = Prediction("p", None, "t4", "library", "kernel", None, "m", error=ErrorInfo("c", "m"))


def test_domain_is_weighted_by_time_and_not_by_programs() -> None:
    counted = [(prediction(0.031, "in"), 3), (prediction(0.005, "near"), 1), *[(prediction(0.001, "out"), 1)] * 2]
    total = PredictionTotal.of(counted)
    assert total.latency_s == pytest.approx(0.1)
    assert (total.lower_s, total.upper_s) == (pytest.approx(0.09), pytest.approx(0.12))
    assert total.domain_shares == pytest.approx({"in": 0.93, "near": 0.05, "out": 0.02})
    assert total.domain == "in"
    assert total.domain_text() == "93 % of the time in, 5 % near, 2 % out"
    assert (total.programs, total.launches, total.failed, total.lower_bound) == (4, 6, 0, False)


@pytest.mark.parametrize(
    ("shares", "label"),
    [
        ((1, 0, 0), "in"),
        ((0.9, 0, 0.1), "in"),
        ((0.89, 0.01, 0.1), "near"),
        ((0, 1, 0), "near"),
        ((0.8, 0.09, 0.11), "out"),
        ((0, 0, 1), "out"),
    ],
)
def test_domain_label_of_a_total(shares: tuple[float, float, float], label: str) -> None:
    assert label_of_total(dict(zip(("in", "near", "out"), shares, strict=True))) == label


def test_small_shares_are_neither_hidden_nor_rounded_up_to_all() -> None:
    total = PredictionTotal.of([(prediction(1.0, "in"), 1), (prediction(0.001, "out"), 1)])
    assert total.domain_text() == "> 99 % of the time in, < 1 % out"


def test_left_out_programs_make_the_total_a_lower_bound() -> None:
    some = PredictionTotal.of([(prediction(1.0, "in"), 2), (FAILED, 3), (None, 1)])
    assert (some.latency_s, some.failed, some.lower_bound) == (2.0, 4, True)
    assert PredictionTotal.of([(prediction(1.0, "in"), 1)], left_out=True).lower_bound
    none = PredictionTotal.of([(FAILED, 1)])
    assert (none.latency_s, none.domain, none.domain_shares, none.lower_bound) == (None, None, None, True)
