"""Finished searches on disk: an interrupted benchmark goes on with the next one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdmpp.utils.writing import replacing

#: Cost models that do not depend on the predictor.
_WITHOUT_MODEL = ("random", "xgboost")


class FinishedSearches:
    """Searches of one device, one model and one kind of search.

    Parameters
    ----------
    folder : path
    device : str
        Device that measures.
    model_id : str
        Model of the predictor.
    label : str
        Trials and settings of the searches.
    """

    def __init__(self, folder: Path, device: str, model_id: str, label: str) -> None:
        self._folder, self._device, self._model_id, self._label = folder, device, model_id, label

    def find(self, task: str, method: str, seed: int) -> dict[str, Any] | None:
        """Return a finished search; None if there is none of this device and model."""
        try:
            search: dict[str, Any] = json.loads(self._file(task, method, seed).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        same_model = method in _WITHOUT_MODEL or search["model_id"] == self._model_id
        return search if same_model and search["device"] == self._device else None

    def add(self, search: Mapping[str, Any]) -> dict[str, Any]:
        """Write a finished search; returns it with device and model."""
        complete = dict(search) | {"device": self._device, "model_id": self._model_id}
        with replacing(self._file(search["task"], search["method"], search["seed"])) as aside:
            aside.write_text(json.dumps(complete), encoding="utf-8")
        return complete

    def _file(self, task: str, method: str, seed: int) -> Path:
        return self._folder / f"{task}-{method}-{seed}-{self._label}.json".replace(" ", "-")
