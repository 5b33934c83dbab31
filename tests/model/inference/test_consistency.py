"""Predictions of one program agree across protocols and element types, and those that training had stay."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from cdmpp.devices import known
from cdmpp.devices.registry import lookup
from cdmpp.errors import InvalidProgramError
from cdmpp.features.encode import encode_operators
from cdmpp.model.domain.evidence import Evidence, QueryKind
from cdmpp.model.domain.score import Context
from cdmpp.model.inference.consistency import Values, chain, needed
from cdmpp.predict.bulk import FeaturePart, FeatureQueries
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.elements import NARROW_FIELDS, SCALINGS
from cdmpp.programs.operators import OperatorSpec, make_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import FRAMEWORKS, PROTOCOLS
from tests.features.shapes import random_specs

DTYPES = ("float32", "float16", "bfloat16", "int8")
LEVELS = (0.03, 0.1, 0.5, 0.9)


def ask(predictor: LatencyPredictor, queries: Sequence[Query]) -> list[Prediction]:
    predictions = predictor.predict_queries(queries, LEVELS)
    assert [p.error for p in predictions if p.error is not None] == []
    return predictions


def cells() -> Iterator[tuple[OperatorSpec, str, str | None]]:
    """Random operators of every kind; each known device comes up with several."""
    rng = np.random.default_rng(14)
    devices = [device.name for device in known()]
    specs = [spec for spec in random_specs(90, seed=14) if set(DTYPES) <= set(spec.dtypes)]
    for i, spec in enumerate(specs):
        for device in (devices[i % len(devices)], str(rng.choice(devices))):
            yield spec, device, str(rng.choice(FRAMEWORKS)) if rng.random() < 0.5 else None


def as_type(spec: OperatorSpec, types: str) -> TensorProgram:
    """The operator in the types of a label, such as "float16" or "bfloat16+int4+block128"."""
    dtype, *parts = types.split("+")
    one_type = {name: None if name in NARROW_FIELDS else value for name, value in spec.canonical().items()}
    fields = {**one_type, "dtype": dtype}
    for part in parts:
        name = "kv_dtype" if part.startswith("kv_") else "scaling" if part in SCALINGS else "weight_dtype"
        fields[name] = part.removeprefix("kv_")
    if "module" in type(spec).model_fields and (fields.get("weight_dtype") or fields.get("scaling")):
        fields["module"] = True
    return TensorProgram.from_operator(make_operator({k: v for k, v in fields.items() if v is not None}))


@pytest.fixture(scope="module")
def answers(predictor: LatencyPredictor) -> dict[tuple[int, str, str], Prediction]:
    asked = {
        (i, dtype, protocol): Query(as_type(spec, dtype), device, protocol, framework)  # type: ignore[arg-type]
        for i, (spec, device, framework) in enumerate(cells())
        for dtype in DTYPES
        for protocol in PROTOCOLS
    }
    return dict(zip(asked, ask(predictor, list(asked.values())), strict=True))


def test_int8_is_not_slower_than_16_bit_types_where_its_peak_is_higher(
    predictor: LatencyPredictor, answers: dict[tuple[int, str, str], Prediction]
) -> None:
    evidence, compared = Evidence(predictor.artifact.domain.contexts), 0
    for i, (spec, name, framework) in enumerate(cells()):
        device = predictor.artifact.device(name)
        half = evidence.half_type(spec.operator, "library", "int8")
        trained = evidence.was_trained(QueryKind(device.name, spec.operator, "int8", "library"))
        if trained or device.peak("int8", matrix=True) <= device.peak(half, matrix=True):
            continue
        if getattr(as_type(spec, "int8").operator, "scaling", None) is not None:
            continue  # quantising costs time
        for protocol in PROTOCOLS:
            int8, other = answers[i, "int8", protocol].latency_s, answers[i, half, protocol].latency_s
            assert int8 is not None and other is not None and int8 <= other, (spec, name, framework, protocol)
            compared += 1
    assert compared > 100


def test_untrained_type_is_the_16_bit_prediction_times_the_roofline_ratio(predictor: LatencyPredictor) -> None:
    for text, half, types, device in (
        ("rmsnorm:rows=65536,cols=8192", "bfloat16", ("float32",), "a100-pcie-40gb"),
        ("softmax:rows=65536,cols=8192", "bfloat16", ("int8", "float16"), "l4"),
        ("gelu:rows=65536,cols=8192", "float16", ("int8", "bfloat16"), "a100-pcie-40gb"),
        ("attention_prefill:batch=8,q_len=4096,heads=32,kv_heads=32,head_dim=128", "float16", ("int8",), "b200"),
    ):
        for dtype in types:
            other, base = ask(
                predictor, [Query(TensorProgram.from_operator(f"{text},dtype={d}"), device) for d in (dtype, half)]
            )
            assert other.latency_s and base.latency_s and other.roofline_s and base.roofline_s
            assert other.latency_s / base.latency_s == pytest.approx(other.roofline_s / base.roofline_s, rel=0.03)
            assert other.domain != "in"
            assert other.domain_reason is not None and f"the {half} prediction" in other.domain_reason


def test_16_bit_convolution_without_16_bit_units_follows_float32(predictor: LatencyPredictor) -> None:
    text = "conv2d:n=12,c_in=256,h=14,w=14,c_out=256,kh=3,kw=3,pad_h=1,pad_w=1"
    programs = [TensorProgram.from_operator(f"{text},dtype={dtype}") for dtype in ("float16", "float32")]
    half, wide = ask(predictor, [Query(program, "titan-xp") for program in programs])
    assert half.latency_s and wide.latency_s and half.roofline_s and wide.roofline_s
    assert half.latency_s / wide.latency_s == pytest.approx(half.roofline_s / wide.roofline_s, rel=0.03)
    assert half.domain_reason is not None and "the float32 prediction" in half.domain_reason
    # Where the device has such units, or training had the type on it, the network answers.
    for name in ("v100-sxm2-32gb", "p100-pcie-16gb", "a100-sxm4-80gb"):
        (own,) = ask(predictor, [Query(programs[0], name)])
        assert own.domain_reason is None or "float32 prediction" not in own.domain_reason


def test_known_device_without_rows_of_an_operator_counts_as_unseen_for_it(predictor: LatencyPredictor) -> None:
    trained = lookup("rtx-3090")
    unseen = trained.model_copy(update={"name": "twin", "clock_hz": 1.0001 * trained.clock_hz})
    texts = ("relu:rows=65536,cols=4096", "linear:m=4096,n=4096,k=4096,dtype=bfloat16")
    programs = [TensorProgram.from_operator(text) for text in texts]
    relu, linear = (ask(predictor, [Query(program, device) for device in (trained, unseen)]) for program in programs)
    assert relu[0].latency_s == pytest.approx(relu[1].latency_s, rel=0.01)
    assert linear[0].latency_s != pytest.approx(linear[1].latency_s, rel=0.01)


def test_known_contradictory_predictions_agree(predictor: LatencyPredictor) -> None:
    softmax = TensorProgram.from_operator("softmax:rows=16384,cols=4096")
    kernel, eager = ask(predictor, [Query(softmax, "l4", p) for p in ("kernel", "eager")])  # type: ignore[arg-type]
    assert kernel.latency_s is not None and eager.latency_s is not None and kernel.latency_s <= eager.latency_s
    adjusted = "adjusted to the prediction of another protocol of softmax"
    assert [adjusted in (one.domain_reason or "") for one in (kernel, eager)].count(True) == 1
    int8, half = (f"linear:m=4096,n=4096,k=4096,dtype={dtype}" for dtype in ("int8", "float16"))
    fast, slow = ask(predictor, [Query(TensorProgram.from_operator(text), "h100-sxm") for text in (int8, half)])
    assert fast.latency_s is not None and slow.latency_s is not None and fast.latency_s <= slow.latency_s


@pytest.mark.slow
def test_trained_query_keeps_the_prediction_of_the_network(predictor: LatencyPredictor) -> None:
    keys = [c.split("|") for c in sorted(predictor.artifact.domain.contexts) if c.count("|") == 5]
    protocols: dict[tuple[str, ...], set[str]] = {}
    for device, operator, dtype, protocol, _, _ in keys:
        protocols.setdefault((device, operator, dtype), set()).add(protocol)
    shapes = {spec.operator: spec for spec in random_specs(200, seed=3)}
    queries = [
        Query(as_type(shapes[operator], dtype), device, protocol, framework or None)  # type: ignore[arg-type]
        for device, operator, dtype, protocol, backend, framework in keys
        if backend == "library"
        and f"{operator}|{dtype}|{framework}" not in predictor.artifact.domain.host_bound
        and not predictor.artifact.device(device).status
        # Measured protocols of one type limit each other.
        and len(protocols[device, operator, dtype]) == 1
    ]
    assert len(queries) > 200
    reasons = [p.domain_reason or "" for p in ask(predictor, queries)]
    assert not any(words in reason for reason in reasons for words in ("adjusted to", "capped at", "the ratio of"))
    # Sizes that training did not have may leave the physical bounds.
    assert sum("limited to" in reason for reason in reasons) < 0.1 * len(queries)


def test_features_in_bulk_get_the_same_predictions(predictor: LatencyPredictor) -> None:
    chosen = [
        Query(as_type(spec, dtype), device, protocol, framework)  # type: ignore[arg-type]
        for i, (spec, device, framework) in enumerate(cells())
        for dtype, protocol in ((DTYPES[i % 4], PROTOCOLS[i % 3]), ("int8", "kernel"))
    ][:120]
    parts = []
    for query in chosen:
        operator = query.program.operator
        assert isinstance(operator, OperatorSpec)
        [features] = encode_operators([operator])
        assert not isinstance(features, InvalidProgramError)
        parts.append(FeaturePart(features, operator.operator, query.device, "library", query.protocol, query.framework))
    rows = FeatureQueries.from_bytes(FeatureQueries.of(parts, quantiles=LEVELS).to_bytes())
    bulk, fresh = predictor.predict_features(rows), LatencyPredictor(predictor.artifact)
    for i, one in enumerate(ask(fresh, chosen)):
        assert (one.latency_s, one.lower_s, one.upper_s) == (bulk.latency_s[i], bulk.lower_s[i], bulk.upper_s[i])
        assert (one.domain, one.domain_score) == (bulk.labels[i], bulk.domain_score[i])
    without = replace(rows, structures=(), sizes=np.zeros((0, 0), dtype=np.int32))
    with pytest.raises(InvalidProgramError, match="16-bit form"):
        predictor.predict_features(without)


def test_cached_predictions_are_the_same(predictor: LatencyPredictor) -> None:
    queries = [Query(as_type(spec, "int8"), device) for spec, device, _ in list(cells())[:30]]
    fresh = LatencyPredictor(predictor.artifact)
    assert ask(fresh, queries) == ask(fresh, queries)
    # Each alone: a prediction does not depend on the batch that its companions were computed in.
    assert ask(fresh, queries)[:5] == [ask(LatencyPredictor(predictor.artifact), [q])[0] for q in queries[:5]]


def test_trained_protocol_ranks_first() -> None:
    contexts = [
        Context("t4", "linear", "float32", protocol, "library", launcher)
        for protocol, launcher in (("kernel", "vendor"), ("eager", "pytorch"))
    ]
    keys = {key for c in contexts for key in (*Context.keys(c), c.launch_key())}
    evidence = Evidence(keys)
    kernel, graph, eager = range(3)
    kind = QueryKind("t4", "linear", "float32", "library")
    assert evidence.protocol_order(kind, "vendor") == (kernel, eager, graph)
    assert evidence.protocol_order(kind, "pytorch") == (eager, kernel, graph)
    assert evidence.protocol_order(kind, "") == (kernel, eager, graph)
    assert needed((eager, kernel, graph), kernel) == (eager, kernel)
    assert needed((eager, kernel, graph), eager) == (eager,)
    assert needed((graph, kernel, eager), eager) == (graph, eager)
    assert evidence.follows(QueryKind("t4", "linear", "int8", "library"))
    assert not evidence.follows(kind)
    assert evidence.follows(QueryKind("t4", "embedding", "int8", "library"))
    assert not evidence.follows(QueryKind("t4", "embedding", "float32", "library"))
    adapted = Evidence(keys, [Context("t4", "linear", "int8", "kernel", "library")])
    assert not adapted.follows(QueryKind("t4", "linear", "int8", "library"))
    assert adapted.follows(QueryKind("l4", "linear", "int8", "library"))


def test_types_are_derived_from_the_16_bit_type_of_their_activations() -> None:
    trained = (("linear", "float16"), ("linear", "bfloat16"), ("rmsnorm", "float16"))
    contexts = [Context("t4", operator, dtype, "kernel", "library") for operator, dtype in trained]
    evidence = Evidence(key for context in contexts for key in Context.keys(context))
    halves = {
        "int8": "float16",
        "float32": "float16",
        "float8_e4m3": "bfloat16",
        "float4_e2m1+nvfp4": "bfloat16",
        "bfloat16+int4+block128": "bfloat16",
        "float16+float8_e4m3+tensor": "float16",
    }
    assert {dtype: evidence.half_type("linear", "library", dtype) for dtype in halves} == halves
    assert evidence.half_type("rmsnorm", "library", "float8_e4m3") == "float16"
    assert evidence.half_type("moe", "library", "float8_e4m3") == "float16"


def test_type_without_rows_follows_the_16_bit_type_of_more_devices() -> None:
    trained = (("t4", "float16"), ("a40", "bfloat16"), ("l4", "bfloat16"), ("l4", "float64"))
    contexts = [Context(device, "rmsnorm", dtype, "kernel", "library") for device, dtype in trained]
    evidence = Evidence(key for context in contexts for key in Context.keys(context))
    assert evidence.half_type("rmsnorm", "library", "float32") == "bfloat16"
    assert [evidence.half_type("rmsnorm", "library", dtype) for dtype in ("float64", "int8")] == ["float16"] * 2


def test_float32_norm_uses_about_the_bandwidth_of_the_measured_one(predictor: LatencyPredictor) -> None:
    queries = [
        Query(TensorProgram.from_operator(f"{operator}:rows=16384,cols=8192"), "h100-sxm")
        for operator in ("rmsnorm", "layernorm")
    ]
    norm, measured = ask(predictor, queries)
    assert norm.latency_s and measured.latency_s and measured.domain == "in"
    assert norm.latency_s == pytest.approx(measured.latency_s, rel=0.1)


def test_only_the_measured_framework_exempts_a_narrow_type() -> None:
    context = Context("h100-sxm", "linear", "float8_e4m3", "kernel", "library", "vendor")
    evidence = Evidence({*context.keys(), context.launch_key()})
    kind = QueryKind("h100-sxm", "linear", "float8_e4m3", "library")
    assert evidence.was_trained_as(kind, "kernel", "vendor")
    assert not evidence.was_trained_as(kind, "kernel", "")
    assert evidence.was_trained_as(kind, "eager", "vendor")
    assert not evidence.was_trained_as(kind._replace(dtype="int8"), "eager", "vendor")
    assert not evidence.was_trained_as(kind._replace(device="l4"), "kernel", "vendor")
    # A device that training did not have runs the same kernel.
    assert evidence.was_trained_as(kind._replace(device=""), "kernel", "vendor")
    assert not evidence.was_trained_as(kind._replace(device=""), "kernel", "vllm")
    assert not evidence.was_trained_as(kind._replace(device="", dtype="int8"), "kernel", "vendor")


def test_a_chain_is_ordered_and_keeps_what_comes_first() -> None:
    rng = np.random.default_rng(0)
    values = {p: Values(rng.normal(size=50), np.sort(rng.normal(size=(50, 9)), axis=1)) for p in range(3)}
    for order in ((0, 2, 1), (2, 0, 1), (1, 0, 2)):
        final = chain(order, values)
        np.testing.assert_array_equal(final[order[0]].point, values[order[0]].point)
        assert (final[0].point <= final[1].point).all() and (final[1].point <= final[2].point).all()
        assert (final[0].levels <= final[1].levels).all() and (final[1].levels <= final[2].levels).all()
        assert all((np.diff(value.levels, axis=1) >= 0).all() for value in final.values())


def test_the_reason_is_in_json_only_where_there_is_one(predictor: LatencyPredictor) -> None:
    trained, follows = predictor.predict(["linear:m=8,n=8,k=8,dtype=float16", "silu:rows=8,cols=8,dtype=int8"], "t4")
    assert "domain_reason" not in trained.to_dict()
    assert "16-bit" not in json.dumps(trained.to_dict())
    assert "ratio of the rooflines" in str(follows.to_dict()["domain_reason"])
    assert follows.latency_s is not None and math.isfinite(follows.latency_s)


def test_engine_whose_kernel_contradicts_a_sibling_is_left_out_on_that_device_alone() -> None:
    contexts: set[str] = set()
    for device, engine in (("h100-sxm", "vllm"), ("h100-sxm", "trtllm"), ("h200", "vllm")):
        context = Context(device, "moe", "float8_e4m3+tensor", "kernel", "library", engine)
        contexts |= {*context.keys(), context.launch_key()}
    evidence = Evidence(contexts, host_bound={"h100-sxm|moe|float8_e4m3+tensor|vllm"})
    kind = QueryKind("h100-sxm", "moe", "float8_e4m3+tensor", "library")
    assert evidence.measured_engine(kind, "vllm") == "trtllm"
    assert evidence.measured_engine(kind._replace(device="h200"), "vllm") == "vllm"


def test_two_devices_of_equal_figures_without_a_measurement_of_the_type_have_the_lower_prediction(
    predictor: LatencyPredictor,
) -> None:
    """Each was limited by the other from below too: an H100 took 1.6 ms, its twin 1.0 ms."""
    text = "add:rows=16384,cols=16384,dtype=float32"
    seconds = [predictor.predict([text], lookup(name), protocol="eager")[0].latency_s for name in ("h100-sxm", "h800")]
    assert max(seconds) == pytest.approx(min(seconds), rel=0.035)
    assert max(seconds) < 1.2e-3
