"""Workers crash, hang, eat memory, and die with their parent; the pool goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdmpp.errors import MeasurementError
from cdmpp.measure.pools import Outcome, WorkerPool, WorkerSettings, last_line
from tests.measure import work


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    settings = WorkerSettings(
        time_limit_s=1.0, memory_bytes=2**30, cores=(0,), environment={"CDMPP_TEST": "seen"}
    )
    with WorkerPool(1, settings) as made:
        yield made


def test_what_native_code_prints_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "collect.log"
    with WorkerPool(1, WorkerSettings(log=str(log))) as pool:
        list(pool.run(work.shout, [("a warning",)]))
    assert "a warning" in log.read_text()


def one(pool: WorkerPool, function: object, *arguments: object) -> Outcome:
    (outcome,) = pool.run(function, [arguments])  # type: ignore[arg-type]
    return outcome


def test_outcomes_come_in_the_order_of_the_tasks(pool: WorkerPool) -> None:
    assert [o.value for o in pool.run(work.double, [(i,) for i in range(20)])] == list(range(0, 40, 2))


def test_one_worker_lives_long(pool: WorkerPool) -> None:
    assert len({one(pool, work.process).value for _ in range(5)}) == 1


def test_a_worker_has_its_environment_and_cores(pool: WorkerPool) -> None:
    assert one(pool, work.variable, "CDMPP_TEST").value == "seen"
    assert one(pool, work.cores).value == [0]


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (work.crash, (), "crash: the worker was ended by SIGSEGV"),
        (work.leave, (), "crash: the worker ended with exit code 3"),
        (work.hang, (), "timeout: longer than 1 s"),
        (work.eat, (4 * 2**30,), "memory: more than 1 GiB"),
        (work.fail, (), "error: InternalError: something deep"),
    ],
)
def test_a_bad_task_costs_itself_and_a_worker(
    pool: WorkerPool, function: object, arguments: tuple[object, ...], reason: str
) -> None:
    tasks = [(1,), (2,)]
    assert one(pool, function, *arguments) == Outcome(failure=reason)
    assert [o.value for o in pool.run(work.double, tasks)] == [2, 4]


@pytest.mark.parametrize("transient", [True, False])
def test_a_measurement_error_says_whether_to_try_again(pool: WorkerPool, transient: bool) -> None:
    outcome = one(pool, work.complain, transient)
    assert outcome == Outcome(failure="measurement_error: the board is away", transient=transient)


def test_a_call_raises_expected_errors_with_their_hint(pool: WorkerPool) -> None:
    with pytest.raises(MeasurementError, match="the board is away") as caught:
        pool.call(work.complain, False)
    assert caught.value.hint == "wait"
    with pytest.raises(MeasurementError, match="SIGSEGV"):
        pool.call(work.crash)


def test_the_telling_line_of_a_long_report_is_found() -> None:
    assert last_line(ValueError("a\nTypeError: b\n--> c")) == "TypeError: b"
    assert last_line(ValueError()) == "ValueError"
    assert len(last_line(ValueError("x" * 5000))) == 300


PARENT = """
import sys
from cdmpp.measure.pools import WorkerPool, WorkerSettings
from tests.measure import work
if __name__ == "__main__":
    with WorkerPool(1, WorkerSettings()) as pool:
        list(pool.run(work.mark, [(sys.argv[1], 600.0)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker ends with its pipe, between tasks")
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script, seen = tmp_path / "parent.py", tmp_path / "worker"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, str(script), str(seen)], env=environment)
    try:
        _wait(lambda: seen.exists() and seen.read_text() != "")
        worker = int(seen.read_text())
        assert _alive(worker)
        parent.kill()
        parent.wait()
        _wait(lambda: not _alive(worker))
    finally:
        parent.kill()
        parent.wait()


def _alive(process: int) -> bool:
    """Runs, and is no zombie that waits to be reaped."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def _wait(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "nothing happened for a minute"
        time.sleep(0.05)
