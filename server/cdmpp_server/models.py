"""The base model and the adapted models: a bounded number in memory, and on disk if a folder is set."""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from cdmpp.errors import CdmppError
from cdmpp.model.artifact.folder import MANIFEST, default_model
from cdmpp.model.artifact.load import load_artifact
from cdmpp.predict.predictor import CachedRow, LatencyPredictor
from cdmpp.utils.lru import Lru
from cdmpp_server.concurrency import excess
from cdmpp_server.problems import ProblemError

_log = logging.getLogger(__name__)
T = TypeVar("T")


#: Name, size and modification time of each file of a model folder.
Fingerprint = tuple[tuple[str, int, int], ...]


def load_model(path: Path | None, cache: Lru[CachedRow] | None = None) -> LatencyPredictor:
    """Load the predictor of a model folder; None: the model in the package.

    ``cache``: predictions, shared by all models of a service.
    Raises ArtifactError: the folder holds no valid model.
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

    ``base``: used by requests that name no model. ``max_adapted``: of models in memory, and of folders on disk. The
    owners with most lose their least recently used model in memory, and their oldest on disk. ``folder``: keeps adapted
    models over a restart, in a folder for each owner. The folders are named by a hash, never by a
    client's text. A name that is not in memory is compared with their manifests and never opened as a path.
    """

    def __init__(self, base: LatencyPredictor, max_adapted: int, folder: Path | None = None) -> None:
        self.base = base
        self._most, self._folder = max_adapted, folder
        self._adapted: OrderedDict[str, tuple[str, LatencyPredictor]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, model_id: str | None) -> LatencyPredictor:
        """Return the model with this id; the base model for None.

        Raises ProblemError: 404 if there is no such model, or no longer.
        """
        predictor = self.in_memory(model_id)
        if predictor is not None:
            return predictor
        stored = self._stored(model_id or "")
        if stored is None:
            raise ProblemError(
                "unknown_model",
                f"no model {(model_id or '')[:200]!r} is loaded",
                "GET /models lists the models; old adapted models are removed, POST /adapt creates them again",
            )
        self._remember(*stored)
        return stored[1]

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
            entry = self._adapted.get(model_id)
            return None if entry is None else entry[1]

    def add(self, adapted: LatencyPredictor, owner: str) -> None:
        """Keep an adapted model in memory, and on disk if a folder is set.

        ``owner``: sender that made it, as 32 hexadecimal digits. All senders may use the model. To make room for it,
        models of its owner are removed, unless another owner has more.
        """
        self._remember(owner, adapted)
        if self._folder is None:
            return
        with self._lock:
            try:
                folder = self._folder / owner
                folder.mkdir(parents=True, exist_ok=True)
                adapted.save(folder / _name(adapted.model_id))
                self._drop_folders()
            except (CdmppError, OSError):
                # The client can use the model until the process ends; the log reports the fault.
                _log.exception("an adapted model could not be saved in %s", self._folder)

    def every(self) -> list[LatencyPredictor]:
        """Return the base model, then the adapted models in memory, most recent first."""
        with self._lock:
            return [self.base, *(predictor for _, predictor in reversed(self._adapted.values()))]

    def _remember(self, owner: str, adapted: LatencyPredictor) -> None:
        with self._lock:
            # The first sender that made a model owns it.
            first = self._adapted.get(adapted.model_id)
            self._adapted[adapted.model_id] = owner if first is None else first[0], adapted
            self._adapted.move_to_end(adapted.model_id)
            for id in _surplus([(owner, id) for id, (owner, _) in self._adapted.items()], self._most):
                del self._adapted[id]

    def _drop_folders(self) -> None:
        oldest_first = sorted(self._folders(), key=lambda path: path.stat().st_mtime_ns)
        for path in _surplus([(path.parent.name, path) for path in oldest_first], self._most):
            shutil.rmtree(path)
            with suppress(OSError):  # it has other models
                path.parent.rmdir()

    def _folders(self) -> list[Path]:
        """Folders of models: those of the present version by owner, and those of an earlier one, which has none."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return [path.parent for path in self._folder.glob(f"**/{MANIFEST}") if len(path.parent.name) == 32]

    def _stored(self, model_id: str) -> tuple[str, LatencyPredictor] | None:
        """A model on disk with its owner."""
        for path in self._folders():
            if path.name != _name(model_id):
                continue
            try:
                stored = load_model(path, self.base.cache)
                if stored.model_id == model_id:
                    return path.parent.name, stored
                _log.warning("the adapted model in %s was written by an older version: adapt again", path)
            except CdmppError as error:
                _log.warning("the adapted model in %s is not used: %s", path, error)
        return None


def _surplus(owned: Sequence[tuple[str, T]], places: int) -> list[T]:
    """Models to remove, of pairs (owner, model), oldest first."""
    numbers: dict[str, int] = {}
    for owner, _ in owned:  # moved to the end: of owners with equally many, the one without a recent model is first
        numbers[owner] = numbers.pop(owner, 0) + 1
    given_up = excess(numbers, places)
    dropped = []
    for owner, model in owned:
        if given_up.get(owner, 0) > 0:
            given_up[owner] -= 1
            dropped.append(model)
    return dropped


def _name(model_id: str) -> str:
    return hashlib.sha256(model_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
