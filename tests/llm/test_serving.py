"""Serving, simulated: against steps of the estimate, limits of queues, and the order of requests."""

import json
from typing import Any

import numpy as np
import pytest

import cdmpp
from cdmpp.devices import lookup
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.llm import ServingResult, estimate, goodput, read_config, simulate
from cdmpp.llm.engines import EngineProfile, load_engine
from cdmpp.llm.layout import Layout, Types
from cdmpp.llm.memory import cache_tokens, memory_of
from cdmpp.llm.serving.load import share_met
from cdmpp.predict.predictor import LatencyPredictor
from tests.llm.test_read_config import EXAMPLES

LLAMA = read_config(EXAMPLES / "llama-3.1-8b.json")
H100 = "h100-sxm"


def served(predictor: LatencyPredictor, **options: Any) -> ServingResult:
    return simulate(LLAMA, options.pop("device", H100), predictor=predictor, **options)


def test_one_request_takes_what_the_estimate_says(predictor: LatencyPredictor) -> None:
    result = served(predictor, requests=[(3.0, 1000, 200)])
    expected = estimate(LLAMA, H100, input=1000, output=200, predictor=predictor)
    assert expected.tpot is not None
    assert result.ttft_s[0] == pytest.approx(expected.ttft.point, rel=0.03)
    assert result.tpot_s[0] == pytest.approx(expected.tpot.point, rel=0.03)
    assert result.latency_s[0] == pytest.approx(result.ttft_s[0] + 199 * result.tpot_s[0])
    assert (result.steps, result.preemptions, result.output_tokens) == (200, 0, 200)
    assert result.queue_s[0] == pytest.approx(0, abs=1e-12)
    assert result.relative_lower < 1 < result.relative_upper


def test_requests_that_come_together_share_their_steps(predictor: LatencyPredictor) -> None:
    together = served(predictor, requests=[(0, 256, 100)] * 16)
    expected = estimate(LLAMA, H100, batch=16, input=256, output=100, predictor=predictor)
    assert expected.tpot is not None
    assert together.ttft_s == pytest.approx(expected.ttft.point, rel=0.05)
    assert together.tpot_s == pytest.approx(expected.tpot.point, rel=0.05)
    apart = served(predictor, requests=[(100.0 * i, 256, 100) for i in range(16)])
    assert apart.steps == 16 * together.steps and apart.tpot_s.max() < together.tpot_s.min()


@pytest.mark.slow
def test_little_and_order(predictor: LatencyPredictor) -> None:
    closed = served(predictor, concurrency=16, input=512, output=128, count=160)
    # Requests in flight = rate x time in the system.
    assert 160 / closed.duration_s * closed.latency_s.mean() == pytest.approx(16, rel=0.1)
    rates = [served(predictor, rate=rate, input=512, output=64, count=200, seed=1) for rate in (1.0, 10.0, 1000.0)]
    assert [r.queue_s.mean() for r in rates] == sorted(r.queue_s.mean() for r in rates)
    assert rates[0].tpot_s.mean() < rates[1].tpot_s.mean() < rates[2].tpot_s.mean()
    assert rates[0].duration_s == pytest.approx(200, rel=0.3)
    assert served(predictor, rate=10.0, input=512, output=64, count=200, seed=1).to_dict() == rates[1].to_dict()
    # Arrivals in any order are answered in the order of the request.
    mixed = served(predictor, requests=[(5.0, 2000, 3), (0.0, 10, 1), (1.0, 100, 400)])
    assert mixed.single_token == 1 and len(mixed.tpot_s) == 2 and mixed.latency_s[1] == mixed.ttft_s[1]
    assert mixed.ttft_s[0] > mixed.ttft_s[1]


def test_a_full_cache_delays_and_repeats_but_loses_nothing(predictor: LatencyPredictor) -> None:
    small = lookup(H100).model_copy(update={"name": "small", "memory_bytes": 22e9})
    profile = load_engine("vllm")
    tokens = cache_tokens(LLAMA, Layout(), Types(), small.memory_bytes, profile.cache_share, 1500)
    tight = served(predictor, device=small, concurrency=32, input=500, output=1000, count=64)
    wide = served(predictor, concurrency=32, input=500, output=1000, count=64)
    assert 1500 < tokens < 32 * 1500
    assert tight.preemptions > 0 and 0.9 < tight.cache_share <= 1.01 and wide.preemptions == 0
    assert tight.duration_s > wide.duration_s and tight.output_tokens == pytest.approx(wide.output_tokens)
    assert len(tight.ttft_s) == 64 and np.isfinite(tight.latency_s).all() and (tight.ttft_s > 0).all()
    with pytest.raises(InfeasibleError, match=r"holds .* tokens, a request has"):
        served(predictor, device=small, requests=[(0, 100_000, 10)])


def test_engines_schedule_as_they_do(predictor: LatencyPredictor) -> None:
    first = EngineProfile(name="first", framework="vllm", graph_prefill=True, token_budget=512, prefill_first=True)
    mixed = first.model_copy(update={"name": "mixed", "prefill_first": False})
    requests = [(0.0, 64, 400), *[(0.2 + 0.05 * i, 4000, 2) for i in range(6)]]
    alone, beside = (served(predictor, engine=engine, requests=requests) for engine in (first, mixed))
    # Long prompts stop the others where they run alone, and take longer where they do not.
    assert alone.tpot_s[0] > beside.tpot_s[0]
    assert alone.ttft_s[1:].mean() < beside.ttft_s[1:].mean()
    few = first.model_copy(update={"max_sequences": 4})
    assert served(predictor, engine=few, concurrency=16, count=16).queue_s.max() > 0
    # A prompt that is in the cache already is computed no more.
    hit, miss = (served(predictor, rate=5.0, input=4000, output=8, count=50, prefix_hit=h) for h in (0.9, 0.0))
    assert hit.ttft_s.mean() < 0.5 * miss.ttft_s.mean()


def test_replicas_share_the_requests(predictor: LatencyPredictor) -> None:
    one, four = (served(predictor, rate=40.0, count=300, output=64, dp=dp) for dp in (1, 4))
    assert (one.gpus, four.gpus) == (1, 4)
    assert four.ttft_s.mean() < one.ttft_s.mean() and four.tpot_s.mean() < one.tpot_s.mean()
    staged = served(predictor, concurrency=8, count=16, output=16, pp=2)
    assert staged.gpus == 2 and np.isfinite(staged.latency_s).all()


@pytest.mark.slow
def test_drafted_tokens_shorten_decoding_as_in_an_estimate(predictor: LatencyPredictor) -> None:
    load: dict[str, Any] = {"input": 512, "output": 400, "mtp": 2, "acceptance": 0.5}
    alone = estimate(LLAMA, H100, batch=8, predictor=predictor, **load)
    together = served(predictor, requests=[(0.0, 512, 400)] * 8, mtp=2, acceptance=0.5)
    assert alone.tpot is not None
    assert together.tpot_s.mean() == pytest.approx(alone.tpot.point, rel=0.03)
    plain, rejected, accepted = (
        served(predictor, rate=20.0, count=300, input=512, output=64, **drafts)
        for drafts in ({}, {"mtp": 1, "acceptance": 0.0}, {"mtp": 1, "acceptance": 1.0})
    )
    # Tokens that are never right only cost time, in mixed steps too.
    assert rejected.tpot_s.mean() > plain.tpot_s.mean() > 1.5 * accepted.tpot_s.mean()
    assert accepted.output_tokens == plain.output_tokens and accepted.steps < plain.steps
    with pytest.raises(FieldError, match="acceptance: '2' is not allowed"):
        served(predictor, concurrency=1, acceptance=2)


@pytest.mark.slow
def test_prompts_in_a_pool_of_their_own(predictor: LatencyPredictor) -> None:
    load: dict[str, Any] = {"requests": [(0.3 * i, 4000, 100) for i in range(20)]}
    pool = {"tp": 2, "dp": 2, "bytes_per_s": 25e9}
    apart, slow, together = (
        served(predictor, **load, **options)
        for options in ({"prefill_pool": pool}, {"prefill_pool": {**pool, "bytes_per_s": 1e9}}, {"dp": 5})
    )
    assert apart.gpus == together.gpus == 5
    # Nothing interrupts decoding: a token takes what it takes in an estimate, beside the transfer before the second.
    alone = estimate(LLAMA, H100, batch=1, input=4000, output=100, predictor=predictor)
    assert alone.tpot is not None
    cache_bytes = 4000 * 2 * 32 * 8 * 128 * 2
    assert apart.tpot_s[0] * 99 == pytest.approx(alone.tpot.point * 99 + cache_bytes / 25e9, rel=0.03)
    assert (slow.latency_s - apart.latency_s)[0] == pytest.approx(cache_bytes * (1 / 1e9 - 1 / 25e9), rel=0.05)
    assert slow.ttft_s == pytest.approx(apart.ttft_s)
    prompts = served(predictor, tp=2, dp=2, requests=[(at, tokens, 1) for at, tokens, _ in load["requests"]])
    assert apart.ttft_s == pytest.approx(prompts.ttft_s)
    closed = served(predictor, concurrency=8, input=2000, output=50, count=40, prefill_pool=pool)
    assert 40 / closed.duration_s * closed.latency_s.mean() == pytest.approx(8, rel=0.15)
    with pytest.raises(FieldError, match="prefill_pool: 'tq' is not known"):
        served(predictor, concurrency=8, prefill_pool={"tq": 2})


def test_percentiles_and_json(predictor: LatencyPredictor) -> None:
    result = cdmpp.llm.simulate(LLAMA, H100, rate=2.0, count=50, output=8, predictor=predictor)
    assert (
        result.percentile("ttft_s", 0) == result.ttft_s.min()
        and result.percentile("ttft_s", 100) == result.ttft_s.max()
    )
    value = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert value["ttft_s"]["p50"] == result.percentile("ttft_s", 50) and value["requests"] == 50
    single = simulate(LLAMA, H100, requests=[(0, 10, 1)], predictor=predictor)
    assert single.to_dict()["tpot_s"] is None
    with pytest.raises(FieldError, match="all requests have one token"):
        single.percentile("tpot_s", 50)
    with pytest.raises(FieldError, match="'speed' is not known"):
        result.percentile("speed", 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "none of requests, concurrency and rate"),
        ({"rate": 1.0, "concurrency": 2}, "concurrency and rate of requests"),
        ({"rate": 1e-320}, "rate: '1e-320' is not allowed"),
        ({"concurrency": 1.5}, "concurrency: '1.5' is not allowed"),
        ({"requests": [(0, 10, 0)]}, r"requests.0: \(0, 10, 0\) is no request"),
        ({"requests": [(-1, 10, 1)]}, "is no request"),
        ({"requests": [(float("nan"), 10, 1)]}, "is no request"),
        ({"requests": []}, "requests: 0"),
        ({"rate": 1.0, "prefix_hit": 1.0}, "prefix_hit: '1.0' is not allowed"),
        ({"rate": 1.0, "count": 0}, "count: '0' is not allowed"),
    ],
)
def test_impossible_loads_are_errors(options: dict[str, Any], message: str, predictor: LatencyPredictor) -> None:
    with pytest.raises(FieldError, match=message):
        served(predictor, **options)


def test_first_burst_of_a_closed_loop_is_left_out(predictor: LatencyPredictor) -> None:
    load: dict[str, Any] = {"concurrency": 32, "input": 1024, "output": 1024}
    result, whole = (served(predictor, **load, **options) for options in ({}, {"warmup": 0}))
    assert (result.warmup, whole.warmup, len(result.ttft_s)) == (32, 0, 256)
    # Prompts that all begin together wait for each other; later ones come one by one.
    assert result.percentile("ttft_s", 99) < 0.5 * whole.percentile("ttft_s", 99)
    value = result.to_dict()
    for name in ("ttft_s", "tpot_s", "latency_s", "queue_s"):
        later = getattr(result, name)[32:]
        assert value[name]["p99"] == np.percentile(later, 99) and value[name]["mean"] == later.mean()
    first = value["warmup_ttft_s"]
    assert value["warmup_requests"] == 32 and first["mean"] == result.ttft_s[:32].mean() > 5 * value["ttft_s"]["mean"]
    assert (whole.to_dict()["warmup_requests"], whole.to_dict()["warmup_ttft_s"]) == (0, None)
    assert "warm-up: the first 32 requests" in str(result) and "warm-up" not in str(whole)
    # Goals count the same requests.
    goal = float(result.ttft_s[32:].max())
    assert share_met(result, goal, None) == 1.0 > share_met(whole, goal, None)
    assert served(predictor, rate=5.0, count=20, output=4).warmup == 0
    assert served(predictor, rate=5.0, count=20, output=4, warmup=7).warmup == 7


def test_requests_all_count_where_there_are_no_more_than_the_first_ones(predictor: LatencyPredictor) -> None:
    few = served(predictor, concurrency=16, count=16, output=4)
    assert few.warmup == 0 and "no warm-up is left out: 16 requests, 16 in flight" in few.remarks
    one = served(predictor, concurrency=1, count=2, output=4)
    assert one.warmup == 1 and not one.remarks
    mixed = served(predictor, concurrency=3, count=6, input=20, output=1, warmup=3)
    assert mixed.to_dict()["tpot_s"] is None and "-" in str(mixed)
    for warmup in (6, -1, 1.5, True):
        with pytest.raises(FieldError, match=r"warmup: .* is not allowed"):
            served(predictor, concurrency=3, count=6, warmup=warmup)


def test_requests_in_lockstep_are_said(predictor: LatencyPredictor) -> None:
    load: dict[str, Any] = {"concurrency": 16, "output": 64, "engine": "sglang"}
    together, apart = (served(predictor, **load, **options) for options in ({}, {"spread": 0.1}))
    assert "spread" in together.remarks[0] and together.to_dict()["remarks"] == list(together.remarks)
    assert not apart.remarks and not served(predictor, concurrency=16, output=64).remarks
    assert apart.percentile("ttft_s", 50) < together.percentile("ttft_s", 50)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "layout", "least"),
    [("llama-3.1-70b", H100, {}, 2), ("llama-3.1-70b", "t4", {"tp": 2}, 12), ("qwen3-30b-a3b", "l4", {"ep": 1}, 4)],
)
def test_loads_that_do_not_fit_name_device_weights_and_devices_needed(
    name: str, device: str, layout: dict[str, int], least: int, predictor: LatencyPredictor
) -> None:
    config = read_config(EXAMPLES / f"{name}.json")
    load: dict[str, Any] = {"concurrency": 4, "output": 64, "predictor": predictor}
    with pytest.raises(InfeasibleError) as caught:
        simulate(config, device, **load, **layout)
    weights = memory_of(config, Layout(**layout), Types(), 1, 1).weights / 1e9
    for part in (
        f"on each {device} with tp=",
        f"weights take {weights:.1f} GB",
        f"at least {least} devices are needed",
    ):
        assert part in caught.value.message
    # The number is right: the hint's layout holds it.
    found = dict(part.split("=") for part in caught.value.hint.partition(": ")[2].split(", "))
    fitting = {key: int(value) for key, value in found.items()}
    assert simulate(config, device, **load, **fitting, count=4).gpus == least
    with pytest.raises(InfeasibleError, match=r"at least .* devices are needed"):
        goodput(config, device, ttft_s=1.0, predictor=predictor, **layout)


def test_decode_steps_that_are_no_graphs_are_launched(predictor: LatencyPredictor) -> None:
    options: dict[str, Any] = {"engine": "kernels-only", "cuda_graph": False}
    alone = estimate(LLAMA, "b200", input=64, output=32, predictor=predictor, **options)
    launched, captured = (
        served(predictor, device="b200", requests=[(0.0, 64, 32)], **{**options, "cuda_graph": graph})
        for graph in (False, True)
    )
    assert alone.tpot is not None
    assert launched.tpot_s[0] == pytest.approx(alone.tpot.point, rel=0.03) and launched.tpot_s[0] > captured.tpot_s[0]
    profile = served(predictor, requests=[(0.0, 64, 4)], framework="sglang")
    assert profile.engine == "sglang"


def test_goal_between_tokens_needs_a_second_token(predictor: LatencyPredictor) -> None:
    with pytest.raises(FieldError, match="tpot_s: no request has a second token"):
        goodput(LLAMA, H100, tpot_s=0.02, output=1, count=8, predictor=predictor)


def test_error_of_a_prefill_pool_names_it(predictor: LatencyPredictor) -> None:
    config = read_config(EXAMPLES / "llama-3.1-70b.json")
    load: dict[str, Any] = {"rate": 1.0, "count": 4, "output": 4, "predictor": predictor}
    with pytest.raises(InfeasibleError, match="prefill_pool: the cache of a replica"):
        simulate(config, H100, tp=4, prefill_pool={"tp": 1}, **load)


def test_new_request_waits_for_front_end_and_steps_in_flight(predictor: LatencyPredictor) -> None:
    base = load_engine("vllm")
    none = base.model_copy(update={"schedules_ahead": False, "host": base.host.model_copy(update={"frontend_s": 0.0})})
    slow = none.model_copy(update={"host": base.host.model_copy(update={"frontend_s": 0.05})})
    load: dict[str, Any] = {"requests": [(0.0, 64, 2000), *[(1.0 + 0.0337 * i, 64, 2) for i in range(40)]]}
    now, ahead, late = (
        served(predictor, engine=engine, **load)
        for engine in (none, none.model_copy(update={"schedules_ahead": True}), slow)
    )
    step_s = now.tpot_s[0]
    waits = [result.ttft_s[1:].mean() - now.ttft_s[1:].mean() for result in (ahead, late)]
    assert waits[0] == pytest.approx(step_s, rel=0.1)
    assert waits[1] == pytest.approx(0.05, rel=0.1)


def test_intervals_hold_the_means_and_grow_with_the_residual(predictor: LatencyPredictor) -> None:
    sure = load_engine("vllm").model_copy(update={"residual": 0.05, "first_residual": 0.0})
    unsure = sure.model_copy(update={"residual": 0.3, "first_residual": 0.5})
    narrow, wide = (served(predictor, engine=e, rate=4.0, count=100, output=64) for e in (sure, unsure))
    for name, figure in {
        **{name: narrow.measured(name).mean() for name in ("ttft_s", "tpot_s", "latency_s")},
        "throughput_tokens_per_s": narrow.throughput_tokens_per_s,
    }.items():
        (low, high), (lower, upper) = narrow.bounds[name], wide.bounds[name]
        assert lower <= low <= figure <= high <= upper and lower < upper
    assert narrow.to_dict()["domain"] in ("in", "near", "out")
