"""Measuring through a tracker and two servers on this machine."""

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cdmpp.data.measure.board import Tracker, parse_tracker
from cdmpp.data.measure.building import Library, build_program
from cdmpp.data.measure.collect import collect
from cdmpp.data.measure.pools import Outcome
from cdmpp.data.measure.remote import RemoteTimers, _RemoteTimer
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.targets import Configuration
from cdmpp.data.summary import info
from cdmpp.errors import InvalidDeviceError, MeasurementError
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.tvm, pytest.mark.native]

KEY = "loopback"
ROOT = Path(__file__).parents[3]


class Farm:
    """A tracker and two servers, each with the processes that it starts in a group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Servers would import torch for seconds if they could.
        (folder / "torch.py").write_text("raise ImportError('not needed')")
        self.servers: list[subprocess.Popen[bytes]] = []
        # Below the ports that systems give away by themselves; the tracker takes the first that is free.
        self._ports = 20_000 + os.getpid() % 100 * 100
        self.tracker = self._start_tracker(self._ports, self._ports + 50)

    def start(self) -> None:
        """Wait until it is there."""
        self.port = self._port()
        self.at = Tracker("127.0.0.1", self.port, KEY, wait_s=30.0, patience_s=0.5)
        self.wait_for(0)
        self.servers = [self._server(i) for i in range(2)]
        self.wait_for(2)

    def start_tracker(self) -> None:
        """Where it was before."""
        self.tracker = self._start_tracker(self.port, self.port + 1)
        self.wait_for(0)

    def heal(self) -> None:
        """Start again what a test has ended."""
        if self.tracker.poll() is not None:
            self.start_tracker()
        for number, server in enumerate(self.servers):
            if server.poll() is not None:
                self.servers[number] = self._server(number)
        self.wait_for(2)

    def wait_for(self, servers: int) -> None:
        """Wait until the tracker answers and knows so many servers."""
        self._wait(lambda: self._registered() >= servers)

    def _start_tracker(self, first: int, end: int) -> subprocess.Popen[bytes]:
        options = ("--port", str(first), "--port-end", str(end))
        return self._start("tvm.exec.rpc_tracker", *options, name="tracker")

    def _port(self) -> int:
        """The port that the tracker has chosen."""
        bound = re.compile(r"bind to 127\.0\.0\.1:(\d+)")
        self._wait(lambda: bound.search(self._log("tracker")) is not None)
        match = bound.search(self._log("tracker"))
        assert match is not None
        return int(match[1])

    def _server(self, number: int) -> subprocess.Popen[bytes]:
        # The first free port from there on.
        port = str(self._ports + 50 + 25 * number)
        options = ("--port", port, "--tracker", f"127.0.0.1:{self.port}", "--key", KEY)
        return self._start("cdmpp.data.measure.board", *options, name=f"server-{number}")

    def _start(self, program: str, *options: str, name: str) -> subprocess.Popen[bytes]:
        found_first = f"{self.folder}{os.pathsep}{ROOT}"
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", program, "--host", "127.0.0.1", *options],
                env={**os.environ, "PYTHONPATH": found_first, "TVM_USE_RUNTIME_LIB": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
            )

    def _wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, f"tracker and servers\n{self._log('tracker')}{self._log('server-0')}")

    def _registered(self) -> int:
        try:
            return self.at.servers()
        except MeasurementError:
            return -1

    def _log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def sessions(self) -> list[int]:
        """How many sessions each server had."""
        return [self._log(f"server-{i}").count("connected from") for i in range(2)]

    @staticmethod
    def kill(process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in (*self.servers, self.tracker):
            self.kill(process)


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """Shared by all: starting servers takes seconds."""
    with contextlib.closing(Farm(tmp_path_factory.mktemp("farm"))) as made:
        made.start()
        yield made


@pytest.fixture
def doomed(farm: Farm) -> Iterator[Farm]:
    """For a test that breaks it."""
    yield farm
    farm.heal()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory, tiny_programs: list[str]) -> list[Library]:
    folder = tmp_path_factory.mktemp("built")
    target = {"kind": "llvm", "mcpu": "x86-64-v2"}
    return [build_program(text, target, str(folder / f"{i}.so")) for i, text in enumerate(tiny_programs)]


def test_two_servers_measure_concurrently(
    farm: Farm, libraries: list[Library], quick: CollectSettings, one_thread: Configuration
) -> None:
    before, rounds, served = farm.sessions(), 0, [0, 0]
    with contextlib.closing(RemoteTimers(farm.at, one_thread, quick)) as timers:
        # One server may finish a round alone if the machine is busy.
        while min(served) == 0 and rounds < 20:
            rounds += 1
            outcomes = list(timers.time(libraries * 2))
            assert [o.failure for o in outcomes] == [""] * 12
            assert all(min(o.value.timing.repeats_s) > 0 for o in outcomes)
            served = [after - start for after, start in zip(farm.sessions(), before, strict=True)]
    assert sum(served) == 12 * rounds
    assert min(served) >= 1


def test_other_boards_replace_a_dead_board(
    doomed: Farm, libraries: list[Library], quick: CollectSettings, one_thread: Configuration
) -> None:
    with contextlib.closing(RemoteTimers(doomed.at, one_thread, quick)) as timers:
        outcomes = timers.time(libraries * 4)
        first = [next(outcomes) for _ in range(2)]
        doomed.kill(doomed.servers[0])
        rest = list(outcomes)
    assert [o.failure for o in (*first, *rest)] == [""] * 24


def test_lost_tracker_stops_the_collection_which_resumes_later(
    doomed: Farm, tmp_path: Path, fill: Callable[[Path], list[str]], quick: CollectSettings, one_thread: Configuration
) -> None:
    out = tmp_path / "data"
    fill(out)
    quick = quick.model_copy(update={"repeat_share": 0.0})

    class Doomed(RemoteTimers):
        def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
            yield from super().time(libraries[:1])
            doomed.kill(doomed.tracker)
            yield from super().time(libraries[1:])

    with pytest.raises(MeasurementError, match="no RPC tracker at") as caught:
        collect(["tiny"], [one_thread], out, quick, timers=lambda c, s: Doomed(doomed.at, c, s))
    assert caught.value.transient
    assert "same command" in caught.value.hint
    kept = info(out)
    assert 1 <= kept["records"] < 6
    assert kept["failed"] == 0
    doomed.start_tracker()
    doomed.wait_for(2)  # the servers register anew by themselves
    before = sum(doomed.sessions())
    collect(["tiny"], [one_thread], out, quick, timers=partial(RemoteTimers, doomed.at))
    done = info(out)
    assert (done["records"], done["duplicates"], done["failed"]) == (6, 0, 0)
    assert sum(doomed.sessions()) - before == 6 - kept["records"]


def test_failing_programs_cost_one_record_each(
    farm: Farm, libraries: list[Library], quick: CollectSettings, one_thread: Configuration, tmp_path: Path
) -> None:
    good = libraries[0]
    text = tmp_path / "text.so"
    text.write_text("no library")
    bad = {
        "text": Library(str(text), good.arguments, 0.0),
        "crash": Library(_compiled(tmp_path, "crash", "__builtin_trap();"), good.arguments, 0.0),
        "hang": Library(_compiled(tmp_path, "hang", "for (;;) sink++;"), good.arguments, 0.0),
    }
    limited = quick.model_copy(update={"time_limit_s": 8.0})
    with contextlib.closing(RemoteTimers(farm.at, one_thread, limited)) as timers:
        found = list(timers.time([good, *bad.values(), good]))
    assert [o.failure for o in (found[0], found[-1])] == ["", ""]
    failures = dict(zip(bad, [o.failure for o in found[1:-1]], strict=True))
    assert failures["text"]
    assert "lost 2 times" in failures["crash"]
    assert "longer than 8 s" in failures["hang"]
    assert not any(o.transient for o in found)


def _compiled(folder: Path, name: str, body: str) -> str:
    source = folder / f"{name}.c"
    source.write_text(f"volatile int sink; int __tvm_ffi_main(void* s, void* a, int n, void* r) {{ {body} }}")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(folder / f"{name}.so"), str(source)], check=True)
    return str(folder / f"{name}.so")


def test_key_without_servers_is_reported_at_once(farm: Farm, quick: CollectSettings, one_thread: Configuration) -> None:
    with pytest.raises(MeasurementError, match="no server with the key 'rpi4'") as caught:
        RemoteTimers(Tracker("127.0.0.1", farm.port, "rpi4"), one_thread, quick)
    assert "cdmpp.data.measure.board" in caught.value.hint


def test_missing_tracker_is_reported_at_once(quick: CollectSettings, one_thread: Configuration) -> None:
    with socket.socket() as held:  # nobody listens there, and nobody else can
        held.bind(("127.0.0.1", 0))
        nowhere = Tracker("127.0.0.1", held.getsockname()[1], KEY)
        with pytest.raises(MeasurementError, match="no RPC tracker at") as caught:
            RemoteTimers(nowhere, one_thread, quick)
    assert "rpc_tracker" in caught.value.hint


def test_boards_with_another_processor_are_refused(
    farm: Farm, libraries: list[Library], quick: CollectSettings, one_thread: Configuration
) -> None:
    other = replace(one_thread, target={**one_thread.target, "mtriple": "riscv64-linux-gnu"})
    with (
        contextlib.closing(RemoteTimers(farm.at, other, quick)) as timers,
        pytest.raises(InvalidDeviceError, match="not riscv64") as caught,
    ):
        list(timers.time(libraries))
    assert "mtriple" in caught.value.hint


def test_family_of_boards_is_refused(quick: CollectSettings, one_thread: Configuration) -> None:
    family = replace(one_thread, names=("a100-pcie-40gb", "a100-sxm4-40gb"))
    with pytest.raises(InvalidDeviceError, match="a100-pcie-40gb, a100-sxm4-40gb"):
        RemoteTimers(Tracker("127.0.0.1", 9, KEY), family, quick)


@pytest.mark.parametrize("text", ["", "host", "host:", ":9190", "host:x", "host:0", "host:99999"])
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(MeasurementError, match="not the address"):
        parse_tracker(text, KEY)


def test_valid_addresses_are_parsed() -> None:
    assert parse_tracker("board-farm:9190", KEY) == Tracker("board-farm", 9190, KEY)
    assert parse_tracker("[::1]:9190", KEY) == Tracker("::1", 9190, KEY)


class _Session:
    """A session as far as :meth:`_RemoteTimer.time` uses it before it times: it responds or it was lost."""

    def __init__(self, alive: bool) -> None:
        self.alive = alive

    def get_function(self, name: str) -> Callable[[], int]:
        if not self.alive:
            raise RuntimeError("lost")
        return lambda: 1


def test_a_lost_session_leaves_no_later_session_open(
    monkeypatch: pytest.MonkeyPatch, quick: CollectSettings, farm: Farm
) -> None:
    timer = _RemoteTimer(farm.at, "cpu", "x86_64", 1, 30.0, quick.timing)
    opened: list[weakref.ref[_Session]] = []

    def connect(_: float) -> _Session:
        session = _Session(alive=bool(opened))
        opened.append(weakref.ref(session))
        return session

    def measure(session: _Session, library: str, arguments: object) -> str:
        if session.alive:
            return "timed"
        error = RuntimeError("lost")
        error.cycle = error  # type: ignore[attr-defined]  # as TVM's errors
        raise error

    monkeypatch.setattr(timer, "_session", connect)
    monkeypatch.setattr(timer, "_time_in", measure)
    gc.disable()
    try:
        assert timer.time("library.so", ()) == "timed"
        assert [session() for session in opened] == [None, None]
    finally:
        gc.enable()
