"""The base model and the adapted models: a bounded number in memory, and on disk if a folder is set."""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections import OrderedDict
from pathlib import Path

from cdmpp.artifact.folder import default_model
from cdmpp.artifact.load import load_artifact
from cdmpp.errors import CdmppError
from cdmpp.lru import Lru
from cdmpp.predictor import CachedRow, LatencyPredictor
from cdmpp_server.problems import ProblemError

_log = logging.getLogger(__name__)


#: Name, size and modification time of each file of a model folder.
Fingerprint = tuple[tuple[str, int, int], ...]


def load_model(path: Path | None, cache: Lru[CachedRow] | None = None) -> LatencyPredictor:
    """Load the predictor of a model folder; None: the model in the package.

    Parameters
    ----------
    path : Path or None
    cache : Lru, optional
        Predictions, shared by all models of a service.

    Raises
    ------
    ArtifactError
    """
    return LatencyPredictor(load_artifact(path or default_model()), cache=cache)


def fingerprint(folder: Path | None) -> Fingerprint:
    """Fingerprint that changes with the files of a model folder; empty if it cannot be read."""
    try:
        files = sorted(path for path in (folder or default_model()).rglob("*") if path.is_file())
        return tuple((path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files)
    except OSError:
        return ()


class Models:
    """Models by id. Thread-safe.

    Parameters
    ----------
    base : LatencyPredictor
        Used by requests that name no model.
    most : int
        Maximum number of adapted models in memory, and of folders on disk; the least recently used is
        removed first.
    folder : Path, optional
        Keeps adapted models over a restart. The folders are named by a hash, never by a client's text. A
        name that is not in memory is compared with their manifests and never opened as a path.
    """

    def __init__(self, base: LatencyPredictor, most: int, folder: Path | None = None) -> None:
        self.base = base
        self._most, self._folder = most, folder
        self._adapted: OrderedDict[str, LatencyPredictor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, model_id: str | None) -> LatencyPredictor:
        """Return the model with this id; the base model for None.

        Raises
        ------
        ProblemError
            404 if there is no such model, or no longer.
        """
        predictor = self.in_memory(model_id)
        if predictor is not None:
            return predictor
        predictor = self._stored(model_id or "")
        if predictor is None:
            raise ProblemError(
                "unknown_model",
                f"no model {(model_id or '')[:200]!r} is loaded",
                "GET /models lists the models; old adapted models are removed, POST /adapt creates them again",
            )
        self._remember(predictor)
        return predictor

    def replace(self, base: LatencyPredictor) -> None:
        """Set the base model; adapted models stay unchanged."""
        self.base = base

    def in_memory(self, model_id: str | None) -> LatencyPredictor | None:
        """Return the model with this id if it is in memory."""
        base = self.base
        if model_id is None or model_id == base.model_id:
            return base
        with self._lock:
            if model_id in self._adapted:
                self._adapted.move_to_end(model_id)
            return self._adapted.get(model_id)

    def add(self, adapted: LatencyPredictor) -> None:
        """Keep an adapted model in memory, and on disk if a folder is set."""
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
                # The client can use the model until the process ends; the log reports the fault.
                _log.exception("an adapted model could not be saved in %s", self._folder)

    def every(self) -> list[LatencyPredictor]:
        """Return the base model, then the adapted models in memory, most recent first."""
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
                stored = load_model(path, self.base.cache)
                if stored.model_id == model_id:
                    return stored
                _log.warning("the adapted model in %s was written by an older version: adapt again", path)
            except CdmppError as error:
                _log.warning("the adapted model in %s is not used: %s", path, error)
        return None


def _name(model_id: str) -> str:
    return hashlib.sha256(model_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
