"""Files of a job for a borrowed GPU: part files that travel, and result files as they come home.

A job folder has ``part-NNN.zip``, ``run.py`` and ``runtime/``, which travel, and ``home/``, which stays: what the
import of the results needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdmpp.data.measure import runtime
from cdmpp.data.measure.runtime.run import FORMAT, MAX_RESULTS, MINUTES, RESULT_MIB, KitError, PartFile
from cdmpp.errors import DataError
from cdmpp.utils.files import MAX_REQUEST_BYTES, parse_json, read_bytes, read_json, read_npz
from cdmpp.utils.writing import replacing, write_text

HOME, JOB = "home", "job.json"
RUNTIME, LAUNCHER = "runtime", "run.py"
_LAUNCHER_TEXT = '''"""Measures part files on this machine's GPU: python run.py --help."""

from runtime.run import main

if __name__ == "__main__":
    raise SystemExit(main())
'''
#: Bytes of the zip format for a member, beside its content, and the share of the limit that estimates may fill.
_MEMBER_BYTES, _FILL = 300, 0.97
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Limits:
    """Limits of a lease: largest part and result file in MiB, and minutes of a call of ``run.py``."""

    part_mib: float = 15.0
    result_mib: float = RESULT_MIB
    minutes: float = MINUTES


@dataclass(frozen=True)
class Entry:
    """An item of a part."""

    item: dict[str, Any]  # JSON object with a unique "id"
    # files of the item, by name inside the part; items may share one
    members: Mapping[str, bytes] = field(default_factory=dict)


def write_parts(
    folder: Path,
    entries: Mapping[str, Sequence[Entry]],
    *,
    device: str,
    limits: Limits,
    about: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Write the part files of a job, the programs that run them, and ``home/job.json``, whose content is returned: job,
    device, parts, and ``about``.

    Earlier part files in the folder are replaced. ``entries`` by kind ("programs", "host") are in the order of
    measurement; ``settings`` are further entries of ``part.json``, by kind. An entry that exceeds the size of a part,
    and more parts than results may come back, are errors.
    """
    limit = int(limits.part_mib * 2**20)
    packed = [(kind, part) for kind, sequence in entries.items() for part in _split(sequence, limit)]
    if not packed:
        raise DataError("the job has no items", hint="export at least one program")
    if len(packed) > MAX_RESULTS:
        raise DataError(
            f"{len(packed)} parts of {limits.part_mib:g} MiB, and {MAX_RESULTS} result files come back at most",
            hint="choose a larger --part-mib, or fewer --tasks",
        )
    job = _job_id(device, entries)
    (folder / HOME).mkdir(parents=True, exist_ok=True)
    (folder / HOME / JOB).unlink(missing_ok=True)  # without it the job is incomplete
    for old in folder.glob("part-*.zip"):
        old.unlink()
    listed = []
    for number, (kind, part) in enumerate(packed):
        head = {
            "format": FORMAT,
            "job": job,
            "kind": kind,
            "part": number,
            "parts": len(packed),
            "device": device,
            "limits": {"minutes": limits.minutes, "result_mib": limits.result_mib},
            **(settings or {}).get(kind, {}),
            "items": [entry.item for entry in part],
        }
        path = folder / f"part-{number:03d}.zip"
        _write_part(path, head, part)
        if path.stat().st_size > limit:
            raise DataError(f"{path} has more than {limits.part_mib:g} MiB", hint="choose a larger --part-mib")
        listed.append({"kind": kind, "items": [entry.item["id"] for entry in part], "bytes": path.stat().st_size})
    shutil.rmtree(folder / RUNTIME, ignore_errors=True)
    shutil.copytree(runtime.__path__[0], folder / RUNTIME, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / LAUNCHER).write_text(_LAUNCHER_TEXT, encoding="utf-8")
    content = {"format": FORMAT, "job": job, "device": device, "parts": listed, **about}
    write_text(folder / HOME / JOB, json.dumps(content, indent=1))
    return content


def read_part(path: Path) -> PartFile:
    """Return a part file."""
    try:
        return PartFile(path)
    except KitError as error:
        raise DataError(str(error), hint="export the job again") from None


def read_job(folder: Path) -> dict[str, Any]:
    """Return ``home/job.json`` of a job."""
    path = folder / HOME / JOB
    if not os.path.lexists(path):
        raise DataError(
            f"{folder} is not a job of the measuring kit: it has no {HOME}/{JOB}",
            hint="cdmpp collect ... --build-only --standalone --out JOB writes one",
        )
    content = read_json(path, "export the job again", max_bytes=MAX_REQUEST_BYTES)
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise DataError(f"{path} has format {version}, not {FORMAT}", hint="use the cdmpp that wrote it")
    return dict(content)


def _split(entries: Sequence[Entry], limit: int) -> Iterator[list[Entry]]:
    """Yield parts whose estimated size is below the limit."""
    part: list[Entry] = []
    size = 0
    for entry in entries:
        members = sum(_MEMBER_BYTES + len(zlib.compress(content)) for content in entry.members.values())
        needed = members + len(zlib.compress(json.dumps(entry.item).encode()))
        if part and size + needed > limit * _FILL:
            yield part
            part, size = [], 0
        part.append(entry)
        size += needed
    if part:
        yield part


def _job_id(device: str, entries: Mapping[str, Sequence[Entry]]) -> str:
    digest = hashlib.sha256(device.encode())
    for kind, sequence in entries.items():
        for entry in sequence:
            digest.update(json.dumps([kind, entry.item], sort_keys=True).encode())
            for name, content in entry.members.items():
                digest.update(name.encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()[:32]


def _write_part(path: Path, head: Mapping[str, Any], entries: Sequence[Entry]) -> None:
    members: dict[str, bytes] = {"part.json": json.dumps(head).encode()}
    for entry in entries:
        members.update(entry.members)
    with replacing(path) as aside, zipfile.ZipFile(aside, "w") as archive:
        for name, content in members.items():
            # A fixed date: equal jobs are equal files.
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED, 9)


@dataclass(frozen=True)
class PartResults:
    """A result file."""

    path: Path
    head: dict[str, Any]  # format, job, kind, part, number of parts and items, device, unit
    machines: list[dict[str, Any]]  # description of the machine, one for each call of ``run.py``
    # Results: "id", "failure", "repeats_s" (protocol to list of seconds), "call" (index of the machine), and the fields
    # of the kind.
    items: list[dict[str, Any]]


def read_results(path: Path) -> PartResults:
    """Return a result file."""
    try:
        arrays = read_npz(read_bytes(path, MAX_REQUEST_BYTES))
        head, machines, lines = (parse_json(str(arrays[name])) for name in ("head", "machines", "items"))
        items = [{"failure": "", "repeats_s": {}, **line} for line in lines]
    except FileNotFoundError:
        raise DataError(f"{path} does not exist", hint="name the result files: DIR/*.npz") from None
    except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a result file, or is damaged: {error}", hint="copy it again") from None
    return PartResults(path, head, machines, items)
