"""Predictions keep to physics on every device of the table: more work, narrower types, protocols.

The cases are drawn with a seed: each device gets some of all pairs of operator and types, so that each pair comes up on
several devices. One call predicts all cases of a test. Bytes and ranks of collectives: tests/collectives.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cdmpp.devices import known
from cdmpp.model.domain.score import Context
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import make_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import PROTOCOLS
from tests.model.inference.test_consistency import ask

Fields = dict[str, Any]
DEVICES = known()
#: Predictions of the larger program below the interval of the smaller one: the interval covers 80 %, so the few pairs
#: in which the network's errors add up are allowed. Intervals that exclude each other by a tenth are not.
FASTER_SHARE, APART = 0.01, 0.9


def size(rng: np.random.Generator, low: int, high: int) -> int:
    """A power of two between 2^low and 2^high."""
    return int(2 ** rng.integers(low, high + 1))


def heads(rng: np.random.Generator) -> Fields:
    kv_heads = size(rng, 0, 3)
    return {"heads": kv_heads * size(rng, 0, 3), "kv_heads": kv_heads, "head_dim": 128}


def layer(rng: np.random.Generator) -> Fields:
    sizes = {"tokens": size(rng, 0, 13), "hidden": size(rng, 10, 12), "intermediate": size(rng, 9, 13)}
    split = {"experts": size(rng, 4, 8), "topk": size(rng, 0, 3), "tp": size(rng, 0, 2), "ep": size(rng, 0, 2)}
    return {**sizes, **split, "balance": str(rng.choice(["balanced", "power_law_1.2"]))}


def latent(rng: np.random.Generator, **sizes: int) -> Fields:
    return {**sizes, "past_len": size(rng, 6, 13), "heads": size(rng, 3, 7), "module": bool(rng.random() < 0.4)}


def table(rng: np.random.Generator, **further: int) -> Fields:
    return {"rows": size(rng, 0, 14), "cols": size(rng, 7, 13), **further}


#: Operator -> its sizes drawn at random, and the fields that mean more bytes or operations.
SIZES: dict[str, tuple[Callable[[np.random.Generator], Fields], tuple[str, ...]]] = {
    "linear": (lambda r: {"m": size(r, 0, 13), "n": size(r, 7, 13), "k": size(r, 7, 13)}, ("m", "n", "k")),
    "bmm": (
        lambda r: {"batch": size(r, 0, 6), "m": size(r, 4, 11), "n": size(r, 5, 11), "k": size(r, 5, 11)},
        ("batch", "m", "n", "k"),
    ),
    "moe": (layer, ("tokens", "hidden", "intermediate", "topk")),
    "moe_w13": (layer, ("tokens", "hidden", "intermediate", "topk")),
    "grouped_gemm": (
        lambda r: {"groups": size(r, 0, 7), "rows": size(r, 7, 14), "n": size(r, 8, 12), "k": size(r, 8, 12)},
        ("rows", "n", "k"),
    ),
    "mla_prefill": (
        lambda r: latent(r, batch=size(r, 0, 3), q_len=size(r, 4, 12)),
        ("batch", "q_len", "past_len", "heads"),
    ),
    "mla_decode": (lambda r: latent(r, batch=size(r, 0, 8)), ("batch", "past_len", "heads")),
    "attention_mixed": (
        lambda r: {
            "q_len": size(r, 4, 11),
            "past_len": size(r, 4, 12),
            "decodes": size(r, 0, 7),
            "decode_past_len": size(r, 6, 13),
            **heads(r),
        },
        ("q_len", "past_len", "decodes", "decode_past_len", "heads"),
    ),
    "attention_decode": (
        lambda r: {"batch": size(r, 0, 8), "past_len": size(r, 6, 14), **heads(r)},
        ("batch", "past_len", "heads"),
    ),
    "attention_prefill": (
        lambda r: {"batch": size(r, 0, 4), "q_len": size(r, 4, 12), **heads(r)},
        ("batch", "q_len", "heads"),
    ),
    "rotary_embedding": (partial(table, head_dim=128), ("rows", "cols")),
    "kv_cache_save": (table, ("rows", "cols")),
    "moe_gating": (lambda r: {"rows": size(r, 0, 14), "cols": size(r, 4, 9), "topk": size(r, 0, 3)}, ("rows", "cols")),
    "moe_shuffle": (partial(table, topk=2), ("rows", "cols", "topk")),
    "argmax": (table, ("rows", "cols")),
}
#: Types as "dtype/weight_dtype/scaling" or "dtype/kv_dtype"; "-": not stated.
PRODUCTS = (
    *("bfloat16", "float8_e4m3/-/tensor", "float8_e4m3/-/channel", "float8_e4m3/-/block128", "float8_e4m3/-/mx32"),
    *("float4_e2m1/-/nvfp4", "float4_e2m1/-/mx32", "int8/-/channel", "bfloat16/int8/channel", "bfloat16/int4/block128"),
    "bfloat16/float4_e2m1/mx32",
)
BARE = ("float8_e4m3", "float4_e2m1", "int8", "float64", "tfloat32")
EXPERTS = ("float8_e4m3/int4/block128", "float8_e4m3/float4_e2m1/mx32")
CACHED = ("bfloat16", "bfloat16/float8_e4m3", "float8_e4m3")


def types_of(operator: str) -> Iterator[Fields]:
    """Fields of the element types that the cases of an operator have."""
    if operator.startswith(("mla", "attention")):
        yield from (dict(zip(("dtype", "kv_dtype"), text.split("/"), strict=False)) for text in CACHED)
    elif SIZES[operator][0] is layer or operator in ("linear", "bmm", "grouped_gemm"):
        for text in PRODUCTS + (BARE if operator in ("linear", "bmm") else EXPERTS):
            fields = dict(zip(("dtype", "weight_dtype", "scaling"), text.split("/"), strict=False))
            yield {name: value for name, value in fields.items() if value != "-"}
    else:
        yield from ({"dtype": dtype} for dtype in ("bfloat16", "float16"))


def cases(each: int, seed: int) -> Iterator[tuple[str, Fields]]:
    """Devices and programs: ``each`` pairs of operator and types on every device."""
    kinds = [(operator, types) for operator in SIZES for types in types_of(operator)]
    for device in DEVICES:
        rng = np.random.default_rng([seed, *device.name.encode()])  # a new device leaves those of others as they are
        for kind in rng.integers(0, len(kinds), each):
            operator, types = kinds[kind]
            yield device.name, {"operator": operator, **types, **SIZES[operator][0](rng)}


def query(fields: Fields, device: str, protocol: str = "kernel") -> Query:
    return Query(TensorProgram.from_operator(make_operator(fields)), device, protocol)  # type: ignore[arg-type]


def latency(prediction: Prediction) -> float:
    assert prediction.latency_s is not None
    return prediction.latency_s


@pytest.mark.slow
def test_more_work_is_not_faster_beyond_the_interval(predictor: LatencyPredictor) -> None:
    queries, pairs = list[Query](), list[tuple[int, int, str]]()
    for turn, (device, fields) in enumerate(cases(2, seed=1)):
        protocol = PROTOCOLS[turn % len(PROTOCOLS)]
        small = len(queries)
        queries.append(query(fields, device, protocol))
        for name in SIZES[fields["operator"]][1]:
            pairs.append((small, len(queries), f"{name} of {fields} on {device}, {protocol}"))
            queries.append(query({**fields, name: 2 * fields[name]}, device, protocol))
    predictions = ask(predictor, queries)
    faster = []
    for small, large, text in pairs:
        less, more = predictions[small], predictions[large]
        assert less.lower_s is not None and more.upper_s is not None
        assert more.upper_s >= APART * less.lower_s, text
        if latency(more) < less.lower_s:
            faster.append((latency(more) / latency(less), text))
    assert len(pairs) > 600
    assert len(faster) <= FASTER_SHARE * len(pairs), sorted(faster)


def test_wider_weights_are_not_faster_beyond_the_interval(predictor: LatencyPredictor) -> None:
    """A few tokens read the weights from memory: int8 weights are twice the bytes of int4 weights."""
    fields = {"operator": "linear", "m": 16, "n": 8192, "k": 4096, "dtype": "bfloat16"}
    weights = ({"weight_dtype": "int4", "scaling": "block128"}, {"weight_dtype": "int8", "scaling": "channel"})
    predictions = ask(predictor, [query({**fields, **types}, device.name) for device in DEVICES for types in weights])
    for device, narrow, wide in zip(DEVICES, predictions[::2], predictions[1::2], strict=True):
        assert narrow.lower_s is not None and latency(wide) >= narrow.lower_s, device.name


@pytest.mark.parametrize(
    ("dtype", "half"), [("float8_e4m3", "bfloat16"), ("float4_e2m1", "bfloat16"), ("int8", "float16")]
)
def test_bare_narrow_products_are_not_slower_where_their_peak_is_higher(
    predictor: LatencyPredictor, dtype: str, half: str
) -> None:
    queries, texts = list[Query](), list[str]()
    products: tuple[Fields, ...] = (
        {"operator": "linear", "m": 1, "n": 4096, "k": 4096},
        {"operator": "linear", "m": 256, "n": 1024, "k": 2048},
        {"operator": "linear", "m": 8192, "n": 8192, "k": 8192},
        {"operator": "bmm", "batch": 16, "m": 512, "n": 512, "k": 128},
    )
    for turn, device in enumerate(DEVICES):
        if device.peak(dtype, matrix=True) <= device.peak(half, matrix=True):
            continue
        for number, fields in enumerate(products):
            protocol = PROTOCOLS[(turn + number) % len(PROTOCOLS)]
            queries += [query({**fields, "dtype": name}, device.name, protocol) for name in (dtype, half)]
            texts.append(f"{fields} on {device.name}, {protocol}")
    predictions = ask(predictor, queries)
    for narrow, wide, text in zip(predictions[::2], predictions[1::2], texts, strict=True):
        assert latency(narrow) <= latency(wide), text
    assert len(texts) > 100


def test_measured_narrow_type_is_ordered_by_peak_unless_its_framework_is_stated(predictor: LatencyPredictor) -> None:
    """A model whose training had bare fp8 products of one framework; its network makes some of them slow."""
    base, measured = predictor.artifact, Context("l40s", "linear", "float8_e4m3", "kernel", "library", "vendor")
    contexts = base.domain.contexts | {*Context.keys(measured), measured.launch_key()}
    trained = LatencyPredictor(replace(base, domain=replace(base.domain, contexts=contexts)))
    sizes = [(m, n, k) for m in (1, 64, 1024) for n in (512, 4096) for k in (512, 4096)]
    queries = [
        Query(
            TensorProgram.from_operator(f"linear:m={m},n={n},k={k},dtype={dtype}"),
            "l40s",
            framework=framework,  # type: ignore[arg-type]
        )
        for m, n, k in sizes
        for framework in (None, "vendor")
        for dtype in ("float8_e4m3", "bfloat16")
    ]
    narrow, wide, stated, _ = (ask(trained, queries)[start::4] for start in range(4))
    assert all(latency(n) <= latency(w) for n, w in zip(narrow, wide, strict=True))
    assert [prediction.domain_reason for prediction in stated] == [None] * len(sizes)


def test_kernel_is_not_longer_than_graph_and_graph_not_longer_than_eager(predictor: LatencyPredictor) -> None:
    chosen = list(cases(1, seed=2))
    predictions = ask(predictor, [query(fields, device, p) for device, fields in chosen for p in PROTOCOLS])
    for number, case in enumerate(chosen):
        row = predictions[number * len(PROTOCOLS) : (number + 1) * len(PROTOCOLS)]
        for figure in ("latency_s", "lower_s", "upper_s"):
            values = [getattr(prediction, figure) for prediction in row]
            assert values == sorted(values), (case, figure)
        levels = [list(prediction.quantiles.values()) for prediction in row]
        assert (np.diff(levels, axis=0) >= 0).all(), case


def test_predictions_are_positive_and_inside_their_interval_on_every_device(predictor: LatencyPredictor) -> None:
    for prediction in ask(predictor, [query(fields, device) for device, fields in cases(1, seed=3)]):
        assert prediction.lower_s is not None and prediction.upper_s is not None
        assert 0 < prediction.lower_s < latency(prediction) < prediction.upper_s
        assert prediction.roofline_s is not None and 0 < prediction.roofline_s < np.inf
