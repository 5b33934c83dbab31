"""Rows asked as arrays get the figures that they get one by one, to the last digit."""

import json
from dataclasses import replace

import numpy as np
import pytest

from cdmpp.devices import lookup
from cdmpp.errors import DataError, InvalidProgramError, UnknownDeviceError
from cdmpp.features.encode import operator_name
from cdmpp.features.schema import WIDTH
from cdmpp.predict.bulk import DOMAINS, FeatureAnswers, FeaturePart, FeatureQueries
from cdmpp.predict.prediction import Query
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.program import TensorProgram
from tests.features.test_hostile_json import concrete

MINE = lookup("t4").model_copy(update={"name": "mine", "mem_bandwidth_bytes_per_s": 2.1e11})
TEXTS = (
    *(f"linear:m={m},n=4096,k=1024,dtype=float16" for m in range(1, 41)),
    *(f"softmax:rows={rows},cols=1000" for rows in range(7, 20)),
    "attention_prefill:batch=2,q_len=77,heads=8,kv_heads=2,head_dim=64,dtype=bfloat16",
    "conv2d:n=8,c_in=64,h=56,w=56,c_out=64,kh=3,kw=3,pad_h=1,pad_w=1",
    "max_pool2d:n=8,c=64,h=56,w=56,kh=3,kw=3",
    "rmsnorm:rows=1024,cols=4096,dtype=bfloat16",
)
LEVELS = (0.05, 0.5, 0.9)


def asked() -> list[Query]:
    programs = [TensorProgram.from_operator(text) for text in TEXTS]
    return [
        Query(program, device, protocol, framework, implementation)  # type: ignore[arg-type]
        for program in programs
        for device, protocol, framework, implementation in (
            ("t4", "kernel", None, None),
            (MINE, "eager", "pytorch", None),
            ("t4", "kernel", None, "composed"),
            (MINE, "eager", "pytorch", "fused"),
        )
    ]


def as_features(predictor: LatencyPredictor, queries: list[Query]) -> FeatureQueries:
    parts = [
        FeaturePart(
            predictor.encode(q.program),
            operator_name(q.program),
            q.device,
            q.program.backend,
            q.protocol,
            q.framework,
            q.implementation,
        )
        for q in queries
    ]
    return FeatureQueries.of(parts, quantiles=LEVELS)


def assert_same(predictor: LatencyPredictor, queries: list[Query], answers: FeatureAnswers) -> None:
    for i, prediction in enumerate(predictor.predict_queries(queries, LEVELS)):
        assert prediction.error is None
        assert (prediction.latency_s, prediction.lower_s, prediction.upper_s) == (
            answers.latency_s[i],
            answers.lower_s[i],
            answers.upper_s[i],
        )
        assert list(prediction.quantiles.values()) == answers.quantiles[i].tolist()
        assert prediction.domain == DOMAINS[answers.domain[i]]
        assert (prediction.domain_score, prediction.roofline_s) == (answers.domain_score[i], answers.roofline_s[i])


def test_arrays_and_queries_get_the_same_figures(predictor: LatencyPredictor) -> None:
    queries = asked()
    rows = as_features(predictor, queries)
    answers = predictor.predict_features(FeatureQueries.from_bytes(rows.to_bytes()))
    assert answers.model_id == predictor.model_id
    assert_same(predictor, queries, answers)


def test_programs_given_as_tir(predictor: LatencyPredictor) -> None:
    texts = (json.dumps(concrete(f"linear:m={m},n=8,k=16")) for m in (4, 5, 6))
    programs = [TensorProgram.from_tvm_json(text) for text in texts]
    queries = [Query(p, "intel-xeon-amx-2t-avx2") for p in programs]
    rows = as_features(predictor, queries)
    assert_same(predictor, queries, predictor.predict_features(rows))
    with pytest.raises(InvalidProgramError, match="row 0: it has stores outside of thread bindings, and t4 is a GPU"):
        predictor.predict_features(as_features(predictor, [Query(p, "t4") for p in programs]))
    if rows.leaves.shape[2] > WIDTH:
        with pytest.raises(InvalidProgramError, match="schedule"):
            predictor.predict_features(replace(rows, leaves=rows.leaves[:, :, :WIDTH]))


def test_no_rows(predictor: LatencyPredictor) -> None:
    answers = predictor.predict_features(FeatureQueries.of([]))
    assert len(answers) == 0
    assert FeatureAnswers.from_bytes(answers.to_bytes()).quantiles.shape == (0, 2)


def test_what_the_model_cannot_answer_is_refused(predictor: LatencyPredictor) -> None:
    rows = as_features(predictor, asked()[:3])
    with pytest.raises(UnknownDeviceError):
        predictor.predict_features(replace(rows, devices=("no-such-device", *rows.devices[1:])))
    part = FeaturePart(
        predictor.encode(asked()[-1].program), "rmsnorm", "t4", framework="nccl", implementation="composed"
    )
    with pytest.raises(DataError, match="framework 'nccl' is not known"):
        FeatureQueries.of([part])
    with pytest.raises(DataError, match="levels"):
        predictor.predict_features(replace(rows, quantiles=(0.001,)))


def test_features_of_no_program_are_a_refusal_or_an_answer(predictor: LatencyPredictor) -> None:
    """Finite, and yet nothing: no warning, no NaN, no crash."""
    rows = as_features(predictor, asked()[:40])
    drawn = np.random.default_rng(2)
    for scale in (1.0, 30.0, 1000.0):
        leaves = drawn.uniform(-scale, scale, rows.leaves.shape).astype(np.float32)
        totals = np.exp2(drawn.uniform(0, min(scale, 600.0), rows.totals.shape))
        totals[:, 2:4] = drawn.uniform(0, 1, (len(rows), 2))
        changed = replace(rows, leaves=leaves, totals=totals)
        changed.check()
        try:
            answers = predictor.predict_features(changed)
        except InvalidProgramError as error:
            assert "row" in error.message
        else:
            assert np.isfinite(answers.quantiles).all()
            assert (answers.latency_s > 0).all()
