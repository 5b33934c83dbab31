"""Costs from predictions: sums, what they are made of, and curves over a batch."""

import numpy as np
import pytest
from pydantic import ValidationError

from cdmpp.errors import FieldError
from cdmpp.plan.base.batch_curve import BatchCurve, interpolate
from cdmpp.plan.base.solve import predict_prices, read_request
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.requests.pricing import PredictedCost, cost_of, fill

LINEAR = {"operator": "linear", "m": 64, "n": 256, "k": 128}
SOFTMAX = {"operator": "softmax", "rows": 64, "cols": 256}


def test_a_predicted_cost_is_the_sum_of_its_programs(predictor: LatencyPredictor) -> None:
    field = PredictedCost.model_validate(
        {"programs": [{"program": LINEAR, "count": 3}, {"program": SOFTMAX}], "device": "t4"}
    )
    asked = field.price_requests("stages.0.forward")
    assert [one.path for one in asked] == ["stages.0.forward.programs.0", "stages.0.forward.programs.1"]
    cost = cost_of(fill(field, predict_prices(asked, predictor)))
    linear, softmax = predictor.predict([LINEAR, SOFTMAX], "t4")
    assert linear.latency_s is not None and softmax.latency_s is not None
    assert linear.upper_s is not None and softmax.upper_s is not None
    assert cost.latency_s == 3 * linear.latency_s + softmax.latency_s
    assert cost.upper_s == 3 * linear.upper_s + softmax.upper_s
    assert [part.count for part in cost.parts] == [3, 1]
    share = 100 * 3 * linear.latency_s / cost.latency_s
    assert f"linear:dtype=float32,m=64,n=256,k=128 {share:.0f} %" in cost.largest()


def test_a_curve_from_programs_is_priced_at_each_size(predictor: LatencyPredictor) -> None:
    curve = BatchCurve.model_validate(
        {"batch": [1, 8], "programs": [{"program": {**LINEAR, "m": "batch*64"}, "count": 2}], "device": "t4"}
    )
    sizes, costs = curve.with_prices(iter(predict_prices(curve.price_requests("decode"), predictor))).points()
    alone = predictor.predict([{**LINEAR, "m": 64 * b} for b in (1, 8)], "t4")
    assert sizes.tolist() == [1, 8]
    assert [cost.latency_s for cost in costs] == [2 * (one.latency_s or 0) for one in alone]


def test_curves_that_contradict_themselves_name_the_field() -> None:
    with pytest.raises(ValidationError, match="either seconds or programs"):
        BatchCurve.model_validate({"batch": [1]})
    for values, path in (
        ({"batch": [2, 1], "seconds": [1.0, 1.0]}, "c.batch"),
        ({"batch": [1, 2], "seconds": [1.0]}, "c.seconds"),
        ({"batch": [1], "programs": [{"program": LINEAR}]}, "c.device"),
        ({"batch": [1], "programs": [{"program": LINEAR}], "device": "t4"}, "c.programs"),
        ({"batch": [1], "programs": [{"program": {"operator": "nope"}}], "device": "t4"}, "c.programs"),
    ):
        with pytest.raises(FieldError) as caught:
            BatchCurve.model_validate(values).price_requests("c")
        assert caught.value.path == path


def test_interpolation_holds_below_and_is_proportional_beyond() -> None:
    sizes, seconds = np.array([2.0, 4.0]), np.array([1.0, 3.0])
    assert interpolate(sizes, seconds, np.array([1, 2, 3, 4, 8])).tolist() == [1, 1, 2, 3, 6]


def test_a_device_that_is_not_known_names_the_field(predictor: LatencyPredictor) -> None:
    field = PredictedCost.model_validate({"programs": [{"program": LINEAR}], "device": "no-such-gpu"})
    with pytest.raises(FieldError, match=r"a\.programs\.0: .*no-such-gpu") as caught:
        predict_prices(field.price_requests("a"), predictor)
    assert caught.value.path == "a.programs.0"


def test_a_hash_is_known_to_services_alone(predictor: LatencyPredictor) -> None:
    field = PredictedCost.model_validate({"programs": [{"program": {"hash": "0" * 32}}], "device": "t4"})
    with pytest.raises(FieldError, match="a hash names a program"):
        predict_prices(field.price_requests("a"), predictor)


def test_equal_programs_are_asked_for_once(predictor: LatencyPredictor) -> None:
    field = PredictedCost.model_validate({"programs": [{"program": LINEAR}] * 5, "device": "t4"})
    asked: list[int] = []

    class Counting:
        model_id = predictor.model_id
        predict = predictor.predict

        def predict_queries(self, queries, quantiles=(0.1, 0.9)):  # type: ignore[no-untyped-def]
            asked.append(len(queries))
            return predictor.predict_queries(queries, quantiles)

    assert len(predict_prices(field.price_requests("a"), Counting())) == 5
    assert asked == [1]


def test_a_breach_of_the_schema_names_its_places() -> None:
    from cdmpp.predict.requests.request import Answer, Request, Seconds

    class Tiny(Request[Answer]):
        wait_s: Seconds

    with pytest.raises(FieldError, match=r"wait_s: .*greater than or equal to 0") as caught:
        read_request(Tiny, {"wait_s": -1.0})
    assert caught.value.path == "wait_s"
    with pytest.raises(FieldError, match="other: unknown field"):
        read_request(Tiny, {"wait_s": 1.0, "other": 2})
    with pytest.raises(FieldError, match="finite"):
        read_request(Tiny, {"wait_s": float("inf")})
