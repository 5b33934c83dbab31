"""Planners take predicted collectives wherever they take seconds: equal plans for equal costs, and messages."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from cdmpp import FieldError, LatencyPredictor, make_plan
from cdmpp.plan.afd.schema import AfdRequest
from cdmpp.plan.base.solve import predict_prices, read_request
from cdmpp.plan.precision.schema import PrecisionRequest
from cdmpp.plan.rl.check import check
from cdmpp.plan.rl.schema import RlRequest
from cdmpp.predict.requests.collective_forms import LINK_BYTES
from tests.fake_collectives import ALPHA_S, BYTES_PER_S, PROGRAM_S, RoundPredictor, collective, seconds

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
STAGE: dict[str, Any] = {"forward_s": 0.5, "backward_s": 1.0}
SIMULATE: dict[str, Any] = {"stages": [STAGE] * 3, "micro_batches": 4}
#: Sends of 99 MB: 0.1 s.
SEND, SEND_S = collective("send_recv", 99e6, 2), seconds(99e6)
#: Fields that differ between a plan on given and on predicted costs.
PROVENANCE = ("model_id", "domain", "reliability", "explanation", "interval", "cache", "summary")


def plan(kind: str, request: dict[str, Any], predictor: Any = None) -> dict[str, Any]:
    return make_plan(kind, request, predictor or RoundPredictor())


def same(kind: str, predicted: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The plan on predicted costs, which equals the plan on the same costs in seconds."""
    answer = plan(kind, predicted)
    assert answer["model_id"] == "round-numbers"
    expected = make_plan(kind, given)
    for name in PROVENANCE:
        expected.pop(name, None)
    assert {name: answer[name] for name in expected} == expected
    return answer


def refused(kind: str, request: dict[str, Any], message: str) -> str:
    with pytest.raises(FieldError, match=message) as caught:
        plan(kind, request)
    return str(caught.value.path)


def test_simulate_takes_predicted_transfers_and_gradient_sums() -> None:
    answer = same(
        "simulate",
        {**SIMULATE, "transfer": SEND, "gradient_sync": collective("all_reduce", 199e6)},
        {**SIMULATE, "transfer_s": SEND_S, "gradient_sync_s": seconds(199e6)},
    )
    assert answer["step_s"] == answer["makespan_s"] + 0.2
    lower, upper = (make_plan("simulate", {**SIMULATE, "transfer_s": f * SEND_S}) for f in (0.5, 2.0))
    assert answer["interval"] == {"lower_s": lower["makespan_s"], "upper_s": upper["makespan_s"]}
    assert any("transfer between stages" in line and "send_recv" in line for line in answer["explanation"])
    assert any("sum of the gradients" in line and "all_reduce" in line for line in answer["explanation"])


def test_simulate_takes_a_transfer_for_each_pair_of_stages() -> None:
    large = collective("send_recv", 299e6, 2)
    same("simulate", {**SIMULATE, "transfer": [SEND, large]}, {**SIMULATE, "transfer_s": [SEND_S, seconds(299e6)]})
    assert refused("simulate", {**SIMULATE, "transfer": [SEND]}, "1 values for 2 pairs") == "transfer"
    message = "either transfer or transfer_s"
    refused("simulate", {**SIMULATE, "transfer": SEND, "transfer_s": 1.0}, message)
    refused("simulate", {**SIMULATE, "gradient_sync": SEND, "gradient_sync_s": 1.0}, "either gradient_sync")


def test_stage_of_a_pipeline_may_contain_collectives() -> None:
    reduce = {"operator": "all_reduce", "bytes": 40_000_000, "ranks": 4}
    work = [{"program": "linear:m=64,n=64,k=64", "count": 3}, {"program": reduce, "count": 2}]
    forward = {"programs": work, "device": "h100-sxm"}
    stage_s = 3 * PROGRAM_S + 2 * seconds(40e6)
    given = {"models": [{"stages": 2, "micro_batches": 2, "forward_s": stage_s, "backward_s": 0.1}], "ranks": 2}
    predicted = copy.deepcopy(given)
    predicted["models"][0] |= {"forward_s": None, "forward": forward}
    settings = {"max_steps": 4}
    same("pipeline", predicted | settings, given | settings)


def test_modules_of_a_pipeline_may_contain_collectives() -> None:
    reduce = {"operator": "all_reduce", "bytes": "batch*1000000", "ranks": 2}
    sizes = [1, 4]
    forward = {"batch": sizes, "programs": [{"program": reduce}], "device": "h100-sxm"}
    backward = {"batch": sizes, "seconds": [0.1, 0.4]}
    given = {"batch": sizes, "seconds": [seconds(n * 1e6) for n in sizes]}
    common = {"ranks": 2, "batch": {"text": 4}, "max_steps": 4}

    def request(curve: dict[str, Any]) -> dict[str, Any]:
        return {"modules": [{"name": "text", "layers": 2, "cost": {"forward": curve, "backward": backward}}], **common}

    same("pipeline", request(forward), request(given))


def test_split_takes_predicted_transfers() -> None:
    layers = [{"forward_s": s, "backward_s": 2 * s, "transfer_s": SEND_S} for s in (0.1, 0.3, 0.2, 0.1)]
    predicted = [{**layer, "transfer_s": 0.0, "transfer": SEND} for layer in layers]
    # A layer whose passes are predicted too: prices of passes come first.
    work = {"programs": [{"program": "linear:m=64,n=64,k=64"}]}
    layers.append({"forward_s": PROGRAM_S, "backward_s": 0.1})
    predicted.append({"forward": work, "backward_s": 0.1})
    ranks = [{"device": "h100-sxm"}] * 3
    common = {"ranks": ranks, "micro_batches": 4, "goal": "step"}
    same("split", {"layers": predicted, **common}, {"layers": layers, **common})
    wrong = {"layers": [{**STAGE, "transfer": SEND, "transfer_s": 1.0}], "ranks": 1, "micro_batches": 1}
    refused("split", wrong, "either transfer or transfer_s")


def test_cluster_predicts_the_all_reduce_of_each_count() -> None:
    predictor = RoundPredictor()
    step = {"compute": 0.1, "samples": 8, "gradient_bytes": 99e6}
    job = {"name": "a", "workers": [1, 2, 8], "remaining_samples": 1e4}
    exchange = {"device": "h100-sxm", "library": "nccl", "ranks_per_node": 8}
    request = {"gpus": 8, "jobs": [{**job, "step": {**step, "all_reduce": exchange}}]}
    answer = plan("cluster", request, predictor)
    asked = [(c.ranks, c.bytes, c.library) for c in predictor.collectives()]
    assert asked == [(2, 99_000_000, "nccl"), (8, 99_000_000, "nccl")]
    rates = [8 / 0.1, 16 / (0.1 + SEND_S), 64 / (0.1 + SEND_S)]
    given = make_plan("cluster", {"gpus": 8, "jobs": [{**job, "samples_per_s": rates}]})
    assert answer["total_remaining_s"] == pytest.approx(given["total_remaining_s"])
    assert answer["jobs"] == given["jobs"]
    assert "a: the all-reduce between 8 workers takes 100 ms" in answer["explanation"]
    request["jobs"][0]["step"] |= {"bandwidth_bytes_per_s": 1e9}
    assert refused("cluster", request, "either bandwidth_bytes_per_s or all_reduce").startswith("jobs.0.step")
    request["jobs"][0]["step"] = {**step, "all_reduce": {**exchange, "link": "string"}}
    assert refused("cluster", request, "link 'string' is not known") == "jobs.0.step.all_reduce"


AFD: dict[str, Any] = {
    "layers": 10,
    "attention": {"layer": {"batch": [1, 4], "seconds": [1e-3, 2e-3]}, "instances": 4},
    "ffn": {"layer": {"batch": [1, 16], "seconds": [1e-3, 1.5e-3]}, "instances": 2},
    "tpot_s": 0.3,
}


def test_afd_link_is_a_curve_over_tokens() -> None:
    # There and back: 2 (1 ms + tokens x 1 kB / 1 GB/s), as a curve and as figures.
    work = [{"program": {"operator": "all_to_all", "bytes": "batch*1000", "ranks": 8}, "count": 2}]
    layer = {"batch": [1, 8, 16], "programs": work, "device": "h100-sxm"}
    figures = {"bytes_per_token": 1e3, "bandwidth_bytes_per_s": BYTES_PER_S, "alpha_s": ALPHA_S}
    answer, expected = plan("afd", {**AFD, "link": {"layer": layer}}), make_plan("afd", {**AFD, "link": figures})
    for name in ("attention_instances", "ffn_instances", "micro_batch"):
        assert answer[name] == expected[name]
    assert answer["stage_s"] == pytest.approx(expected["stage_s"])
    assert answer["price_s_per_token"] == pytest.approx(expected["price_s_per_token"])
    assert any("communication at its largest batch: all_to_all" in line for line in answer["explanation"])


def test_afd_link_that_falls_does_not_hide_the_best_choice() -> None:
    # Only 16 tokens on the FFN instance pass the link in time.
    curve = {"batch": [1, 15, 16], "seconds": [1.0, 1.0, 1e-6]}
    answer = make_plan("afd", {**AFD, "link": {"layer": curve}})
    assert answer["micro_batch"] == 16 and answer["ffn_instances"] == 1
    many = {**AFD, "link": {"layer": curve}, "attention": {**AFD["attention"], "instances": 200}}
    assert make_plan("afd", many)["stage_s"]["communication"] == pytest.approx(1e-5)


def test_afd_slow_link_curve_is_named_as_the_dead_zone() -> None:
    answer = make_plan("afd", {**AFD, "link": {"layer": {"batch": [1], "seconds": [9e-3]}}, "tpot_s": 9.0})
    assert answer["dead_zone"]
    assert any("in a layer would be fast enough" in line for line in answer["explanation"])


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ({}, "either bytes_per_token or layer"),
        ({"bytes_per_token": 1.0}, "either bandwidth_bytes_per_s or layer"),
        ({"layer": {"batch": [1], "seconds": [1.0]}, "alpha_s": 1e-5}, "either layer or alpha_s"),
        ({"layer": {"batch": [1], "seconds": [1.0]}, "bytes_per_token": 1.0}, "either bytes_per_token or layer"),
    ],
)
def test_afd_link_has_either_figures_or_a_curve(link: dict[str, Any], message: str) -> None:
    assert refused("afd", {**AFD, "link": link}, message).startswith("link")


def test_expert_parallel_example_is_answered_from_predictions(predictor: LatencyPredictor) -> None:
    request = json.loads((EXAMPLES / "afd_moe.json").read_text())
    answer = make_plan("afd", request, predictor)
    assert answer["tpot_s"] <= request["tpot_s"]
    text = "\n".join(answer["explanation"])
    assert "mla_decode" in text and "moe:" in text and "communication at its largest batch" in text
    forms = {item.program["operator"] for item in AfdRequest.model_validate(request).price_requests()}
    assert {"moe", "all_to_all", "mla_decode"} <= forms


RL: dict[str, Any] = {
    "lengths": {"quantiles": {"0.5": 100, "0.9": 300}, "max_tokens": 400},
    "samples_per_step": 16,
    "decode": {"a_s": 0.01, "b_s": 0.001},
    "pools": [
        {"name": "here", "units": 3, "site": "a", "stages": ["generation"]},
        {"name": "there", "units": 2, "site": "b", "stages": ["training"]},
    ],
    "training": {"seconds_per_sample": 0.2},
    "generation_units": 3,
    "layout": "separate",
    "draws": 2,
    "budget_s": 600,
}


def test_rl_takes_predicted_seconds_of_a_transfer() -> None:
    predicted = {**RL, "weights": {"cross_site": collective("send_recv", 499e6, 2)}}
    answer, given = plan("rl", predicted), make_plan("rl", {**RL, "weights": {"cross_site_s": 0.5}})
    assert answer["step_s"] == pytest.approx(given["step_s"])
    assert answer["step_lower_s"] < answer["step_s"] < answer["step_upper_s"]
    assert any("weights, cross_site" in line for line in answer["explanation"])
    both = {**RL, "weights": {"cross_site": SEND, "cross_site_s": 1.0}}
    assert refused("rl", both, "either cross_site or cross_site_s").startswith("weights")


def test_rl_predicts_copies_of_the_weights_over_links() -> None:
    predictor = RoundPredictor()
    near = {"collective": {"link": "nvlink4"}, "device": "h100-sxm"}
    far = {"collective": {"operator": "all_gather", "ranks": 4, "link": "ethernet-100g"}, "device": "h100-sxm"}
    weights = {"transfer": {"bytes": 4e9, "ranks": 4, "same_site": near, "cross_site": far}}
    request = {**RL, "weights": weights}
    answer = plan("rl", request, predictor)
    asked = {(c.operator, c.bytes, c.ranks, c.link) for c in predictor.collectives()}
    assert asked == {
        ("send_recv", 10**9, 2, "nvlink4"),
        ("send_recv", 1024, 2, "nvlink4"),
        ("all_gather", 10**9, 4, "ethernet-100g"),
        ("all_gather", 1024, 4, "ethernet-100g"),
    }
    # One copy travels; then it passes along the other two instances, and each further hop adds a short message.
    assert answer["streaming"]["weights_s"] == pytest.approx(2 * seconds(1e9) + seconds(1024))
    resolved = read_request(RlRequest, request)
    queries = resolved.price_requests()
    assert [query.path for query in queries] == ["weights.transfer.same_site.collective"] * 2 + [
        "weights.transfer.cross_site.collective"
    ] * 2
    assert resolved.sizes()["programs"] == 4
    assert check(resolved, answer, predict_prices(queries, RoundPredictor())) == []
    wrong = copy.deepcopy(answer)
    wrong["streaming"]["weights_s"] *= 1.5
    assert check(resolved, wrong, predict_prices(queries, RoundPredictor()))


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ({"collective": {}}, "either bandwidth_bytes_per_s or device"),
        ({"device": "t4"}, "either bandwidth_bytes_per_s or collective"),
        ({"collective": {}, "device": "t4", "latency_s": 1.0}, "either collective or latency_s"),
        ({"collective": {"operator": "broadcast"}, "device": "t4"}, "all_reduce"),
    ],
)
def test_rl_link_has_either_figures_or_a_collective(link: dict[str, Any], message: str) -> None:
    weights = {"transfer": {"bytes": 1e9, "same_site": link, "cross_site": {"bandwidth_bytes_per_s": 1e9}}}
    assert refused("rl", {**RL, "weights": weights}, message).startswith("weights.transfer.same_site")


DATA_PARALLEL: dict[str, Any] = {
    "layers": [{"name": "a", "forward": 0.1, "backward": 0.2, "gradient_bytes": [2.0**24, 2.0**26]}],
    "ranks": 8,
    "bucket_bytes": [2.0**20],
}


def test_data_parallel_takes_predicted_all_reduces() -> None:
    link = {"collective": {"ranks": 8, "operator": "all_reduce"}, "device": "h100-sxm"}
    table = [[2.0**p, seconds(2.0**p)] for p in range(10, 33, 2)]
    given = {**DATA_PARALLEL, "link": {"table": table}, "algorithm": "measured"}
    same("data-parallel", {**DATA_PARALLEL, "link": link}, given)
    answer = plan("data-parallel", {**DATA_PARALLEL, "link": link})
    assert answer["interval"]["lower_s"] < answer["iteration_s"] < answer["interval"]["upper_s"]
    link["collective"]["ranks"] = 4  # type: ignore[index]
    wrong = {**DATA_PARALLEL, "link": link}
    assert refused("data-parallel", wrong, "4 ranks, and the request has 8") == "link.collective.ranks"


def test_compress_and_precision_take_predicted_links() -> None:
    request = json.loads((EXAMPLES / "compress.json").read_text()) | {"max_steps": 50}
    request["link"] = {"collective": {"ranks": request["workers"]}, "device": "h100-sxm"}
    predictor = RoundPredictor()
    assert plan("compress", request, predictor)["model_id"] == "round-numbers"
    assert {c.operator for c in predictor.collectives()} >= {"all_reduce", "all_gather"}
    request["link"]["collective"]["ranks"] += 1
    assert refused("compress", request, "9 ranks") == "link.collective.ranks"
    request = json.loads((EXAMPLES / "precision.json").read_text()) | {"max_steps": 50}
    before = read_request(PrecisionRequest, request).sizes()["programs"]
    ranks = sum(device["workers"] for device in request["devices"])
    link = {"operator": "all_reduce", "ranks": ranks, "link": "ethernet-100g"}
    request["communication"]["link"] = {"collective": link, "device": "h100-sxm"}
    assert read_request(PrecisionRequest, request).sizes()["programs"] == before + len(LINK_BYTES)
    assert plan("precision", request)["model_id"] == "round-numbers"
    request["communication"]["link"]["collective"]["ranks"] = 3
    assert refused("precision", request, "the devices have 8 workers") == "communication.link.collective.ranks"


@pytest.mark.parametrize("kind", ["simulate", "data-parallel", "cluster", "rl"])
def test_shipped_model_prices_collectives(kind: str, predictor: LatencyPredictor) -> None:
    reduce = collective("all_reduce", 1e8)
    link = {"collective": {"operator": "all_reduce", "ranks": 8}, "device": "h100-sxm"}
    step = {"compute": 0.1, "samples": 8, "gradient_bytes": 99e6, "all_reduce": {"device": "h100-sxm"}}
    job = {"name": "a", "workers": [2, 8], "remaining_samples": 1e4, "step": step}
    requests: dict[str, dict[str, Any]] = {
        "simulate": {**SIMULATE, "gradient_sync": reduce, "transfer": collective("send_recv", 1e7, 2)},
        "data-parallel": {**DATA_PARALLEL, "link": link},
        "cluster": {"gpus": 8, "jobs": [job]},
        "rl": {**RL, "weights": {"cross_site": reduce}},
    }
    answer = make_plan(kind, requests[kind], predictor)
    assert answer["model_id"] == predictor.model_id
    if kind == "simulate":
        [alone] = predictor.predict(["all_reduce:bytes=100000000,ranks=8"], "h100-sxm")
        assert answer["step_s"] == answer["makespan_s"] + alone.latency_s
