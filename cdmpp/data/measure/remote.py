"""Timing on boards behind TVM's RPC tracker: one program at a time on each server with the key.

Every program has its own session, as in TVM's runner. The server ends the session at its time limit, a crash
affects only that session, and the tracker may assign the board to another client between two programs.
"""

from __future__ import annotations

import os
import platform
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cdmpp.data.measure.board import MACHINE, Tracker, no_server
from cdmpp.data.measure.building import Library, host_triple, import_tvm_alone
from cdmpp.data.measure.pools import Outcome, WorkerPool, WorkerSettings
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.targets import Configuration
from cdmpp.data.measure.timing import Arguments, Clock, Inputs, TimedRun, TimingSettings, time_program
from cdmpp.errors import InvalidDeviceError, MeasurementError

#: Number of lost sessions after which the program counts as the cause.
SESSIONS = 2
_QUEUE_S = 30.0
#: Families of processors by the prefixes of their names; a program is built for one family.
_FAMILIES = {"x86": ("x86", "amd64", "i386", "i486", "i586", "i686"), "ARM": ("arm", "aarch64")}
_BIG_CORES = 1  # tvm::runtime::threading::ThreadGroup::AffinityMode


class RemoteTimers:
    """One worker per server with the key; see :class:`cdmpp.data.measure.timers.Timers`. A server on another kind of
    processor is found when the first program runs: an InvalidDeviceError."""

    def __init__(self, tracker: Tracker, configuration: Configuration, settings: CollectSettings) -> None:
        self.tracker = tracker
        if len(configuration.names) > 1:
            raise InvalidDeviceError(
                f"the boards may be any of {', '.join(configuration.names)}",
                hint="name the board: --device NAME or FILE.toml",
            )
        workers = tracker.servers()
        if not workers:
            raise no_server(tracker)
        # The session's limit ends a program that hangs; this limit ends a worker that hangs.
        limits = WorkerSettings(
            tracker.wait_s + 2 * SESSIONS * settings.time_limit_s,
            memory_bytes=int(settings.memory_gib * 2**30),
            environment={"TVM_USE_RUNTIME_LIB": "1", "TVM_NUM_THREADS": "1"},
            log=settings.log,
        )
        processor = host_triple(configuration.target).split("-")[0] or platform.machine()
        kinds = (configuration.device_kind, processor)
        about = (configuration.threads, settings.time_limit_s, settings.timing)
        self._pool = WorkerPool(workers, limits, _prepare, (tracker, *kinds, *about))

    def ready(self) -> None:
        """See :class:`Timers`; work on this machine does not disturb the boards."""

    def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
        """Outcomes in the order of the libraries, measured on all boards at once. A MeasurementError if the tracker or
        the last server is lost."""
        tasks = [(library.path, library.arguments) for library in libraries]
        for outcome in self._pool.run(_time_remotely, tasks):
            # Programs run elsewhere: a worker that hangs or dies is not the fault of its program.
            unlucky = outcome.failure.startswith(("timeout:", "crash:"))
            if (outcome.transient or unlucky) and not self.tracker.servers():
                raise no_server(self.tracker)
            yield replace(outcome, transient=True) if unlucky else outcome

    def close(self) -> None:
        """End the workers and their sessions."""
        self._pool.close()


class _RemoteTimer:
    """Times libraries on boards of a tracker, in a worker process."""

    def __init__(
        self, tracker: Tracker, kind: str, processor: str, threads: int, time_limit_s: float, settings: TimingSettings
    ) -> None:
        self.tracker, self.kind, self.processor, self.threads = tracker, kind, processor, threads
        self.time_limit_s, self.settings = time_limit_s, settings

    def time(self, library: str, arguments: Arguments) -> TimedRun:
        """Time one library; use a second session if the first was lost."""
        deadline = time.monotonic() + self.tracker.wait_s
        for _ in range(SESSIONS):
            session = self._session(deadline)
            try:
                return self._time_in(session, library, arguments)
            except Exception as error:
                # TVM's errors belong to reference cycles: their frames would keep the session open, and its board
                # busy, until the next garbage collection.
                traceback.clear_frames(error.__traceback__)
                if type(error).__name__ == "RPCSessionTimeoutError":
                    raise MeasurementError(
                        f"longer than {self.time_limit_s:g} s on the board", hint="see --time-limit-s"
                    ) from None
                if isinstance(error, MeasurementError) or _alive(session):
                    raise
            finally:
                del session  # the frame of this method may belong to such a cycle too
        # The program was running each time a session was lost: it probably crashes the server.
        self.tracker.servers()  # raises if the tracker is lost as well
        raise MeasurementError(
            f"the session was lost {SESSIONS} times while it ran", hint="check whether the program crashes"
        )

    def _time_in(self, session: Any, library: str, arguments: Arguments) -> TimedRun:
        self._compare(session)
        if self.kind == "cpu":
            session.get_function("runtime.config_threadpool")(_BIG_CORES, self.threads)
        device = session.device(self.kind, 0)
        # This is the only way to find that the board lacks this kind of device.
        if not device.exist:
            raise MeasurementError(
                f"the board has no {self.kind} device", hint="check that it is registered with the right --key"
            )
        started = time.perf_counter()
        # Several workers may share a board's folder: the process id makes the name unique.
        name = f"{os.getpid()}-{Path(library).name}"
        session.upload(library, target=name)
        try:
            module = session.load_module(name)
            clock = Clock(module, device, Inputs(device).of(arguments), self.settings, started)
            return clock.finish(time_program(clock, self.settings))
        finally:
            if _alive(session):
                session.remove(name)

    def _compare(self, session: Any) -> None:
        """Raise if the board's processor differs from that of the built programs."""
        try:
            board = _family(str(session.get_function(MACHINE)()))
        except Exception:  # TVM's own server has no such function
            return
        if board != _family(self.processor):
            raise InvalidDeviceError(
                f"a server with the key {self.tracker.key!r} runs on {board}, not {self.processor}",
                hint="name the boards' processor in --target (mtriple), or another --key",
            )

    def _session(self, deadline: float) -> Any:
        """A session on a free board. The error passes if none became free in time, or the tracker is gone."""
        from tvm import rpc

        last_seen = time.monotonic()
        while time.monotonic() < deadline:
            try:
                # Ask again each time: TVM's client would wait without end for a key that nobody serves.
                servers = self.tracker.servers()
                last_seen = time.monotonic()
            except MeasurementError:
                if time.monotonic() > last_seen + self.tracker.patience_s:
                    raise
                servers = 0
            if not servers:
                time.sleep(0.5)
                continue
            # For the client's Python sockets; sessions use C++ sockets.
            socket.setdefaulttimeout(_QUEUE_S)
            try:
                client = rpc.connect_tracker(self.tracker.host, self.tracker.port)
                return client.request(self.tracker.key, session_timeout=self.time_limit_s, max_retry=1)
            except (RuntimeError, OSError):  # no board was free, or the server has just ended
                time.sleep(0.1)
            finally:
                socket.setdefaulttimeout(None)
        if not self.tracker.servers():
            raise no_server(self.tracker)
        raise MeasurementError(
            f"no board of {self.tracker.key!r} was free for {self.tracker.wait_s:g} s",
            hint="they may be in use; repeat the same command to resume",
            transient=True,
        )


def _family(processor: str) -> str:
    name = processor.casefold()
    return next((family for family, heads in _FAMILIES.items() if name.startswith(heads)), name)


def _alive(session: Any) -> bool:
    """Whether a session still responds."""
    try:
        session.get_function("runtime.NumThreads")()
    except Exception:  # TVM raises various errors for a lost peer
        return False
    return True


#: The timer of a worker; :func:`_prepare` makes it.
_timer: _RemoteTimer


def _prepare(*arguments: Any) -> None:
    global _timer
    import_tvm_alone()
    _timer = _RemoteTimer(*arguments)


def _time_remotely(library: str, arguments: Arguments) -> TimedRun:
    return _timer.time(library, arguments)
