"""Runs of the studies: one JSON file per run, shared by all studies that name the same run."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.results import rounded
from benchmarks.schedules.methods import Contest, figures
from benchmarks.schedules.parts import Scheduled, Split
from benchmarks.schedules.variants import Variant, prepared
from cdmpp.train.checkpoint import identity_of
from cdmpp.train.config import TrainConfig
from cdmpp.utils.writing import replacing


class Run:
    """One training of one variant.

    Its key is a hash of everything that decides its result: configuration, data, parts, columns and test rows.
    Therefore two variants with the same content are one run, and a run on other data is another one.

    Parameters
    ----------
    data : Scheduled
    split : Split
    config : TrainConfig
    variant : Variant
    seed : int
    folder : Path
        Folder of the runs.
    """

    def __init__(
        self, data: Scheduled, split: Split, config: TrainConfig, variant: Variant, seed: int, folder: Path
    ) -> None:
        self.contest = Contest(*prepared(data, split, config, variant, seed))
        self.key = content_key(self.contest, variant.without)
        self.folder = folder / self.key
        self.file = folder / f"{self.key}.json"

    def result(self) -> dict[str, Any]:
        """Figures of the run, which is trained unless its file exists.

        Returns
        -------
        dict
            ``train_rows``, ``train_tasks``, ``figures`` by test.
        """
        return stored(self.file, self._train)

    def _train(self) -> dict[str, Any]:
        contest = self.contest
        predict = contest.predicts([contest.network(self.folder)])
        trained = contest.dataset.rows.program[contest.train]
        found = {}
        for name, index in contest.split.tests.items():
            rows = contest.dataset.rows.take(index)
            found[name] = figures(contest.dataset, rows, predict(rows))
        return {
            "train_rows": len(contest.train),
            "train_tasks": len(np.unique(contest.dataset.task[trained])),
            "figures": found,
        }


def content_key(contest: Contest, *further: str) -> str:
    """Hash of a contest's configuration, data, parts and test rows."""
    digest = hashlib.sha256(json.dumps([identity_of(contest.dataset, contest.config), *further]).encode())
    for name, index in sorted(contest.split.tests.items()):
        digest.update(name.encode() + index.astype(np.int64).tobytes())
    return digest.hexdigest()[:16]


def stored(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Content of a JSON file, which is made if it does not exist."""
    if file.is_file():
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content
    result: dict[str, Any] = rounded(make())
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as aside:
        aside.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


@contextmanager
def claimed(file: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a run so that two processes do not make it twice; the lock ends with its process.

    Yields False, without ``wait``, where another process has the lock.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
