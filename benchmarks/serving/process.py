"""The server in a separate process, and its memory use."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON = {"Content-Type": "application/json"}


def free_port() -> int:
    """A free port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


@dataclass
class Served:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of one request; 0 and None without a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), JSON)
            response = connection.getresponse()
            text = response.read()
            return response.status, json.loads(text) if text[:1] in (b"{", b"[") else text.decode()
        except OSError:
            return 0, None
        finally:
            connection.close()

    def processes(self) -> list[int]:
        """The server and what it started."""
        pids, left = [], [self.process.pid]
        while left:
            pid = left.pop()
            pids.append(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    left += map(int, children.read_text().split())
        return pids

    def resident_bytes(self, only_server: bool = False) -> int:
        """Resident memory of all of them, or of the first process alone."""
        total = 0
        for pid in [self.process.pid] if only_server else self.processes():
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total

    def kill(self) -> None:
        """kill -9, the server and what it started."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def running(
    *arguments: str, environment: Mapping[str, str] | None = None, ready_s: float = 120.0, log: Path | None = None
) -> Iterator[Served]:
    """``python -m cdmpp_server`` on a free port with a database of its own, ended with the block.

    What it logs goes to the file ``log``, or nowhere.
    """
    port = free_port()
    command = [sys.executable, "-m", "cdmpp_server", "--port", str(port), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"CDMPP_DATABASE": f"{folder}/service.sqlite", **(environment or {})}
        with open(log or os.devnull, "wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **settings})
        served = Served(port, process)
        try:
            deadline = time.monotonic() + ready_s
            while served.ask("GET", "/readyz")[0] != 200:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not get ready: {' '.join(command)}")
                time.sleep(0.1)
            yield served
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            served.kill()
