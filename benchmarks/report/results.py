"""Result files of the accuracy studies: their paths, their commands, reading and writing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdmpp.errors import DataError
from cdmpp.utils.writing import write_text

#: Digits kept of a fraction: a hundredth of a per cent.
DIGITS = 4


@dataclass(frozen=True)
class StudyFile:
    """A result file."""

    #: Relative to the repository.
    path: str
    #: Command that writes it; ``DIR`` is the folder of the public tables.
    command: str
    #: Key of the file's part that is the result; empty: the whole file. The study was not run if the part is empty.
    part: str = ""

    @property
    def public(self) -> bool:
        """Whether it reads the public tables."""
        return " DIR" in self.command


#: Groups of similar devices that are left out of training together. ``t4-bx00`` and ``hopper`` are measured for the
#: present model; the others' figures are those of the former one.
GROUPS = {
    "a100": ("a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm4-80gb"),
    "v100-l40s": ("v100-pcie-32gb", "v100-sxm2-32gb", "l40s"),
    "t4-bx00": ("t4", "b200", "b300", "gb200", "gb300"),
    "p100-rtx-pro": ("p100-pcie-16gb", "rtx-pro-6000-server"),
    "hopper": ("h100-sxm", "h200", "h800"),
}
MANIFEST = "models/base/manifest.json"


def _study(name: str, options: str = "--public-data DIR") -> StudyFile:
    """A study of ``python -m benchmarks.NAME``, or of its subcommand."""
    result = f"benchmarks/results/{name.replace(' ', '_')}.json"
    return StudyFile(result, f"python -m benchmarks.{name} {options}".strip())


_MODEL = "--public-data DIR --out models/base"
#: In the order in which they are run: the model first, for other studies read it.
STUDIES: dict[str, StudyFile] = {
    "model": StudyFile("models/base/errors.json", f"cdmpp train --config configs/base.toml {_MODEL}"),
    "shapes": _study("unseen_shapes"),
    "devices": _study("leave_one_device_out"),
    "collectives": StudyFile("models/base/collectives.json", f"python -m cdmpp.train.collectives {_MODEL}", "metrics"),
    "collective_baselines": _study("collectives"),
    "schedules": _study("schedules", ""),
    "schedules_gpu": _study("schedules gpu"),
    "schedules_study": _study("schedules study"),
    "schedules_device": _study("schedules device", "--device intel-xeon-emerald-rapids --model FOLDER"),
    "schedules_search": _study("schedules search"),
}


class Results:
    """Results of the studies that have been run.

    ``contents``: contents of the result files, by study name (:data:`STUDIES`). A study that is absent was not run.
    ``model_id``: identifier of the shipped model. ``manifest``: of the shipped model; empty without one.
    """

    def __init__(
        self, contents: Mapping[str, dict[str, Any]], model_id: str = "", manifest: Mapping[str, Any] | None = None
    ) -> None:
        self._contents, self.model_id = dict(contents), model_id
        self.manifest = dict(manifest or {})

    @classmethod
    def load(cls, root: Path) -> Results:
        """Read every result file that exists.

        Raises DataError: a file does not hold a JSON object.
        """
        contents = {name: _read(root / s.path) for name, s in STUDIES.items() if (root / s.path).is_file()}
        for name in [name for name in contents if STUDIES[name].part]:
            contents[name] = contents[name].get(STUDIES[name].part) or {}
            if not contents[name]:
                del contents[name]
        if not (root / MANIFEST).is_file():
            return cls(contents)
        manifest = _read(root / MANIFEST)
        return cls(contents, str(manifest["model_id"]), manifest)

    def get(self, name: str) -> dict[str, Any] | None:
        """Result of a study, or None if it was not run."""
        return self._contents.get(name)

    def stale(self) -> str:
        """Warning if the held-out shapes were predicted with another model than the shipped one, else empty."""
        shapes = self.get("shapes")
        if shapes is None or shapes["model_id"] == self.model_id:
            return ""
        return f"Predicted with {shapes['model_id']}, not with {self.model_id}: {_again('shapes')}"

    def absent_groups(self) -> list[str]:
        """Groups of devices whose study is missing or incomplete."""
        devices = self.get("devices") or {"groups": {}}
        return [group for group in GROUPS if "domain" not in devices["groups"].get(group, {})]

    def missing(self) -> list[str]:
        """Names of the studies to run, in their order: missing, incomplete, or of another model."""
        lacking = {name for name in STUDIES if name not in self._contents}
        lacking |= {"devices"} if self.absent_groups() else set()
        lacking |= {"shapes"} if self.stale() else set()
        return [name for name in STUDIES if name in lacking]


def not_measured(*names: str) -> str:
    """Text in place of a table whose studies were not run."""
    return "\n".join(f"*Not measured yet: {_again(name)}*" for name in names)


def of_study(name: str) -> Callable[[Callable[[Results, dict[str, Any]], str]], Callable[[Results], str]]:
    """Decorator of a part of a document: pass it the result of a study, or have :func:`not_measured` in its place."""

    def decorate(make: Callable[[Results, dict[str, Any]], str]) -> Callable[[Results], str]:
        @functools.wraps(make)
        def part(results: Results) -> str:
            content = results.get(name)
            return not_measured(name) if content is None else make(results, content)

        return part

    return decorate


def _again(name: str) -> str:
    return f"run `{STUDIES[name].command}`."


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}", hint="delete it and run its study again") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} does not hold a JSON object", hint="delete it and run its study again")
    return content


def rounded(value: Any) -> Any:
    """Round the floats of a nested result to :data:`DIGITS` digits."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file, with one line per list item so that differences are readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _json(result) + "\n")


def _json(value: Any, depth: int = 0) -> str:
    pad = " " * (depth + 1)
    if isinstance(value, Mapping) and depth < 2 and value:
        inner = (f"{pad}{json.dumps(str(key))}: {_json(item, depth + 1)}" for key, item in value.items())
        return "{\n" + ",\n".join(inner) + "\n" + pad[1:] + "}"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return "[\n" + ",\n".join(pad + json.dumps(item) for item in value) + "\n" + pad[1:] + "]"
    return json.dumps(value)
