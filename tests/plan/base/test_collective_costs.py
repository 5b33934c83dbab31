"""Collectives as costs, as parts of programs and curves, and as links whose times are predicted."""

from typing import Any

import pytest
from pydantic import ValidationError

from cdmpp import LatencyPredictor
from cdmpp.errors import FieldError
from cdmpp.plan.base.batch_curve import BatchCurve
from cdmpp.plan.base.solve import predict_prices
from cdmpp.predict.curves import predict_curve
from cdmpp.predict.requests.collective_forms import LINK_BYTES, LINK_OPERATORS
from cdmpp.predict.requests.pricing import PredictedCost, collect, cost_of, fill
from cdmpp.simulate.replay.build import read_link
from cdmpp.simulate.replay.forms import LinkForm
from tests.fake_collectives import RoundPredictor, collective, seconds

LINEAR = {"operator": "linear", "m": 64, "n": 256, "k": 128}


def test_cost_is_the_prediction_of_the_collective(predictor: LatencyPredictor) -> None:
    options = {"ranks_per_node": 8, "dtype": "bfloat16", "link": "nvlink4", "library": "nccl", "mode": "graph"}
    field = PredictedCost.model_validate(collective("all_reduce", 1e6, **options))
    [request] = field.price_requests("transfer")
    assert request.path == "transfer.collective"
    assert request.program == {"operator": "all_reduce", "bytes": 1_000_000, "ranks": 8, **options}
    cost = cost_of(fill(field, predict_prices([request], predictor)))
    [alone] = predictor.predict([request.program], "h100-sxm")
    assert (cost.latency_s, cost.lower_s, cost.upper_s) == (alone.latency_s, alone.lower_s, alone.upper_s)
    assert "all_reduce" in cost.largest()


def test_framework_and_a_bandwidth_as_link_reach_the_prediction() -> None:
    field = PredictedCost.model_validate({**collective("all_reduce", 1e6, link=64e9), "framework": "vllm"})
    [request] = field.price_requests("transfer")
    assert request.framework == "vllm"
    assert request.program["link"] == 64e9


def test_curve_of_a_collective_is_that_of_the_same_program() -> None:
    asked = {"operator": "all_to_all", "ranks": 8, "dtype": "int8"}
    shared: dict[str, Any] = {"batch": [8, 64], "device": "h100-sxm", "protocol": "graph"}

    def curve(**fields: Any) -> list[float]:
        predictor = RoundPredictor()
        form = BatchCurve.model_validate({**shared, **fields})
        _, costs = fill(form, predict_prices(collect(form), predictor)).points()
        assert {c.operator for c in predictor.collectives()} == {"all_to_all"}
        return [cost.latency_s for cost in costs]

    same = curve(programs=[{"program": {**asked, "bytes": "batch*7168000"}}])
    assert curve(collective={**asked, "bytes": "batch*7168000"}) == same == [seconds(8 * 7168e3), seconds(64 * 7168e3)]
    assert curve(collective={**asked, "bytes": 1e8}) == [seconds(1e8)] * 2
    with pytest.raises(FieldError, match="'tokens' in 'tokens\\*2' is not an axis") as caught:
        curve(collective={**asked, "bytes": "tokens*2"})
    assert caught.value.path.endswith("collective")


def test_bytes_are_rounded_up() -> None:
    [request] = PredictedCost.model_validate(collective("send_recv", 10.2, 2)).price_requests("a")
    assert request.program["bytes"] == 11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operator": "all_gather_v"}, "all_reduce"),
        ({"bytes": 0}, "greater than 0"),
        ({"ranks": 1}, "greater than or equal to 2"),
        ({"ranks": 2.5}, "integer"),
        ({"hops": 2}, "Extra inputs"),
    ],
)
def test_wrong_collective_is_refused_by_the_schema(change: dict[str, Any], message: str) -> None:
    given = {"operator": "all_reduce", "bytes": 8.0, "ranks": 2, **change}
    with pytest.raises(ValidationError, match=message):
        PredictedCost.model_validate({"collective": given, "device": "t4"})


def test_a_cost_has_either_programs_or_a_collective() -> None:
    with pytest.raises(ValidationError, match="either programs or collective"):
        PredictedCost.model_validate({"device": "t4"})
    with pytest.raises(ValidationError, match="either programs or collective"):
        PredictedCost.model_validate({**collective("all_reduce", 8), "programs": [{"program": LINEAR}]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": "carrier-pigeon"}, "link 'carrier-pigeon' is not known"),
        ({"library": "smoke-signals"}, "library"),
        ({"dtype": "int4"}, "int4"),
    ],
)
def test_message_names_the_field_and_the_value(options: dict[str, Any], message: str) -> None:
    field = PredictedCost.model_validate(collective("all_reduce", 1e6, **options))
    with pytest.raises(FieldError, match=message) as caught:
        predict_prices(field.price_requests("stages.0.forward"), RoundPredictor())
    assert caught.value.path == "stages.0.forward.collective"


def test_collectives_stand_among_programs(predictor: LatencyPredictor) -> None:
    reduce = {"operator": "all_reduce", "bytes": 1 << 20, "ranks": 4}
    field = PredictedCost.model_validate(
        {"programs": [{"program": LINEAR, "count": 2}, {"program": reduce, "count": 3}], "device": "a100-sxm4-80gb"}
    )
    cost = cost_of(fill(field, predict_prices(field.price_requests("a"), predictor)))
    linear, sent = predictor.predict([LINEAR, reduce], "a100-sxm4-80gb")
    assert cost.latency_s == 2 * linear.latency_s + 3 * sent.latency_s


def test_curve_over_a_batch_has_collectives_with_expressions(predictor: LatencyPredictor) -> None:
    work = {"operator": "all_to_all", "bytes": "batch*7168*2", "ranks": 8}
    curve = BatchCurve.model_validate({"batch": [16, 256], "programs": [{"program": work}], "device": "h100-sxm"})
    requests = curve.price_requests("link.layer")
    assert [request.program["bytes"] for request in requests] == [16 * 14336, 256 * 14336]
    _, costs = curve.with_prices(iter(predict_prices(requests, predictor))).points()
    alone = predictor.predict([{**work, "bytes": batch * 14336} for batch in (16, 256)], "h100-sxm")
    assert [cost.latency_s for cost in costs] == [prediction.latency_s for prediction in alone]


def test_curve_of_a_collective_covers_ranks_and_bytes(predictor: LatencyPredictor) -> None:
    axes = {"mib": [1, 16], "ranks": [2, 4, 8]}
    curve = predict_curve(predictor, "all_reduce:bytes=mib*1048576,ranks=ranks", axes, ["h100-sxm"], monotone=["mib"])
    latency = {(point.at["mib"], point.at["ranks"]): point.latency_s for point in curve.points}
    fitted = {(point.at["mib"], point.at["ranks"]): point.fitted_s for point in curve.points}
    assert len(latency) == 6
    [alone] = predictor.predict(["all_reduce:bytes=16777216,ranks=4"], "h100-sxm")
    assert latency[16, 4] == alone.latency_s
    assert all(fitted[16, ranks] >= fitted[1, ranks] for ranks in (2, 4, 8))


def test_predicted_link_holds_the_predictions_at_its_sizes() -> None:
    form = LinkForm.model_validate({"collective": {"ranks": 8}, "device": "h100-sxm"})
    requests = collect(form)
    assert len(requests) == len(LINK_BYTES) * len(LINK_OPERATORS)
    filled = fill(form, predict_prices(requests, RoundPredictor()))
    link = read_link(filled, "link", "all_gather")
    assert [size for size, _ in link.table] == list(LINK_BYTES)
    assert link.seconds(2.0**20) == seconds(2.0**20)
    assert read_link(filled, "link", "all_gather", "upper_s").seconds(2.0**20) == 2 * seconds(2.0**20)


def test_link_of_one_operation_refuses_others() -> None:
    form = LinkForm.model_validate({"collective": {"operator": "all_reduce", "ranks": 8}, "device": "h100-sxm"})
    requests = collect(form)
    assert len(requests) == len(LINK_BYTES)
    filled = fill(form, predict_prices(requests, RoundPredictor()))
    with pytest.raises(FieldError, match="this request needs all_gather") as caught:
        read_link(filled, "link", "all_gather")
    assert caught.value.path == "link.collective.operator"


@pytest.mark.parametrize(
    ("given", "path"),
    [({"collective": {"ranks": 8}}, "link.device"), ({"device": "t4", "alpha_s": 1e-5}, "link.collective")],
)
def test_link_with_half_a_prediction_is_refused(given: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError, match="has collective and device") as caught:
        LinkForm.model_validate(given).price_requests("link")
    assert caught.value.path == path


def test_link_has_either_figures_or_predictions() -> None:
    form = LinkForm.model_validate({"collective": {"ranks": 8}, "device": "h100-sxm", "alpha_s": 1e-5})
    filled = fill(form, predict_prices(collect(form), RoundPredictor()))
    with pytest.raises(FieldError, match="collective and alpha_s") as caught:
        read_link(filled, "link")
    assert caught.value.path == "link.alpha_s"
