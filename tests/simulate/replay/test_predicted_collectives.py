"""Replay nodes whose cost is a predicted collective: on one device, or between named devices of the graph."""

import copy
from pathlib import Path
from typing import Any

import pytest

from cdmpp import FieldError, LatencyPredictor, make_plan
from cdmpp.plan.base.solve import read_request
from cdmpp.simulate.replay.parquet import read_parquet, write_parquet
from cdmpp.simulate.replay.schema import ReplayRequest
from tests.fake_collectives import RoundPredictor, seconds

REDUCE: dict[str, Any] = {"operator": "all_reduce", "bytes": 99e6}
#: Backward passes of two ranks, and the sum of their gradients.
TWO_RANKS: dict[str, Any] = {
    "nodes": [
        {"id": "b0", "device": "rank0", "duration_s": 0.2},
        {"id": "b1", "device": "rank1", "duration_s": 0.3},
        {"id": "sum", "collective": {**REDUCE, "ranks": ["rank0", "rank1"]}, "deps": ["b0", "b1"]},
    ],
    "devices": {"rank0": {"device": "h100-sxm"}, "rank1": {"device": "h100-sxm"}},
}


def replay(request: dict[str, Any], predictor: Any = None) -> dict[str, Any]:
    return make_plan("replay", request, predictor or RoundPredictor())


def changed(node: dict[str, Any], **more: Any) -> dict[str, Any]:
    request = copy.deepcopy(TWO_RANKS)
    request["nodes"][2] = {"id": "sum", "deps": ["b0", "b1"], **node}
    return {**request, **more}


def test_named_ranks_start_together_and_both_are_held() -> None:
    predictor = RoundPredictor()
    answer = replay(TWO_RANKS, predictor)
    assert answer["makespan_s"] == pytest.approx(0.3 + seconds(99e6))
    assert [(c.operator, c.ranks, c.bytes) for c in predictor.collectives()] == [("all_reduce", 2, 99_000_000)]
    held = {(stream["device"], stream["stream"]) for stream in answer["streams"]}
    assert {("rank0", "comm"), ("rank1", "comm")} <= held
    assert answer["exposed_comm_s"] == pytest.approx(0.1)
    assert answer["model_id"] == "round-numbers"
    assert answer["interval"]["lower_s"] < answer["makespan_s"] < answer["interval"]["upper_s"]


def test_collective_as_a_program_is_communication() -> None:
    node = {"id": "sum", "device": "h100-sxm", "program": {**REDUCE, "ranks": 8}}
    assert replay({"nodes": [node]})["exposed_comm_s"] == pytest.approx(seconds(99e6))


def test_counted_ranks_run_on_the_device_of_the_node() -> None:
    predictor = RoundPredictor()
    node = {"device": "h100-sxm", "collective": {**REDUCE, "ranks": 16, "ranks_per_node": 8, "link": "nvlink4"}}
    answer = replay({"nodes": [{"id": "sum", **node}]}, predictor)
    assert answer["makespan_s"] == pytest.approx(seconds(99e6))
    [asked] = predictor.collectives()
    assert (asked.ranks, asked.ranks_per_node, asked.link) == (16, 8, "nvlink4")
    assert answer["streams"][0]["stream"] == "comm"


def test_what_if_scales_predicted_collectives() -> None:
    answer = replay({**TWO_RANKS, "overrides": [{"class": "comm", "ratio": 0.5}]})
    [what_if] = answer["what_if"] if "what_if" in answer else answer["overrides"]
    assert what_if["makespan_s"] == pytest.approx(0.35)


def test_collective_of_a_graph_equals_the_prediction(predictor: LatencyPredictor) -> None:
    answer = replay(TWO_RANKS, predictor)
    [alone] = predictor.predict(["all_reduce:bytes=99000000,ranks=2"], "h100-sxm")
    assert answer["makespan_s"] == pytest.approx(0.3 + alone.latency_s)
    assert answer["model_id"] == predictor.model_id


def test_predicted_collectives_travel_as_parquet(tmp_path: Path) -> None:
    path = tmp_path / "graph.parquet"
    write_parquet(path, TWO_RANKS, read_request(ReplayRequest, TWO_RANKS).nodes)
    assert replay(read_parquet(path)) == replay(TWO_RANKS)


@pytest.mark.parametrize(
    ("node", "message", "path"),
    [
        ({"collective": {**REDUCE, "ranks": 2}}, "has no device", "nodes.2.device"),
        (
            {"device": "rank0", "collective": {**REDUCE, "ranks": ["rank0", "rank1"]}},
            "is a collective",
            "nodes.2.device",
        ),
        ({"collective": {**REDUCE, "ranks": ["rank0", "rank0"]}}, "occurs twice", "nodes.2.collective.ranks.1"),
        ({"device": "rank0", "collective": {**REDUCE, "ranks": 2}, "duration_s": 1.0}, "duration_s and", None),
        (
            {"device": "rank0", "collective": {**REDUCE, "ranks": 2}, "link": "net"},
            "link goes with bytes",
            "nodes.2.link",
        ),
        ({"device": "rank0", "collective": {**REDUCE, "ranks": 2, "library": "mpi"}}, "library", "nodes.2.collective"),
        ({"device": "rank0", "collective": {**REDUCE, "ranks": 1}}, "greater than or equal to 2", None),
        ({"collective": {**REDUCE, "ranks": []}}, "at least 2 items", "nodes.2.collective.ranks"),
        ({"collective": {**REDUCE, "ranks": ["rank0"]}}, "at least 2 items", "nodes.2.collective.ranks"),
    ],
)
def test_wrong_collective_names_its_field(node: dict[str, Any], message: str, path: str | None) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        replay(changed(node))
    assert caught.value.path is not None and caught.value.path.startswith(path or "nodes.2")


def test_predicted_link_of_a_replay_points_to_the_nodes() -> None:
    links = {"net": {"collective": {"ranks": 8}, "device": "h100-sxm"}}
    with pytest.raises(FieldError, match="a replay predicts the collectives of its nodes") as caught:
        replay({**TWO_RANKS, "links": links})
    assert caught.value.path == "links.net.collective"


def test_collective_over_a_link_names_the_field_that_is_wrong() -> None:
    node = {"id": "sum", "collective": {"op": "all_reduce", "bytes": 8, "ranks": 2, "link": "nvlink4"}}
    with pytest.raises(FieldError) as caught:
        replay({"nodes": [node]})
    assert caught.value.path == "nodes.0.collective.ranks"
