"""Several processes behind one port: each with a model of its own, replaced when it ends.

uvicorn's supervisor starts, watches and ends them. Here SIGHUP does not replace them but is passed on, so
that each loads the model again while it goes on answering.
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
    """Starts and watches the workers.

    Parameters
    ----------
    config : Config
    sockets : list of socket
        All workers accept connections from them.
    statuses : WorkerStatuses
        What the workers say of themselves.
    """

    def __init__(self, config: Config, sockets: list[socket], statuses: WorkerStatuses) -> None:
        super().__init__(config, sockets)
        self._siblings = statuses
        self._to_reload: list[Process] = []

    def terminate_all(self) -> None:
        """Tell the workers to end."""
        super().terminate_all()
        # With the workers' own copies the last of the port goes. Else connections would still be taken from
        # new clients, by nobody, until this process ends as well.
        for each in self.sockets:
            each.close()

    def handle_hup(self) -> None:
        """Have every worker reload its model."""
        self._to_reload = list(self.processes)
        self._pass_on()

    def keep_subprocess_alive(self) -> None:
        """Replace workers that have ended."""
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        for pid in before - {process.pid for process in self.processes}:
            if pid is not None:
                worker_ended(pid)
                self._siblings.forget(pid)
        self._pass_on()

    def _pass_on(self) -> None:
        # A worker that is being started does not listen to the signal yet: it would end by it.
        running = {pid for pid in self._siblings.outcomes()}
        waiting = []
        for process in self._to_reload:
            if process.pid in running and process.process.is_alive():
                os.kill(process.pid, signal.SIGHUP)
            elif process in self.processes:
                waiting.append(process)
        self._to_reload = waiting


def serve_workers(config: Config) -> bool:
    """Serve with ``config.workers`` processes until interrupted; whether any was ever ready."""
    with tempfile.TemporaryDirectory(prefix="cdmpp-workers-") as folder, shared_by_workers():
        os.environ[FOLDER_VARIABLE] = folder
        statuses = WorkerStatuses(Path(folder))
        try:
            Supervisor(config, [config.bind_socket()], statuses).run()
            return bool(statuses.outcomes())
        finally:
            del os.environ[FOLDER_VARIABLE]
