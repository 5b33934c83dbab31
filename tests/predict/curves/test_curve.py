"""Curves: which programs stand at the points, their sums, the fit, and what is refused."""

import json
from typing import Any

import numpy as np
import pytest

from cdmpp.devices import lookup
from cdmpp.errors import CdmppError, DataError, InvalidProgramError, UnsupportedOperatorError
from cdmpp.predict.curves import Curve, Template, predict_curve
from cdmpp.predict.curves.template import Grid
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.program import TensorProgram

LINEAR = {"operator": "linear", "n": 4096, "k": 1024, "dtype": "float16"}


def texts(template: Any, axes: dict[str, list[Any]]) -> list[str]:
    grid = Grid([template if isinstance(template, Template) else Template(template)], axes)
    out = []
    for at in grid.points():
        programs = grid.programs(at, "library")
        out.append(programs.message if isinstance(programs, CdmppError) else programs[0][0].name)
    return out


def test_an_axis_replaces_the_field_of_its_name() -> None:
    assert texts({**LINEAR, "m": 3}, {"m": [1, 2]}) == [
        "linear:dtype=float16,m=1,n=4096,k=1024",
        "linear:dtype=float16,m=2,n=4096,k=1024",
    ]
    assert texts(LINEAR, {"m": [1], "dtype": ["float32", "int8"], "bias": [True]}) == [
        "linear:dtype=float32,m=1,n=4096,k=1024,bias=true",
        "linear:dtype=int8,m=1,n=4096,k=1024,bias=true",
    ]


def test_the_last_axis_is_fastest() -> None:
    made = texts(Template.parse("linear:m=a*100+b,n=4,k=4"), {"a": [1, 2], "b": [3, 4]})
    assert [text.split("m=")[1].split(",")[0] for text in made] == ["103", "104", "203", "204"]


def test_an_expression_is_exact() -> None:
    made = texts(
        Template.parse("linear:m=ceil(max(tokens, 1)*density),n=4,k=4"), {"tokens": [10], "density": [0.7, 0.1]}
    )
    assert [text.split("m=")[1].split(",")[0] for text in made] == ["7", "1"]


def test_a_point_whose_sizes_are_impossible_is_an_error_of_its_own() -> None:
    made = texts(
        {"operator": "attention_decode", "batch": 1, "past_len": 5, "heads": 8, "kv_heads": "kv", "head_dim": 64},
        {"kv": [8, 9, 0.5]},
    )
    assert made[0].startswith("attention_decode:")
    assert "kv_heads=9 exceeds heads=8" in made[1]
    assert "not a whole number" in made[2]


@pytest.mark.parametrize(
    ("fields", "axes", "error", "says"),
    [
        (LINEAR, {"m": [1], "batch": [1]}, DataError, "'batch' is not used"),
        (LINEAR, {"k": [1]}, InvalidProgramError, "needs m"),
        ({**LINEAR, "x": 1}, {"m": [1]}, InvalidProgramError, "has no x"),
        ({**LINEAR, "m": "a*b"}, {"a": [1]}, InvalidProgramError, "'b' in 'a\\*b' is not an axis"),
        ({**LINEAR, "m": "a"}, {"a": ["1"]}, InvalidProgramError, "not an axis of numbers"),
        ({**LINEAR, "m": "a**2"}, {"a": [1]}, InvalidProgramError, "expression"),
        ({"operator": "lstm"}, {"m": [1]}, UnsupportedOperatorError, "lstm"),
        ({"m": 1}, {"m": [1]}, UnsupportedOperatorError, "None"),
        (LINEAR, {"m": []}, DataError, "0 values"),
        (LINEAR, {"m": [1, "a"]}, DataError, "neither"),
        (LINEAR, {"m": [1, True]}, DataError, "neither"),
        (LINEAR, {"m": [1, 1.0]}, DataError, "twice"),
        (LINEAR, {"m": [float("nan")]}, DataError, "neither"),
        (LINEAR, {"max": [1]}, DataError, "not the name"),
        (LINEAR, {"operator": ["linear"]}, DataError, "not the name"),
        (LINEAR, {"é": [1]}, DataError, "not the name"),
        (LINEAR, {f"a{i}": [1] for i in range(7)}, DataError, "7 axes"),
    ],
)
def test_what_makes_no_grid(fields: Any, axes: Any, error: type[CdmppError], says: str) -> None:
    with pytest.raises(error, match=says):
        Grid([Template(fields)], axes)


@pytest.mark.parametrize("text", ["linear:m", "linear:m=1,m=2", "linear:=3"])
def test_a_template_text_that_is_none(text: str) -> None:
    with pytest.raises(InvalidProgramError):
        Grid([Template.parse(text)], {})


def test_points_are_the_predictions(predictor: LatencyPredictor) -> None:
    mine = lookup("t4").model_copy(update={"name": "mine", "mem_bandwidth_bytes_per_s": 2.0e11})
    how = {"protocol": "eager", "framework": "pytorch", "quantiles": (0.25, 0.75)}
    axes = {"m": [8, 1, 64], "dtype": ["float16", "float32"]}
    curve = predict_curve(predictor, LINEAR, axes, ["Tesla T4", mine], **how)
    assert [p.device for p in curve.points] == ["t4"] * 6 + ["mine"] * 6
    assert curve.points[1].at == {"m": 8, "dtype": "float32"}
    assert curve.monotone == ["m"]
    for point in curve.points:
        (alone,) = predictor.predict([{**LINEAR, **point.at}], "t4" if point.device == "t4" else mine, **how)
        for name in ("latency_s", "lower_s", "upper_s", "domain", "domain_score"):
            assert getattr(point, name) == getattr(alone, name)
    assert Curve.from_dict(json.loads(json.dumps(curve.to_dict()))) == curve


def test_the_fit_does_not_fall_by_value_whatever_the_order(predictor: LatencyPredictor) -> None:
    values = [64, 1, 3, 2, 9, 8, 17, 16, 33, 128]
    curve = predict_curve(predictor, LINEAR, {"m": values, "k": [16, 17, 1024]}, ["t4"])
    fitted = np.array([p.fitted_s for p in curve.points]).reshape(10, 3)[np.argsort(values)]
    assert (np.diff(fitted, axis=0) >= 0).all()
    assert (np.diff(fitted, axis=1) >= 0).all()
    latency = np.array([p.latency_s for p in curve.points]).reshape(10, 3)[np.argsort(values)]
    assert (np.diff(latency, axis=0) < 0).any(), "nothing to fit: choose other sizes"
    free = predict_curve(predictor, LINEAR, {"m": values}, ["t4"], monotone=[])
    assert [p.fitted_s for p in free.points] == [p.latency_s for p in free.points]


def test_several_programs_are_summed(predictor: LatencyPredictor) -> None:
    templates = [
        Template.parse("linear:m=batch*16,n=64,k=64", 3),
        Template.parse("softmax:rows=batch,cols=4096"),
        Template.parse("add:rows=5,cols=5"),
    ]
    curve = predict_curve(predictor, templates, {"batch": [1, 7]}, ["l4"])
    for point, batch in zip(curve.points, (1, 7), strict=True):
        programs = [f"linear:m={16 * batch},n=64,k=64", f"softmax:rows={batch},cols=4096", "add:rows=5,cols=5"]
        linear, softmax, add = alone = predictor.predict(programs, "l4")
        assert point.latency_s == pytest.approx(3 * linear.latency_s + softmax.latency_s + add.latency_s)
        assert point.upper_s == pytest.approx(3 * linear.upper_s + softmax.upper_s + add.upper_s)
        assert point.domain == max((p.domain for p in alone), key=["in", "near", "out"].index)
        assert point.domain_score == max(p.domain_score for p in alone)


def test_errors_stand_at_their_points(predictor: LatencyPredictor) -> None:
    devices = ["no-such-gpu", "t4", {"name": "half", "kind": "gpu"}]
    curve = predict_curve(predictor, LINEAR, {"m": [1, 2**40, 4]}, devices)
    codes = [p.error.code if p.error else None for p in curve.points]
    assert codes[::3] == codes[2::3] == ["unknown_device", None, "invalid_device"]
    assert codes[1::3] == ["invalid_program"] * 3
    assert curve.points[-1].device == "half"
    assert set(curve.points[1].to_dict()) == {"device", "at", "error"}
    assert "error" not in curve.points[3].to_dict()


def test_what_is_no_curve(predictor: LatencyPredictor) -> None:
    for axes, more, says in (
        ({"m": [1], "dtype": ["float16"]}, {"monotone": ["dtype"]}, "dtype"),
        ({"m": [1]}, {"protocol": "gpu"}, "protocol"),
        ({"m": [1]}, {"quantiles": (0.999,)}, "levels"),
        ({"m": list(range(1, 1001))}, {"devices": ["t4"] * 11}, "11,000 predictions"),
        ({"m": [1]}, {"devices": []}, "device"),
    ):
        with pytest.raises(DataError, match=says):
            predict_curve(predictor, LINEAR, axes, **{"devices": ["t4"], **more})
    for count in (0, 10**9):
        with pytest.raises(DataError, match="times"):
            predict_curve(predictor, [Template({**LINEAR, "m": 1}, count)], {}, ["t4"])


def test_hostile_expressions_are_refused_before_they_cost() -> None:
    long = "*".join(["a"] * 20 + ["b"] * 20)
    fields = {"operator": "bmm", "batch": long, "m": long, "n": long, "k": long}
    axes = {"a": [i + 0.123456789 for i in range(100)], "b": list(range(1, 101))}
    with pytest.raises(DataError, match="parts to evaluate"):
        Grid([Template(fields)], axes)
    (said,) = texts(fields, {"a": [1.123456789012345], "b": [1e15]})
    assert "out of all bounds" in said


def test_no_axes_are_one_point(predictor: LatencyPredictor) -> None:
    curve = predict_curve(predictor, "linear:m=5,n=6,k=7", {}, ["t4"])
    assert [(p.at, p.fitted_s) for p in curve.points] == [({}, curve.points[0].latency_s)]


def test_programs_are_made_once(predictor: LatencyPredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = TensorProgram.from_operator
    monkeypatch.setattr(TensorProgram, "from_operator", lambda *a: made.append(a) or real(*a))
    templates = [Template.parse("linear:m=a,n=4,k=4"), Template.parse("add:rows=b,cols=5")]
    predict_curve(predictor, templates, {"a": [1, 2, 3], "b": [4, 5, 6]}, ["t4", "l4"])
    assert len(made) == 6


def test_default_fit_may_fall_where_more_devices_share_the_work(predictor: LatencyPredictor) -> None:
    layer = "moe:hidden=64,intermediate=64,experts=8,topk=2"
    curve = predict_curve(predictor, layer, {"tokens": [8], "ep": [1, 4], "tp": [1, 2]}, ["h200"])
    assert curve.monotone == ["tokens"]
