"""Iterations whose device work runs into the next one, and threads that wait for room in the launch queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdmpp.simulate.traces import replay_trace
from tests.simulate.traces.kineto import STREAM, KinetoTrace

LAUNCHES = 800


def run(path: Path, *, queue: int, kernel_us: float, host_us: float, first: int, last: int, seen: bool) -> Path:
    """Equal iterations of 800 launches, whose thread launches ahead until the queue is full.

    Iterations from ``first`` to ``last`` are recorded. Work that was launched before is in the file without its call if
    it is ``seen``.
    """
    trace, at = KinetoTrace(), 0.0
    ends, earlier = [0.0] * queue, []
    for number in range(last + 1):
        begin = at
        for _ in range(LAUNCHES):
            called = at + host_us - 4
            at = max(called + 4, ends[-queue] + 2)  # there is room when the launch so many before has ended
            start = max(ends[-1] + 1, called + 6)
            ends.append(start + kernel_us)
            if number >= first:
                trace.launch("busy_kernel", called, start, kernel_us, call_us=at - called)
            else:
                earlier.append(start)
        if number >= first:
            trace.step(number, begin, at - begin)
        elif number == first - 1 and seen:
            recorded_from = at
    for start in earlier:
        if seen and start + kernel_us > recorded_from:
            trace.add("kernel", "busy_kernel", start, kernel_us, 0, STREAM, device=0, stream=STREAM, correlation=5)
    return trace.write(path)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("iteration", [None, 6])
def test_iteration_of_a_backlog_lasts_from_mark_to_mark(tmp_path: Path, seen: bool, iteration: int | None) -> None:
    path = run(tmp_path / "t.json", queue=1024, kernel_us=119, host_us=30, first=5, last=6, seen=seen)
    answer = replay_trace(path, iteration=iteration, speed_up=[(".*", 2.0), ("busy", 100.0)])
    assert answer.measured_s == pytest.approx(LAUNCHES * 120e-6, rel=0.01)
    assert answer.replayed_s == pytest.approx(answer.measured_s, rel=1e-6)
    if not seen:
        return  # the ends that the launches wait for are not in the file
    twice, hundredfold, _ = answer.what_if
    assert twice.seconds == pytest.approx(answer.measured_s / 2, rel=0.03)  # 96 ms to 48
    assert hundredfold.seconds == pytest.approx(LAUNCHES * 30e-6, rel=0.05)  # the thread's own time is left
    assert any("room in the device's queue" in remark for remark in answer.graph.remarks)


def test_long_launches_without_a_queue_stay_the_host_s_work(tmp_path: Path) -> None:
    path = run(tmp_path / "t.json", queue=1024, kernel_us=10, host_us=30, first=1, last=2, seen=True)
    answer = replay_trace(path, speed_up=[(".*", 2.0)])
    assert answer.measured_s == pytest.approx(LAUNCHES * 30e-6, rel=0.01)
    assert answer.what_if[0].seconds == pytest.approx(answer.measured_s, rel=0.01)
    assert not any("queue" in remark for remark in answer.graph.remarks)


def test_work_of_a_thread_that_runs_ahead_counts_in_full(tmp_path: Path) -> None:
    trace = KinetoTrace()
    for number in range(3):
        trace.step(number, 50 * number, 50)
        trace.launch("long", 50 * number + 10, 20 + 200 * number, 200)
    assert replay_trace(trace.write(tmp_path / "t.json")).measured_s == pytest.approx(200e-6)


def test_tail_beside_the_next_iteration_is_no_part_of_the_step(tmp_path: Path) -> None:
    trace = KinetoTrace()
    for number in range(3):
        trace.step(number, 216 * number, 216)
        trace.launch("last", 216 * number + 194, 200 + 216 * number, 177)
    path = trace.write(tmp_path / "t.json")
    for iteration in (None, 0, 2):
        assert replay_trace(path, iteration=iteration).measured_s == pytest.approx(216e-6)


@pytest.mark.parametrize("call", ["cudaEventSynchronize", "cudaStreamSynchronize", "cudaMemcpy", "cudaFree"])
def test_calls_that_wait_follow_the_device(tmp_path: Path, call: str) -> None:
    trace = KinetoTrace()
    trace.step(1, 0, 1100)
    trace.launch("first", 10, 20, 900)
    if call == "cudaEventSynchronize":
        trace.launch("second", 20, 920, 400)
    if call == "cudaMemcpy":
        trace.launch("Memcpy DtoH", 30, 921, 50, category="gpu_memcpy", call=call, call_us=950)
    else:
        trace.runtime(call, 30, 895)
    answer = replay_trace(trace.write(tmp_path / "t.json"), speed_up=[("first", 3.0)])
    assert answer.what_if[0].saving_s == pytest.approx(600e-6, abs=1e-6)


def test_trace_without_marks_ends_with_its_last_kernel(tmp_path: Path) -> None:
    trace = KinetoTrace()
    trace.op("aten::relu", 0, 20)
    trace.launch("relu", 10, 20, 400)
    answer = replay_trace(trace.write(tmp_path / "t.json"), speed_up=[("relu", 2.0)])
    assert answer.measured_s == pytest.approx(420e-6)
    assert answer.what_if[0].seconds == pytest.approx(220e-6)
