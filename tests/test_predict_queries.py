"""Answering many rows at once: what is shared between them, and what is not."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cdmpp.devices import from_mapping, lookup
from cdmpp.model.inference.encoder import ENCODED_BYTES
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.program import TensorProgram
from tests.features.shapes import random_specs

DEVICES = ("t4", "l4", "a100-pcie-40gb", "h200")


def queries(count: int, seed: int = 5) -> list[Query]:
    rng = random.Random(seed)
    return [Query(TensorProgram.from_operator(spec), rng.choice(DEVICES)) for spec in random_specs(count, seed)]


def test_new_operators_in_one_call_equal_each_alone(predictor: LatencyPredictor) -> None:
    asked = queries(70)
    together = LatencyPredictor(predictor.artifact).predict_queries(asked)
    lonely = LatencyPredictor(predictor.artifact)
    for query, answer in zip(asked, together, strict=True):
        assert lonely.predict_queries([query]) == [answer]


def test_an_operator_that_cannot_be_encoded_spoils_no_other(
    predictor: LatencyPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cdmpp.errors import UnsupportedOperatorError
    from cdmpp.features import class_features

    asked = queries(12)
    expected = LatencyPredictor(predictor.artifact).predict_queries(asked)
    bad = asked[4].program.hash
    template = class_features.template_json
    assert isinstance(asked[4].program, TensorProgram) and asked[4].program.operator is not None
    missing = asked[4].program.operator.structural_class()

    def shipped(name: str) -> str:
        if name == missing:
            raise UnsupportedOperatorError("not in this package", hint="another type")
        return template(name)

    monkeypatch.setattr(class_features, "template_json", shipped)
    caches = (class_features.template, class_features.class_features)
    for cache in caches:
        cache.cache_clear()
    got = LatencyPredictor(predictor.artifact).predict_queries(asked)
    for cache in caches:
        cache.cache_clear()
    for query, before, after in zip(asked, expected, got, strict=True):
        operator = getattr(query.program, "operator", None)
        if operator is not None and operator.structural_class() == missing:
            assert after.error is not None and after.error.code == "unsupported_operator"
        else:
            assert after == before
    assert bad in {answer.program_hash for answer in got if answer.error}


def test_devices_of_equal_figures_keep_their_names(predictor: LatencyPredictor) -> None:
    fields = lookup("t4").model_dump() | {"aliases": ()}
    program = TensorProgram.from_operator("softmax:rows=128,cols=256")
    named = [from_mapping({**fields, "name": name}) for name in ("one", "two", "one")]
    answers = predictor.predict_queries([Query(program, device) for device in (*named, "t4")])
    assert [answer.device for answer in answers] == ["one", "two", "one", "t4"]
    assert len({answer.latency_s for answer in answers}) == 1


def test_threads_share_a_predictor(predictor: LatencyPredictor) -> None:
    asked = queries(60)
    expected = LatencyPredictor(predictor.artifact).predict_queries(asked)
    shared = LatencyPredictor(predictor.artifact, cache_rows=16)
    parts = [range(start, 60, 6) for start in range(6)]
    with ThreadPoolExecutor(4) as pool:
        parallel = pool.map(lambda part: shared.predict_queries([asked[i] for i in part]), parts)
        for part, answers in zip(parts, parallel, strict=True):
            assert answers == [expected[i] for i in part]


def test_what_is_remembered_of_programs_is_bounded(predictor: LatencyPredictor) -> None:
    fresh = LatencyPredictor(predictor.artifact)
    for size in range(1, 40):
        fresh.encode(TensorProgram.from_operator(parse_operator(f"add:rows={size},cols=8")))
    cache = fresh._encoder.cache
    assert len(cache) == 39
    assert cache.weight <= ENCODED_BYTES
    held = sum(value.leaves.nbytes for value in cache.values())
    assert 0 < held < cache.weight
    # Cached features own their arrays: no block of a call stays in memory for one of its rows.
    assert all(value.leaves.base is None or value.leaves.base.nbytes == value.leaves.nbytes for value in cache.values())
    assert np.isfinite(held)


@pytest.mark.parametrize("levels", [(0.5,), (0.05,), (0.9,), (0.6, 0.9)])
def test_levels_on_one_side_of_the_median_do_not_bound_the_interval(
    predictor: LatencyPredictor, levels: tuple[float, ...]
) -> None:
    asked = queries(12)
    usual = LatencyPredictor(predictor.artifact).predict_queries(asked)
    others = LatencyPredictor(predictor.artifact).predict_queries(asked, levels)
    for expected, prediction in zip(usual, others, strict=True):
        assert (prediction.lower_s, prediction.upper_s) == (expected.lower_s, expected.upper_s)
        assert list(prediction.quantiles) == [f"{level:g}" for level in levels]
        assert prediction.lower_s < prediction.latency_s < prediction.upper_s


@pytest.mark.parametrize("levels", [(0.1, 0.9), (0.45, 0.55)])
def test_point_is_inside_its_interval(predictor: LatencyPredictor, levels: tuple[float, ...]) -> None:
    asked = queries(60)
    asked.append(Query(TensorProgram.from_operator("layernorm:rows=12,cols=6170"), "xeon-platinum-8124m"))
    for prediction in LatencyPredictor(predictor.artifact).predict_queries(asked, levels):
        assert prediction.error is None
        assert prediction.lower_s <= 0.99 * prediction.latency_s
        assert prediction.upper_s >= 1.01 * prediction.latency_s
