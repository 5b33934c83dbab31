"""An instance of Ray that a command starts: no process outlives the command, and no statistics are sent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cdmpp.cli.options import complete
from cdmpp.errors import ServiceError
from cdmpp.plan.distributed import ray_cluster
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MARK = "CDMPP_TEST_OF_RAY"
#: Starts an instance with a worker and prints a line; a second argument keeps it running.
PROGRAM = """
import os, sys, time
from cdmpp.plan.distributed import ray_cluster
with ray_cluster(processors=1) as ray:
    worker = ray.get(ray.remote(lambda: os.getpid()).remote())
    print(worker != os.getpid(), os.environ["RAY_USAGE_STATS_ENABLED"], flush=True)
    time.sleep(3600 if sys.argv[1:] else 0)
"""


def marked_processes(mark: str) -> list[int]:
    """Processes that inherited the mark."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                processes.append(int(folder.name))
        except OSError:
            continue
    return processes


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("terminated", [False, True])
def test_no_process_outlives_the_command(terminated: bool) -> None:
    mark = f"{os.getpid()}-{terminated}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", PROGRAM, *(["wait"] if terminated else [])]
    with subprocess.Popen(
        command, cwd=ROOT, env=inherited | {MARK: mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"True 0\n"
        if terminated:
            assert len(marked_processes(mark)) > 2
            process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        wait_until(lambda: not marked_processes(mark), "the end of all processes")
        if not terminated:
            assert process.stderr.read() == b""


def test_missing_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ServiceError, match="no Ray cluster at auto: Could not find"), ray_cluster("auto"):
        pass


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["t.csv", "--ray"], ["t.csv", "--ray="]),
        (["--ray", "t.csv"], ["--ray=", "t.csv"]),
        (["t.csv", "--ray", "--strict"], ["t.csv", "--ray=", "--strict"]),
        (["t.csv", "--ray", "10.0.0.1:6379"], ["t.csv", "--ray", "10.0.0.1:6379"]),
        (["--ray", "head:6379", "t.csv"], ["--ray", "head:6379", "t.csv"]),
        (["--ray=auto"], ["--ray=auto"]),
    ],
)
def test_address_of_the_option_may_be_left_out(arguments: list[str], expected: list[str]) -> None:
    assert complete(arguments) == expected
