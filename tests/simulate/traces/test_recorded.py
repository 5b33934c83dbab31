"""Traces recorded here: replay takes the measured time, and what-ifs change it in the right direction."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cdmpp import LatencyPredictor, make_plan
from cdmpp.errors import DataError
from cdmpp.simulate.traces import TraceReplay, read_trace, replay_trace

pytestmark = pytest.mark.slow


def marked_s(path: Path) -> float:
    """Time between the first and the last mark of a trace, for one iteration."""
    marks = [event for event in read_trace(path).events if event.name.startswith("ProfilerStep#")]
    return (max(e.end_s for e in marks) - min(e.start_s for e in marks)) / len(marks)


@pytest.fixture(scope="module")
def replayed(cpu_trace: Path) -> TraceReplay:
    return replay_trace(cpu_trace)


def test_one_process_is_replayed_within_one_percent(replayed: TraceReplay, cpu_trace: Path) -> None:
    assert replayed.graph.iterations == ("ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4")
    assert replayed.replayed_s == pytest.approx(marked_s(cpu_trace), rel=0.01)
    assert replayed.replayed_s == pytest.approx(replayed.measured_s, rel=1e-9)


def test_busy_and_idle_time_sum_to_the_iteration(replayed: TraceReplay) -> None:
    (row,) = replayed.idle
    assert row.busy_s + sum(row.idle_s.values()) == pytest.approx(replayed.replayed_s)
    assert set(row.idle_s) <= {"host"} and row.exposed_comm_s == 0
    assert sum(share.share for share in replayed.critical_path) == pytest.approx(1)
    assert {"aten::addmm", "aten::mm", "(host)"} <= {share.label for share in replayed.critical_path}


def test_one_iteration_can_be_chosen(replayed: TraceReplay, cpu_trace: Path) -> None:
    single = replay_trace(cpu_trace, iteration=3)
    assert single.graph.iterations == ("ProfilerStep#3",)
    assert single.replayed_s < 3 * replayed.replayed_s
    with pytest.raises(DataError, match="no iteration 99") as error:
        replay_trace(cpu_trace, iteration=99)
    assert "2, 3, 4" in error.value.hint


def test_annotations_can_mark_iterations(cpu_trace: Path) -> None:
    forward = replay_trace(cpu_trace, mark="forward")
    assert forward.graph.iterations == ("forward",) * 3
    with pytest.raises(DataError, match="no annotation matches") as error:
        replay_trace(cpu_trace, mark="backward")
    assert "forward" in error.value.hint


def test_removed_and_faster_operators_save_their_time(cpu_trace: Path) -> None:
    answer = replay_trace(cpu_trace, speed_up=[("aten::addmm", 2.0)], remove=["aten::addmm"])
    total_s = sum(row.seconds for row in answer.kernels if row.name == "aten::addmm") / 3
    faster, without, both = answer.what_if
    assert faster.saving_s == pytest.approx(total_s / 2) and faster.shares == {"scaled": 1.0}
    assert without.saving_s == pytest.approx(total_s) and both.seconds == pytest.approx(without.seconds)


def test_another_device_scales_operators_by_predictions(cpu_trace: Path, predictor: LatencyPredictor) -> None:
    answer = replay_trace(cpu_trace, device="a100-sxm4-80gb", from_device="t4", predictor=predictor)
    (row,) = answer.what_if
    assert 0.2 * answer.replayed_s < row.seconds < 2 * answer.replayed_s and row.nodes > 50
    # How much of the time is predicted depends on how long each operator took in the recording.
    assert row.shares["predicted"] > 0 and row.shares["predicted"] + row.shares["roofline"] == pytest.approx(1)
    assert row.domain in ("in", "near", "out") and answer.model_id == predictor.model_id


def test_two_gloo_processes_are_replayed_within_one_percent(gloo_traces: list[Path]) -> None:
    answer = replay_trace(*gloo_traces)
    assert answer.graph.ranks == (0, 1)
    assert answer.replayed_s == pytest.approx(max(map(marked_s, gloo_traces)), rel=0.01)
    assert any(node.role == "join" for node in answer.graph.nodes)
    for row in answer.idle:
        total_s = row.busy_s + sum(row.idle_s.values())
        assert total_s == pytest.approx(answer.timeline.makespan_s / 3)
    plan = make_plan("replay", answer.to_request())
    assert plan["makespan_s"] == pytest.approx(answer.timeline.makespan_s)


def test_each_rank_alone_is_replayed_within_one_percent(gloo_traces: list[Path]) -> None:
    for path in gloo_traces:
        assert replay_trace(path).replayed_s == pytest.approx(marked_s(path), rel=0.01)


def test_without_collectives_ranks_do_not_wait(gloo_traces: list[Path]) -> None:
    answer = replay_trace(*gloo_traces, remove=["gloo:"], ranks=8, link="1GB/s")
    ranks, link, without, _ = answer.what_if
    assert without.seconds <= answer.replayed_s <= ranks.seconds
    assert without.nodes == ranks.nodes == sum(node.role == "comm" for node in answer.graph.nodes)
    assert link.shares == ranks.shares == {"link": 1.0}


def test_clocks_are_aligned_by_collectives(gloo_traces: list[Path], tmp_path: Path) -> None:
    shifted = tmp_path / "other_host.json"
    trace = json.loads(gloo_traces[1].read_text())
    trace["host_name"] = "elsewhere"
    for event in trace["traceEvents"]:
        event["ts"] += 3.6e9
    shifted.write_text(json.dumps(trace))
    together, apart = replay_trace(*gloo_traces), replay_trace(gloo_traces[0], shifted)
    # An hour between the clocks is gone; what is left are the differences of the ends.
    assert apart.replayed_s == pytest.approx(together.replayed_s, rel=0.25)
    assert max(apart.graph.begins_s.values()) < 10


def test_different_numbers_of_collectives_are_reported(gloo_traces: list[Path], tmp_path: Path) -> None:
    shorter = tmp_path / "shorter.json"
    trace = json.loads(gloo_traces[1].read_text())
    works = [event for event in trace["traceEvents"] if event["name"] == "gloo:all_reduce"]
    trace["traceEvents"].remove(min(works, key=lambda event: event["ts"]))
    shorter.write_text(json.dumps(trace))
    answer = replay_trace(gloo_traces[0], shorter)
    assert any("different numbers of all_reduce" in remark for remark in answer.graph.remarks)
    joins = sum(node.role == "join" for node in answer.graph.nodes)
    assert 0 < joins < sum(node.role == "join" for node in replay_trace(*gloo_traces).graph.nodes)


def test_one_file_for_each_rank(gloo_traces: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    shutil.copy(gloo_traces[0], copy)
    with pytest.raises(DataError, match="rank 0, like"):
        replay_trace(gloo_traces[0], copy)
    with pytest.raises(DataError, match="given twice"):
        replay_trace(gloo_traces[0], gloo_traces[0])
