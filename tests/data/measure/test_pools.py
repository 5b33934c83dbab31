"""Worker pools whose workers crash, hang, use too much memory or lose their parent."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cdmpp.data.measure.pools import Outcome, WorkerPool, WorkerSettings, last_line
from cdmpp.errors import MeasurementError, MissingDependencyError
from tests.data.measure import work
from tests.waiting import PATIENCE_S, is_running, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    settings = WorkerSettings(
        time_limit_s=PATIENCE_S, memory_bytes=2**30, cores=(0,), environment={"CDMPP_TEST": "seen"}
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


def test_workers_are_started_without_ctrl_c_which_the_caller_keeps(pool: WorkerPool) -> None:
    assert one(pool, work.blocked_signals).value == [signal.SIGINT]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_worker_has_its_environment_and_cores(pool: WorkerPool) -> None:
    assert one(pool, work.variable, "CDMPP_TEST").value == "seen"
    assert one(pool, work.cores).value == [0]


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (work.crash, (), "crash: the worker was ended by SIGSEGV"),
        (work.leave, (), "crash: the worker ended with exit code 3"),
        (work.eat, (4 * 2**30,), "memory: more than 1 GiB"),
        (work.fail, (), "error: InternalError: something deep"),
    ],
)
def test_failed_task_costs_only_itself(
    pool: WorkerPool, function: object, arguments: tuple[object, ...], reason: str
) -> None:
    tasks = [(1,), (2,)]
    assert one(pool, function, *arguments) == Outcome(failure=reason)
    assert [o.value for o in pool.run(work.double, tasks)] == [2, 4]


def test_task_that_exceeds_its_time_limit_costs_only_itself(pool: WorkerPool) -> None:
    patient = pool.settings
    pool.settings = replace(patient, time_limit_s=1.0)
    try:
        assert one(pool, work.hang) == Outcome(failure="timeout: longer than 1 s")
    finally:
        pool.settings = patient
    assert [o.value for o in pool.run(work.double, [(1,), (2,)])] == [2, 4]


@pytest.mark.parametrize("transient", [True, False])
def test_measurement_error_states_whether_to_retry(pool: WorkerPool, transient: bool) -> None:
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


def test_what_hinders_a_worker_is_raised_with_its_hint() -> None:
    with WorkerPool(1, WorkerSettings(), work.refuse) as pool:
        with pytest.raises(MissingDependencyError, match="there is no engine") as caught:
            list(pool.run(work.double, [(1,), (2,)]))
        assert caught.value.hint == "install one"
        with pytest.raises(MissingDependencyError, match="there is no engine"):
            pool.call(work.double, 1)


def test_an_unforeseen_error_hinders_a_worker_too() -> None:
    with WorkerPool(1, WorkerSettings(), work.fail) as pool:
        with pytest.raises(MeasurementError, match=r"cannot start: .*something deep") as caught:
            pool.call(work.double, 1)
        assert caught.value.transient


def test_workers_that_die_before_they_work_are_given_up() -> None:
    with WorkerPool(1, WorkerSettings(), work.crash) as pool:
        with pytest.raises(MeasurementError, match="end before they run a task") as caught:
            list(pool.run(work.double, [(1,), (2,)]))
        assert caught.value.transient


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_idle_worker_costs_no_task(workers: int, noticed: bool) -> None:
    with WorkerPool(workers, WorkerSettings(time_limit_s=PATIENCE_S)) as pool:
        process = one(pool, work.process).value
        os.kill(process, signal.SIGKILL)
        if noticed:
            wait_until(lambda: not Path(f"/proc/{process}").exists(), "the end of the worker")
        assert [o.value for o in pool.run(work.double, [(i,) for i in range(30)])] == list(range(0, 60, 2))


def test_killed_busy_worker_costs_its_task(tmp_path: Path) -> None:
    seen = tmp_path / "worker"

    def kill() -> None:
        wait_until(lambda: seen.exists() and seen.read_text() != "")
        os.kill(int(seen.read_text()), signal.SIGKILL)

    with WorkerPool(1, WorkerSettings(time_limit_s=PATIENCE_S)) as pool:
        killer = threading.Thread(target=kill)
        killer.start()
        tasks = [(str(seen), 600.0), (str(tmp_path / "a"), 0.0), (str(tmp_path / "b"), 0.0)]
        outcomes = list(pool.run(work.mark, tasks))
        killer.join()
    assert [o.failure for o in outcomes] == ["crash: the worker was ended by SIGKILL", "", ""]


def test_ready_waits_for_every_worker(tmp_path: Path) -> None:
    with WorkerPool(2, WorkerSettings(), work.arrive, (str(tmp_path),)) as pool:
        pool.ready()
        assert not list(tmp_path.iterdir())  # a pool without a task has no workers
        one(pool, work.process)
        pool.ready()
        assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="groups of processes are of POSIX")
def test_processes_of_a_task_end_with_it(tmp_path: Path) -> None:
    seen = tmp_path / "compiler"
    with WorkerPool(1, WorkerSettings()) as pool:
        limit_s = 1.0
        while not seen.exists():  # on a busy machine the task may need longer to start its process
            limit_s *= 2
            pool.settings = WorkerSettings(time_limit_s=limit_s)
            assert one(pool, work.compile_without_end, str(seen)).failure == f"timeout: longer than {limit_s:g} s"
        wait_until(lambda: not is_running(int(seen.read_text())))


PARENT = """
import sys
from cdmpp.data.measure.pools import WorkerPool
from cdmpp.data.measure.pools import WorkerSettings
from tests.data.measure import work
if __name__ == "__main__":
    with WorkerPool(1, WorkerSettings()) as pool:
        list(pool.run(work.mark, [(sys.argv[1], 600.0)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker ends with its pipe, between tasks")
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script, seen = tmp_path / "parent.py", tmp_path / "worker"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, str(script), str(seen)], env=environment)
    try:
        wait_until(lambda: seen.exists() and seen.read_text() != "")
        worker = int(seen.read_text())
        assert is_running(worker)
        parent.kill()
        parent.wait()
        wait_until(lambda: not is_running(worker))
    finally:
        parent.kill()
        parent.wait()
