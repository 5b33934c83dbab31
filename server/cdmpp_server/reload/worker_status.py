"""What the workers of one service tell each other: how often each was told to reload, and with what end.

One small file for each worker in a folder of the supervisor's. No worker talks to another: whoever wants
all of them to reload asks the supervisor, by SIGHUP, and looks into the folder for what became of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

#: Names the folder to the workers.
FOLDER_VARIABLE = "CDMPP_WORKERS_FOLDER"
_LOOK_EACH_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """A worker after its last reload.

    Attributes
    ----------
    reloads : int
        Since it was started.
    model_id : str
        Who answers now.
    error : str
        Why the last reload was refused; empty where it was not.
    """

    reloads: int
    model_id: str
    error: str = ""


class WorkerStatuses:
    """The workers of a service, seen from one of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_this_process(cls) -> WorkerStatuses | None:
        """None in a service of one process."""
        folder = os.environ.get(FOLDER_VARIABLE)
        return cls(Path(folder)) if folder else None

    def tell(self, outcome: Outcome) -> None:
        """Say how this worker is."""
        path = self._folder / f"{os.getpid()}.json"
        path.with_suffix(".new").write_text(json.dumps(asdict(outcome)))
        path.with_suffix(".new").replace(path)

    def outcomes(self) -> dict[int, Outcome]:
        """All workers that are ready, by process id."""
        found = {}
        for path in self._folder.glob("*.json"):
            try:
                found[int(path.stem)] = Outcome(**json.loads(path.read_text()))
            except (OSError, ValueError):  # it has ended meanwhile
                continue
        return found

    def forget(self, pid: int) -> None:
        """A worker has ended."""
        (self._folder / f"{pid}.json").unlink(missing_ok=True)

    async def reload_all(self, model_id: str, workers: int) -> dict[int, Outcome]:
        """Have every worker reload, and wait until each of ``workers`` has this model or says why not.

        Cancel it to wait no longer.
        """
        before = self.outcomes()
        os.kill(os.getppid(), signal.SIGHUP)
        while True:
            await asyncio.sleep(_LOOK_EACH_S)
            now = self.outcomes()
            # One that is being started has no outcome yet; it loads what is there, or is told to.
            if len(now) >= workers and all(
                said.model_id == model_id or (said.error and said.reloads > _reloads(before.get(pid)))
                for pid, said in now.items()
            ):
                return now


def _reloads(outcome: Outcome | None) -> int:
    return 0 if outcome is None else outcome.reloads
