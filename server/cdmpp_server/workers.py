"""Several server processes behind one port, each with its own model.

uvicorn's supervisor starts, monitors, replaces and ends the processes. Unlike uvicorn, this supervisor
forwards SIGHUP: each process loads its model again and keeps serving meanwhile.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from socket import socket

from uvicorn import Config
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from cdmpp_server.operate.metrics import shared_by_workers, worker_ended
from cdmpp_server.reload.worker_status import FOLDER_VARIABLE, WorkerStatuses


class Supervisor(Multiprocess):
    """Starts and monitors the workers.

    Parameters
    ----------
    config : Config
    sockets : list of socket
        Listening sockets, shared by all workers.
    statuses : WorkerStatuses
        Statuses that the workers write.
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
