"""The loaded model and those adapted from it: a bounded number in memory, on disk only where told so."""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections import OrderedDict
from pathlib import Path

from cdmpp.artifact.folder import default_model, read_manifest
from cdmpp.artifact.load import load_artifact
from cdmpp.errors import CdmppError
from cdmpp.predictor import LatencyPredictor
from cdmpp_server.problems import ProblemError

_log = logging.getLogger(__name__)


#: Answers that a predictor remembers; the service has a cache of its own before it.
_CACHE_ROWS = 4096
#: Size and time of change of each file of a model folder.
Fingerprint = tuple[tuple[str, int, int], ...]


def load_model(path: Path | None) -> LatencyPredictor:
    """The predictor of a model folder; None: the one that ships with the package.

    Raises
    ------
    ArtifactError
    """
    return LatencyPredictor(load_artifact(path or default_model()), cache_rows=_CACHE_ROWS)


def fingerprint(folder: Path | None) -> Fingerprint:
    """What tells whether a model folder has changed; empty where it cannot be read."""
    try:
        files = sorted(path for path in (folder or default_model()).rglob("*") if path.is_file())
        return tuple((path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files)
    except OSError:
        return ()


class Models:
    """Models by their identity. Safe between threads.

    Parameters
    ----------
    base : LatencyPredictor
        Answers where no model is named.
    most : int
        Adapted models kept in memory, and folders kept on disk; the least recently used goes first.
    folder : Path, optional
        Where adapted models are kept over a restart. Folders are named by a hash, never by what a client
        sent, and a name that was not found here is looked up in their manifests, never opened as a path.
    """

    def __init__(self, base: LatencyPredictor, most: int, folder: Path | None = None) -> None:
        self.base = base
        self._most, self._folder = most, folder
        self._adapted: OrderedDict[str, LatencyPredictor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, model_id: str | None) -> LatencyPredictor:
        """The model of this identity; the base for None.

        Raises
        ------
        ProblemError
            404: no such model, or no longer.
        """
        found = self.in_memory(model_id)
        if found is not None:
            return found
        found = self._stored(model_id or "")
        if found is None:
            raise ProblemError(
                "unknown_model",
                f"no model {(model_id or '')[:200]!r} is loaded",
                "GET /models lists them; the oldest adapted ones are forgotten, POST /adapt makes them anew",
            )
        self._remember(found)
        return found

    def replace(self, base: LatencyPredictor) -> None:
        """Answer with another model where none is named; adapted ones stay as they are."""
        self.base = base

    def in_memory(self, model_id: str | None) -> LatencyPredictor | None:
        """The model of this identity where no file has to be read for it."""
        base = self.base
        if model_id is None or model_id == base.model_id:
            return base
        with self._lock:
            if model_id in self._adapted:
                self._adapted.move_to_end(model_id)
            return self._adapted.get(model_id)

    def add(self, adapted: LatencyPredictor) -> None:
        """Keep an adapted model, in memory and where a folder was set on disk."""
        self._remember(adapted)
        if self._folder is None:
            return
        with self._lock:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                adapted.save(self._folder / _name(adapted.model_id))
                folders = sorted(self._folders(), key=lambda path: path.stat().st_mtime)
                for old in folders[: max(0, len(folders) - self._most)]:
                    shutil.rmtree(old)
            except (CdmppError, OSError):
                # The client has its model; that it will not outlive the process is the operator's matter.
                _log.exception("an adapted model could not be kept in %s", self._folder)

    def every(self) -> list[LatencyPredictor]:
        """The base, then the adapted models in memory, the latest first."""
        with self._lock:
            return [self.base, *reversed(self._adapted.values())]

    def _remember(self, adapted: LatencyPredictor) -> None:
        with self._lock:
            self._adapted[adapted.model_id] = adapted
            self._adapted.move_to_end(adapted.model_id)
            while len(self._adapted) > self._most:
                self._adapted.popitem(last=False)

    def _folders(self) -> list[Path]:
        if self._folder is None or not self._folder.is_dir():
            return []
        return [path for path in self._folder.iterdir() if len(path.name) == 32 and path.is_dir()]

    def _stored(self, model_id: str) -> LatencyPredictor | None:
        for path in self._folders():
            if path.name != _name(model_id):
                continue
            try:
                if read_manifest(path).get("model_id") == model_id:
                    return load_model(path)
            except CdmppError as error:
                _log.warning("the adapted model in %s is not used: %s", path, error)
        return None


def _name(model_id: str) -> str:
    return hashlib.sha256(model_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
