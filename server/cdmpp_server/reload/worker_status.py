"""Status files of the workers of one service: number of reloads, and result of the last one.

Each worker writes a small file in a folder that the supervisor creates. To reload all workers, one worker
sends SIGHUP to the supervisor and reads the results from the folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

#: Environment variable with the path of the folder.
FOLDER_VARIABLE = "CDMPP_WORKERS_FOLDER"
_POLL_S = 0.05


@dataclass(frozen=True)
class WorkerStatus:
    """Status of a worker after its last reload.

    Attributes
    ----------
    reloads : int
        Number of reloads since the worker was started.
    model_id : str
        Id of the loaded base model.
    error : str
        Reason for which the last reload was refused, else empty.
    """

    reloads: int
    model_id: str
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
        os.kill(os.getppid(), signal.SIGHUP)
        while True:
            await asyncio.sleep(_POLL_S)
            now = self.read()
            # A worker that is starting has no status yet. It loads the new folder, or receives SIGHUP later.
            if len(now) >= workers and all(
                status.model_id == model_id or (status.error and status.reloads > _reloads(before.get(pid)))
                for pid, status in now.items()
            ):
                return now


def _reloads(status: WorkerStatus | None) -> int:
    return 0 if status is None else status.reloads
