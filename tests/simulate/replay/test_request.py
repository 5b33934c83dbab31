"""Replay requests: hand-computed plans, predicted nodes, intervals, what-ifs, and refused requests."""

import gc
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from cdmpp import FieldError, LatencyPredictor, make_plan
from cdmpp.plan.base.solve import read_request
from cdmpp.simulate.replay import solver
from cdmpp.simulate.replay.schema import ReplayPlan, ReplayRequest

EXAMPLE = Path(__file__).parents[3] / "docs/examples/replay.json"
LINEAR = {"operator": "linear", "m": 512, "n": 512, "k": 512}
SOFTMAX = {"operator": "softmax", "rows": 4096, "cols": 512}
#: Two ranks: compute, then a ring all-reduce of 8 MB over 1 GB/s with 1 ms of latency: 2 (1 ms + 4 ms).
TWO_RANKS: dict[str, Any] = {
    "nodes": [
        {"id": "a0", "device": "r0", "duration_s": 0.010},
        {"id": "a1", "device": "r1", "duration_s": 0.030},
        {"id": "b0", "device": "r0", "duration_s": 0.035, "deps": ["a0"]},
        {
            "id": "reduce",
            "collective": {"op": "all_reduce", "ranks": ["r0", "r1"], "bytes": 8e6, "link": "net"},
            "deps": ["a0", "a1"],
        },
        {"id": "end0", "device": "r0", "duration_s": 0.005, "deps": ["reduce", "b0"]},
        {"id": "end1", "device": "r1", "duration_s": 0.005, "deps": ["reduce"]},
    ],
    "links": {"net": {"alpha_s": 1e-3, "bandwidth_bytes_per_s": 1e9}},
}


def plan_of(request: dict[str, Any], predictor: LatencyPredictor | None = None) -> dict[str, Any]:
    answer = make_plan("replay", request, predictor)
    ReplayPlan.model_validate(answer)
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    return answer


def test_two_ranks_equal_hand_computed_times() -> None:
    answer = plan_of({**TWO_RANKS, "trace": True})
    assert {node["id"]: (node["start_s"], node["end_s"]) for node in answer["timeline"]} == {
        "a0": (0.0, 0.010),
        "a1": (0.0, 0.030),
        "b0": (0.010, pytest.approx(0.045)),
        "reduce": (0.030, pytest.approx(0.040)),
        "end0": (pytest.approx(0.045), pytest.approx(0.050)),
        "end1": (pytest.approx(0.040), pytest.approx(0.045)),
    }
    assert answer["makespan_s"] == pytest.approx(0.050)
    assert [path_node["id"] for path_node in answer["critical_path"]] == ["a0", "b0", "end0"]
    assert [path_node["share"] for path_node in answer["critical_path"]] == pytest.approx([0.2, 0.7, 0.1])
    assert answer["lower_bound_s"] == pytest.approx(0.050)
    assert answer["gap"] == pytest.approx(0)
    assert answer["baselines"] == {"serial": pytest.approx(0.095), "longest_path": pytest.approx(0.050)}
    assert [(path_node["device"], path_node["stream"], path_node["nodes"]) for path_node in answer["streams"]] == [
        ("r0", "0", 3),
        ("r0", "comm", 1),
        ("r1", "0", 2),
        ("r1", "comm", 1),
    ]
    assert [path_node["busy_s"] for path_node in answer["streams"]] == pytest.approx([0.050, 0.010, 0.035, 0.010])
    # On r1 nothing hides the all-reduce; somewhere something computes all the time.
    assert answer["exposed_comm_s"] == 0
    assert [path_node["exposed_comm_s"] for path_node in answer["devices"]] == pytest.approx([0, 0.010])
    assert answer["model_id"] is None
    assert answer["domain"] is None
    assert answer["interval"] == {
        "lower_s": answer["makespan_s"],
        "upper_s": answer["makespan_s"],
        "mean_s": answer["makespan_s"],
        "quantiles": {"0.1": answer["makespan_s"], "0.9": answer["makespan_s"]},
        "samples": 0,
    }
    events = [event for event in answer["trace"]["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 7  # the all-reduce on both ranks
    first = next(event for event in events if event["name"] == "b0")
    assert (first["ts"], first["dur"], first["cat"]) == (10_000.0, pytest.approx(35_000.0), "compute")
    assert first["args"] == {"critical": True}


def test_each_override_is_applied_alone() -> None:
    overrides = [
        {"class": "comm", "ratio": 3.0},
        {"node": "b0", "delay_s": -0.025},
        {"device": "r0", "class": "compute", "ratio": 0},
        {"class": "comm", "delay_s": -1.0},
        {"device": "r1", "stream": "comm", "delay_s": 0.001},
    ]
    answer = plan_of({**TWO_RANKS, "overrides": overrides})
    assert answer["makespan_s"] == pytest.approx(0.050)
    makespans = [(override["nodes"], override["makespan_s"]) for override in answer["what_if"]]
    assert makespans == [
        (1, pytest.approx(0.065)),
        (1, pytest.approx(0.045)),
        (3, pytest.approx(0.045)),
        (1, pytest.approx(0.050)),
        (1, pytest.approx(0.050)),
    ]
    assert [override["saving_s"] for override in answer["what_if"]] == pytest.approx([-0.015, 0.005, 0.005, 0, 0])
    assert answer["what_if"][0] == {
        **overrides[0],
        "delay_s": 0.0,
        "nodes": 1,
        "makespan_s": answer["what_if"][0]["makespan_s"],
        "saving_s": answer["what_if"][0]["saving_s"],
    }


def test_events_are_edges_between_streams() -> None:
    with_deps = {
        "nodes": [
            {"id": "a", "device": "g", "duration_s": 1},
            {"id": "b", "device": "g", "stream": "1", "duration_s": 2, "deps": ["a"]},
        ]
    }
    with_events = {
        "nodes": [
            {"id": "a", "device": "g", "duration_s": 1, "records": ["done"]},
            {"id": "b", "device": "g", "stream": "1", "duration_s": 2, "waits": ["done"]},
        ]
    }
    assert plan_of(with_deps) == plan_of(with_events)
    assert plan_of(with_events)["makespan_s"] == 3


def test_streams_may_be_numbered() -> None:
    def nodes(first: object, second: object) -> list[dict[str, Any]]:
        return [
            {"id": "a", "device": "g", "duration_s": 1, "stream": first},
            {"id": "b", "device": "g", "duration_s": 2, "stream": second},
        ]

    assert plan_of({"nodes": nodes(0, 7)}) == plan_of({"nodes": nodes("0", "7")})
    answer = plan_of({"nodes": nodes("7", 7), "overrides": [{"stream": 7, "ratio": 2}]})
    assert (answer["makespan_s"], answer["what_if"][0]["makespan_s"]) == (3, 6)


def test_devices_may_be_parallel_and_have_gaps() -> None:
    nodes = [{"id": f"n{i}", "device": "g", "duration_s": 1.0} for i in range(4)]
    assert plan_of({"nodes": nodes})["makespan_s"] == 4.0
    assert plan_of({"nodes": nodes, "devices": {"g": {"gap_s": 0.5}}})["makespan_s"] == 5.5
    nodes[0]["gap_s"] = 0.25  # n0 runs first
    assert plan_of({"nodes": nodes, "devices": {"g": {"gap_s": 0.5}}})["makespan_s"] == 5.25
    together = plan_of({"nodes": nodes, "devices": {"g": {"parallel": True}}})
    assert together["makespan_s"] == 1.0
    assert together["streams"][0]["busy_s"] == 1.0


def test_an_exclusive_link_carries_one_transfer_at_a_time() -> None:
    nodes = [{"id": f"t{i}", "device": f"r{i}", "bytes": 1e6, "link": "bus", "stream": "out"} for i in range(3)]
    table = {"table": [[1e5, 1e-3], [1e7, 1e-2]]}
    transfer_s = 1e-3 * 10**0.5
    assert plan_of({"nodes": nodes, "links": {"bus": table}})["makespan_s"] == pytest.approx(transfer_s)
    answer = plan_of({"nodes": nodes, "links": {"bus": {**table, "exclusive": True}}})
    assert answer["makespan_s"] == pytest.approx(3 * transfer_s)
    assert {"device": "link:bus", "stream": "0", "nodes": 3} in [
        {key: use[key] for key in ("device", "stream", "nodes")} for use in answer["streams"]
    ]
    assert answer["exposed_comm_s"] == pytest.approx(3 * transfer_s)
    assert answer["remarks"] == []


def test_transfers_beyond_a_table_give_a_remark() -> None:
    nodes = [{"id": "t", "device": "r", "bytes": 5.0, "link": "bus"}]
    answer = plan_of({"nodes": nodes, "links": {"bus": {"table": [[10, 1], [20, 2]]}}})
    assert answer["makespan_s"] == 1
    assert answer["remarks"] == ["link bus: 1 transfers lie outside its table; their times extend it"]


def test_programs_are_predicted_once_and_add_up(predictor: LatencyPredictor) -> None:
    request = {
        "nodes": [
            {"id": "a", "device": "t4", "program": LINEAR, "count": 3},
            {"id": "b", "device": "rank1", "programs": [{"program": SOFTMAX}, {"program": LINEAR, "count": 2}]},
            {"id": "c", "device": "t4", "program": LINEAR, "deps": ["a", "b"]},
        ],
        "devices": {"rank1": "t4"},
        "protocol": "eager",
        "framework": "pytorch",
    }
    linear, softmax = predictor.predict([LINEAR, SOFTMAX], "t4", protocol="eager", framework="pytorch")
    assert linear.latency_s is not None and softmax.latency_s is not None
    assert len(read_request(ReplayRequest, request).price_requests()) == 2
    answer = plan_of(request, predictor)
    long = max(3 * linear.latency_s, softmax.latency_s + 2 * linear.latency_s)
    assert answer["makespan_s"] == pytest.approx(long + linear.latency_s, rel=1e-12)
    assert answer["model_id"] == predictor.model_id
    assert answer["domain"] in ("in", "near", "out")
    assert sum(program["share"] for program in answer["by_program"]) == pytest.approx(1)
    assert {program["device"] for program in answer["by_program"]} == {"t4"}
    assert answer["critical_path"][-1]["program"] == linear.name
    assert linear.name in " ".join(answer["explanation"])


def test_equal_programs_have_equal_errors(predictor: LatencyPredictor) -> None:
    # One queue of one program: its interval times the number of runs, not narrowed by averaging.
    nodes = [{"id": f"n{i}", "device": "t4", "program": LINEAR} for i in range(5)]
    (prediction,) = predictor.predict([LINEAR], "t4")
    assert prediction.latency_s is not None and prediction.lower_s is not None and prediction.upper_s is not None
    answer = plan_of({"nodes": nodes, "samples": 4000, "seed": 1, "quantiles": [0.9, 0.1, 0.5]}, predictor)
    interval = answer["interval"]
    assert list(interval["quantiles"]) == ["0.1", "0.5", "0.9"]
    assert interval["quantiles"]["0.1"] == pytest.approx(5 * prediction.lower_s, rel=0.01)
    assert interval["quantiles"]["0.5"] == pytest.approx(5 * prediction.latency_s, rel=0.01)
    assert interval["quantiles"]["0.9"] == pytest.approx(5 * prediction.upper_s, rel=0.01)
    assert interval["samples"] == 4000
    # The errors of different programs add up, unless the request says that they are independent.
    mixed = [{"id": "m", "device": "t4", "programs": [{"program": LINEAR}, {"program": SOFTMAX}]}]
    alone = [plan_of({"nodes": [{"id": "m", "device": "t4", "program": p}]}, predictor) for p in (LINEAR, SOFTMAX)]
    both = plan_of({"nodes": mixed, "correlation": 0}, predictor)
    together = plan_of({"nodes": mixed, "samples": 2000}, predictor)

    def width(answer: dict[str, Any]) -> float:
        return float(answer["interval"]["upper_s"] - answer["interval"]["lower_s"])

    assert width(both) < 0.9 * (width(alone[0]) + width(alone[1]))
    assert width(together) == pytest.approx(width(alone[0]) + width(alone[1]), rel=0.1)
    assert both["interval"]["lower_s"] < both["makespan_s"] < both["interval"]["upper_s"]


def test_samples_repeat_with_the_seed_and_not_with_the_order(predictor: LatencyPredictor) -> None:
    nodes = [
        {"id": "a", "device": "t4", "program": LINEAR},
        {"id": "b", "device": "l4", "program": SOFTMAX},
        {"id": "c", "device": "t4", "program": SOFTMAX, "deps": ["a", "b"]},
    ]
    first = plan_of({"nodes": nodes}, predictor)
    assert plan_of({"nodes": nodes}, predictor) == first
    assert plan_of({"nodes": nodes[::-1]}, predictor)["interval"] == first["interval"]
    assert plan_of({"nodes": nodes, "seed": 1}, predictor)["interval"] != first["interval"]
    assert plan_of({"nodes": nodes, "samples": 0}, predictor)["interval"] is None


def test_the_default_number_of_samples_falls_with_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def samples(nodes: int) -> int:
        many = [{"id": str(i), "device": "t4", "program": LINEAR} for i in range(nodes)]
        return solver.sample_count(read_request(ReplayRequest, {"nodes": many}))

    assert samples(300) == 256
    monkeypatch.setattr(solver, "AUTO_WORK", 60_000)
    assert (samples(1), samples(300), samples(2000)) == (256, 100, 16)


def test_request_can_be_pickled(predictor: LatencyPredictor) -> None:
    request = read_request(ReplayRequest, json.loads(EXAMPLE.read_text()))
    request.price_requests()
    assert pickle.loads(pickle.dumps(request)) == request


def test_example_has_the_expected_critical_path(predictor: LatencyPredictor) -> None:
    answer = plan_of(json.loads(EXAMPLE.read_text()), predictor)
    assert [node["id"] for node in answer["critical_path"]] == ["f1", "f2", "b2", "b1", "r1", "update"]
    assert answer["what_if"][0]["saving_s"] == pytest.approx((2 * (1e-5 + 8388608 / 2 / 12e9)) / 2, rel=1e-9)
    assert answer["what_if"][1]["saving_s"] == pytest.approx(-1e-3, rel=1e-9)


NODE = {"id": "a", "device": "g", "duration_s": 1.0}
NET = {"net": {"alpha_s": 1e-3}}
SEND = {"op": "send", "ranks": ["r0", "r1"], "bytes": 1, "link": "net"}


@pytest.mark.parametrize(
    ("request_", "path", "text"),
    [
        ({"nodes": []}, "nodes", "at least 1"),
        ({"nodes": [{**NODE, "duration_s": -1}]}, "nodes.0.duration_s", "greater than or equal to 0"),
        ({"nodes": [{**NODE, "colour": "red"}]}, "nodes.0.colour", "unknown field"),
        ({"nodes": [NODE, NODE]}, "nodes.1.id", "both called 'a'"),
        ({"nodes": [{**NODE, "deps": ["b"]}]}, "nodes.0.deps.0", "'b', which is not there"),
        (
            {"nodes": [{**NODE, "deps": ["b"]}, {**NODE, "id": "b", "deps": ["a"]}]},
            "nodes.0.deps",
            "wait for each other: a -> b -> a",
        ),
        ({"nodes": [{"id": "a", "device": "g"}]}, "nodes.0", "none of duration_s"),
        ({"nodes": [{**NODE, "program": LINEAR}]}, "nodes.0.program", "duration_s and program"),
        ({"nodes": [{**NODE, "count": 2}]}, "nodes.0.count", "count goes with program"),
        ({"nodes": [{**NODE, "link": "net"}], "links": NET}, "nodes.0.link", "goes with bytes"),
        ({"nodes": [{"id": "a", "device": "g", "bytes": 1}], "links": NET}, "nodes.0.link", "need a link"),
        (
            {"nodes": [{"id": "a", "device": "g", "bytes": 1, "link": "wire"}], "links": NET},
            "nodes.0.link",
            "no link is called 'wire'",
        ),
        ({"nodes": [{"id": "a", "duration_s": 1}]}, "nodes.0.device", "no device"),
        (
            {"nodes": [{"id": "a", "device": "g", "collective": SEND}], "links": NET},
            "nodes.0.device",
            "is a collective",
        ),
        (
            {"nodes": [{"id": "a", "collective": {**SEND, "ranks": ["r0", "r0"]}}], "links": NET},
            "nodes.0.collective.ranks.1",
            "twice",
        ),
        (
            {"nodes": [{"id": "a", "collective": {**SEND, "ranks": ["r0"]}}], "links": NET},
            "nodes.0.collective",
            "two ranks, not 1",
        ),
        ({"nodes": [{"id": "a", "collective": {**SEND, "link": "x"}}]}, "nodes.0.collective.link", "no link"),
        ({"nodes": [{**NODE, "waits": ["e"]}]}, "nodes.0.waits.0", "nothing records"),
        (
            {"nodes": [{**NODE, "records": ["e"]}, {**NODE, "id": "b", "records": ["e"]}]},
            "nodes.1.records.0",
            "recorded by 'a' and 'b'",
        ),
        ({"nodes": [NODE], "devices": {"h": {}}}, "devices.h", "no node runs there"),
        ({"nodes": [NODE], "overrides": [{"ratio": 2}]}, "overrides.0", "selects nothing"),
        ({"nodes": [NODE], "overrides": [{"class": "c"}]}, "overrides.0.class", "no node has class 'c'"),
        ({"nodes": [NODE], "overrides": [{"node": "a", "ratio": -1}]}, "overrides.0.ratio", "greater"),
    ],
)
def test_error_names_the_field(request_: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(FieldError) as error:
        make_plan("replay", request_)
    assert error.value.path == path
    assert text in error.value.message


@pytest.mark.parametrize(
    ("link", "path", "text"),
    [
        ({}, "links.net", "no figures"),
        ({"beta_s_per_byte": 1, "bandwidth_bytes_per_s": 1}, "links.net.bandwidth_bytes_per_s", "and"),
        ({"alpha_s": 1, "table": [[1, 1], [2, 2]]}, "links.net.table", "a table and alpha_s"),
        ({"table": [[2, 1], [1, 2]]}, "links.net.table", "rising"),
        ({"table": [[1, 1]]}, "links.net.table", "at least 2"),
    ],
)
def test_error_names_the_link(link: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(FieldError) as error:
        make_plan("replay", {"nodes": [NODE], "links": {"net": link}})
    assert error.value.path == path
    assert text in error.value.message


def test_error_names_the_unknown_device_or_program(predictor: LatencyPredictor) -> None:
    for node, text in (
        ({"id": "b", "device": "no-such-gpu", "program": LINEAR}, "no-such-gpu"),
        ({"id": "b", "device": "t4", "program": {"operator": "frobnicate"}}, "frobnicate"),
    ):
        with pytest.raises(FieldError, match=text) as error:
            make_plan("replay", {"nodes": [NODE, node]}, predictor)
        assert error.value.path == "nodes.1.program"
    with pytest.raises(FieldError, match="must be predicted"):
        make_plan("replay", {"nodes": [{"id": "a", "device": "t4", "program": LINEAR}]})


def test_sizes_count_the_work_of_samples_overrides_and_the_trace() -> None:
    nodes = [{"id": str(i), "device": "t4", "program": LINEAR} for i in range(10)]
    size = read_request(ReplayRequest, {"nodes": nodes}).replayer.arrays.size
    more = {"samples": 100, "overrides": [{"device": "t4"}] * 2, "trace": True}
    sizes = read_request(ReplayRequest, {"nodes": nodes, **more}).sizes()
    assert sizes == {"nodes": 10, "work": 102 * size, "events": size}


def test_garbage_collector_is_enabled_again() -> None:
    assert gc.isenabled()
    with pytest.raises(FieldError):
        make_plan("replay", {"nodes": [{**NODE, "deps": ["b"]}]})
    assert gc.isenabled()
