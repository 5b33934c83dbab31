"""Result files of the kit as they come home."""

from __future__ import annotations

import datetime
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.errors import DataError

#: Clocks may exceed the nominal boost clock, and with it the peak, by this factor.
PEAK_SLACK = 1.1


@dataclass(frozen=True)
class Results:
    """A result file.

    Attributes
    ----------
    path : Path
    head : dict
        Format, job, kind, part, number of parts and items, device, unit.
    machines : list of dict
        Description of the machine, one for each call of ``run.py``.
    items : list of dict
        Results: "id", "failure", "repeats_s" (protocol to tuple of seconds), "call", and the fields of the kind.
    """

    path: Path
    head: dict[str, Any]
    machines: list[dict[str, Any]]
    items: list[dict[str, Any]]

    def machine(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the description of the machine at the time of an item."""
        machine: dict[str, Any] = self.machines[item["call"]]
        return machine


def read_results(path: Path) -> Results:
    """Return a result file.

    Raises
    ------
    DataError
        It is not a result file, or is damaged.
    """
    try:
        with path.open("rb") as content, np.load(content) as arrays:
            head = json.loads(str(arrays["head"]))
            machines = json.loads(str(arrays["machine"]))
            fields = [json.loads(text) for text in arrays["fields"].tolist()]
            ids, failures = arrays["ids"].tolist(), arrays["failures"].tolist()
            repeats: list[dict[str, tuple[float, ...]]] = [{} for _ in ids]
            offsets, values = arrays["offsets"].tolist(), arrays["repeats_s"]
            for i, owner in enumerate(arrays["owners"].tolist()):
                protocol = str(arrays["protocols"][i])
                repeats[owner][protocol] = tuple(values[offsets[i] : offsets[i + 1]].tolist())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist", hint="name the result files: DIR/*.npz") from None
    except (OSError, ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a result file, or is damaged: {error}", hint="copy it again") from None
    items = [
        {**rest, "id": name, "failure": failure, "repeats_s": taken}
        for name, failure, rest, taken in zip(ids, failures, fields, repeats, strict=True)
    ]
    return Results(path, head, machines, items)


def moment(seconds: float) -> str:
    """Return a time in seconds since 1970 as UTC text."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
