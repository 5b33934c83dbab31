"""The façade: what it answers, what it refuses, and that an answer does not depend on its company."""

import json
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdmpp.devices import from_mapping, lookup
from cdmpp.errors import DataError, InvalidDeviceError, UnknownDeviceError
from cdmpp.features.encode import EncodedProgram, operator_name
from cdmpp.features.schema import WIDTH
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.programs.program import TensorProgram
from tests.features.builder import Builder

TEXTS = [
    "linear:m=512,n=4096,k=1024,dtype=float16",
    "linear:m=1,n=1,k=1",
    "bmm:batch=8,m=128,n=128,k=64",
    "conv2d:n=8,c_in=64,h=56,w=56,c_out=64,kh=3,kw=3,pad_h=1,pad_w=1",
    "softmax:rows=4096,cols=1024",
    "relu:rows=16384,cols=1024",
    "attention_decode:batch=4,past_len=1024,heads=32,kv_heads=8,head_dim=128,dtype=bfloat16",
    "rmsnorm:rows=512,cols=4096,dtype=float16",
    "copy:rows=128,cols=128",
    "max_pool2d:n=1,c=64,h=112,w=112,kh=3,kw=3",
]
DEVICES = ["t4", "a100-sxm4-80gb", "l40s", "h200", "mi210", "p4"]


def queries() -> list[Query]:
    every = product(map(TensorProgram.from_operator, TEXTS), DEVICES, ("kernel", "eager"))
    return [Query(program, device, protocol) for program, device, protocol in every]


def figures(predictor: LatencyPredictor, asked: list[Query]) -> list[tuple[Any, ...]]:
    answers = predictor.predict_queries(asked)
    return [(p.latency_s, p.lower_s, p.upper_s, p.domain_score, p.roofline_s) for p in answers]


@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_answers_do_not_depend_on_the_batch(predictor: LatencyPredictor, seed: int) -> None:
    asked = queries()
    expected = dict(zip(range(len(asked)), figures(LatencyPredictor(predictor.artifact), asked), strict=True))
    order = list(expected)
    random.Random(seed).shuffle(order)
    fresh = LatencyPredictor(predictor.artifact)
    cut = random.Random(seed + 1).randrange(1, len(order))
    for part in (order[:cut], order[cut:]):
        for i, got in zip(part, figures(fresh, [asked[i] for i in part]), strict=True):
            assert got == expected[i]


def test_a_device_is_known_by_its_figures_and_not_by_its_name(predictor: LatencyPredictor) -> None:
    t4 = lookup("t4")
    program = "linear:m=512,n=4096,k=1024,bias=true"

    def ask(device: Any) -> Any:
        return predictor.predict([program], device, protocol="eager", framework="pytorch")[0]

    assert ask("t4").domain == "in"
    twin = from_mapping({**t4.model_dump(), "name": "mine", "aliases": ()})
    assert ask(twin).latency_s == ask("t4").latency_s and ask(twin).domain == "in"
    fake = {**t4.model_dump(), "mem_bandwidth_bytes_per_s": 3.2e12}
    assert ask(fake).domain != "in" and ask(fake).latency_s != ask("t4").latency_s


def test_an_unseen_device_is_near_and_several_new_things_are_out(predictor: LatencyPredictor) -> None:
    ask = predictor.predict
    bf16 = "linear:m=512,n=4096,k=1024,dtype=bfloat16"
    assert ask([bf16], "l40s", protocol="graph", framework="vllm")[0].domain == "in"
    assert ask([bf16], "h200", protocol="graph", framework="vllm")[0].domain == "in"
    assert ask([bf16], "h20", protocol="graph", framework="vllm")[0].domain == "near"
    program = "linear:m=512,n=4096,k=1024,dtype=int8"
    assert ask([program], "raspberry-pi-3", protocol="graph")[0].domain != "in"
    encoder = "attention_encoder:batch=1,q_len=128,heads=16,kv_heads=4,head_dim=64,dtype=float32"
    assert ask([encoder], "l4")[0].domain != "in"  # a type and a device are new
    few_devices = [
        "softmax_cross_entropy:rows=8192,cols=128256,dtype=bfloat16,direction=fwd_bwd",
        "fused_add_rms_norm:rows=1024,cols=4096,dtype=bfloat16",
        "attention_backward:batch=2,q_len=4096,heads=32,kv_heads=8,head_dim=128,dtype=bfloat16",
    ]
    for prediction in ask(few_devices, "l4"):
        assert prediction.domain == "out" and 0 < prediction.latency_s < 0.1, prediction.name
    for prediction in ask([*few_devices, "layernorm_backward:rows=1024,cols=4096,dtype=bfloat16"], "h100"):
        assert prediction.domain != "in" and 0 < prediction.latency_s < 0.1, prediction.name


def test_implementation_is_the_stated_one_or_follows_the_framework(predictor: LatencyPredictor) -> None:
    norm, softmax = "rmsnorm:rows=1024,cols=4096,dtype=bfloat16", "softmax:rows=1024,cols=4096,dtype=bfloat16"
    asked: list[tuple[str | None, str | None]] = [
        (None, None),
        ("pytorch", None),
        (None, "composed"),
        ("vllm", "composed"),
        ("pytorch", "fused"),
        (None, "compiled"),
    ]
    rows = [
        predictor.predict([norm, softmax], "h100-sxm", framework=framework, implementation=implementation)
        for framework, implementation in asked
    ]
    assert [norms.implementation for norms, _ in rows] == ["fused", *["composed"] * 3, "fused", "compiled"]
    # PyTorch's softmax is one kernel.
    assert [other.implementation for _, other in rows] == [*["fused"] * 5, "compiled"]
    fused, pytorch, composed, vllm, of_pytorch, _ = [norms.latency_s or 0.0 for norms, _ in rows]
    assert pytorch == composed == vllm > 3 * fused
    assert of_pytorch == fused
    bare = TensorProgram.from_operator(norm, "tvm")
    scheduled = predictor.predict([bare], "intel-xeon-amx-2t-avx2", implementation="composed")[0]
    assert scheduled.implementation is None and "implementation" not in scheduled.to_dict()
    with pytest.raises(DataError, match="implementation 'composd' is not known; did you mean composed"):
        predictor.predict([norm], "t4", implementation="composd")


def test_one_bad_program_spares_the_others(predictor: LatencyPredictor) -> None:
    programs: list[Any] = ["linear:m=-1,n=2,k=3", "nonsense:m=1", None, 5, {"operator": "linear"}, "linear:m=2,n=2,k=2"]
    got = predictor.predict(programs, "t4")
    codes = [p.error.code if p.error else None for p in got]
    assert codes == ["invalid_program", "unsupported_operator", *["invalid_program"] * 3, None]
    assert all(p.latency_s is None and p.error.message for p in got if p.error)
    assert got[-1].latency_s
    assert predictor.predict([], "t4") == []


def test_what_concerns_the_whole_call_raises(predictor: LatencyPredictor) -> None:
    program = ["linear:m=2,n=2,k=2"]
    with pytest.raises(UnknownDeviceError, match="t44"):
        predictor.predict(program, "t44")
    with pytest.raises(InvalidDeviceError):
        predictor.predict(program, None)
    with pytest.raises(DataError, match="must be a list"):
        predictor.predict("linear:m=2,n=2,k=2", "t4")
    with pytest.raises(DataError, match="protocol"):
        predictor.predict(program, "t4", protocol="x")
    for levels in ([], [0.0], [1.5], [float("nan")]):
        with pytest.raises(DataError, match="quantiles"):
            predictor.predict(program, "t4", quantiles=levels)


def test_an_encoded_program_is_answered_as_the_program_itself(predictor: LatencyPredictor) -> None:
    builder = Builder()
    tir = json.dumps(builder.program(builder.loop(builder.integer(8), builder.store())))
    for program in (TensorProgram.from_operator("linear:m=512,n=4096,k=1024"), TensorProgram.from_tvm_json(tir)):
        features = LatencyPredictor(predictor.artifact).encode(program)
        encoded = EncodedProgram(program.name, program.hash, program.backend, operator_name(program), features)
        queries = [[Query(form, "iphone-7")] for form in (program, encoded)]
        expected, got = (LatencyPredictor(predictor.artifact).predict_queries(query) for query in queries)
        assert got == expected and got[0].latency_s

    assert encoded.operator == "tir"
    bare = replace(encoded, hash="other", features=replace(features, leaves=features.leaves[:, :, :WIDTH]))
    refused = predictor.predict_queries([Query(bare, "t4")])[0]
    assert refused.error is not None and "schedule" in refused.error.message
