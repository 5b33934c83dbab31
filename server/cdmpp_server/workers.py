"""Several server processes behind one port, each with its own model.

uvicorn's supervisor starts, monitors, replaces and ends the processes. Unlike uvicorn, this supervisor
forwards SIGHUP: each process loads its model again and keeps serving meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import socket

from uvicorn import Config
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from cdmpp_server.operate.metrics import shared_by_workers, worker_ended

#: Environment variable with the path of the folder.
FOLDER_VARIABLE = "CDMPP_WORKERS_FOLDER"
_POLL_S = 0.05
#: The signal is sent again after so many polls: a worker that was replaced meanwhile may not have seen the first.
_POLLS_OF_A_SIGNAL = 300


@dataclass(frozen=True)
class WorkerStatus:
    """Status of a worker after its last reload."""

    #: Number of reloads since the worker was started.
    reloads: int
    #: Id of the loaded base model.
    model_id: str
    #: Reason for which the last reload was refused, else empty.
    error: str = ""


class WorkerStatuses:
    """The folder of status files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_this_process(cls) -> WorkerStatuses | None:
        """Return the folder; None in a service of one process."""
        folder = os.environ.get(FOLDER_VARIABLE)
        return cls(Path(folder)) if folder else None

    def write(self, status: WorkerStatus) -> None:
        """Write the status of this worker."""
        path = self._folder / f"{os.getpid()}.json"
        path.with_suffix(".new").write_text(json.dumps(asdict(status)))
        path.with_suffix(".new").replace(path)

    def read(self) -> dict[int, WorkerStatus]:
        """Return the statuses of the workers that are ready, by process id."""
        statuses = {}
        for path in self._folder.glob("*.json"):
            try:
                statuses[int(path.stem)] = WorkerStatus(**json.loads(path.read_text()))
            except (OSError, ValueError):  # the worker has ended meanwhile
                continue
        return statuses

    def forget(self, pid: int) -> None:
        """Remove the status of a worker that has ended."""
        (self._folder / f"{pid}.json").unlink(missing_ok=True)

    async def reload_all(self, model_id: str, workers: int) -> dict[int, WorkerStatus]:
        """Reload every worker; return once each of ``workers`` has this model or has refused it.

        Cancel the call to stop waiting.
        """
        before = self.read()
        polls = 0
        while True:
            if polls % _POLLS_OF_A_SIGNAL == 0:
                os.kill(os.getppid(), signal.SIGHUP)
            polls += 1
            await asyncio.sleep(_POLL_S)
            now = self.read()
            # A worker that is starting has no status yet. It loads the new folder, or receives SIGHUP later.
            if len(now) >= workers and all(
                status.model_id == model_id
                or (status.error and status.reloads > getattr(before.get(pid), "reloads", 0))
                for pid, status in now.items()
            ):
                return now


class Supervisor(Multiprocess):
    """Starts and monitors the workers.

    ``sockets``: listening sockets, shared by all workers. ``statuses``: statuses that the workers write.
    """

    def __init__(self, config: Config, sockets: list[socket], statuses: WorkerStatuses) -> None:
        super().__init__(config, sockets)
        self._statuses = statuses
        self._to_reload: list[Process] = []

    def terminate_all(self) -> None:
        """Ask the workers to end."""
        super().terminate_all()
        # The port closes with its last copy. If this process kept one, the system would accept connections
        # that no worker serves until this process ends.
        for listener in self.sockets:
            listener.close()

    def handle_hup(self) -> None:
        """Ask every worker to reload its model."""
        self._to_reload = list(self.processes)
        self._forward_hup()

    def keep_subprocess_alive(self) -> None:
        """Replace workers that have ended."""
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        for pid in before - {process.pid for process in self.processes}:
            if pid is not None:
                worker_ended(pid)
                self._statuses.forget(pid)
        self._forward_hup()

    def _forward_hup(self) -> None:
        # SIGHUP would end a worker that is still starting: it has no handler yet.
        running = self._statuses.read()
        waiting = []
        for process in self._to_reload:
            if process.pid in running and process.process.is_alive():
                os.kill(process.pid, signal.SIGHUP)
            elif process in self.processes:
                waiting.append(process)
        self._to_reload = waiting


def serve_workers(config: Config, sockets: list[socket]) -> bool:
    """Serve these sockets with ``config.workers`` processes until interrupted; return whether any was ever ready."""
    with tempfile.TemporaryDirectory(prefix="cdmpp-workers-") as folder, shared_by_workers():
        os.environ[FOLDER_VARIABLE] = folder
        statuses = WorkerStatuses(Path(folder))
        try:
            Supervisor(config, sockets, statuses).run()
            return bool(statuses.read())
        finally:
            del os.environ[FOLDER_VARIABLE]
